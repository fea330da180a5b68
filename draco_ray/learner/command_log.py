"""The log of commands between the driver and the learner's workers. Every worker runs all commands in order.

The log keeps every command since the last complete checkpoint. Workers that restart after a failure load that
checkpoint and repeat the commands after it; the driver, which still waits for its result, notices only the delay.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray

from draco_ray.errors import LearnerError
from draco_ray.learner.base import Command, Failed, SaveCheckpoint, Start, Stop
from draco_ray.learner.checkpoint import Snapshot
from draco_ray.observability.logs import private_files
from draco_ray.placement import beside_the_driver


def start_command_log(workers: int, resume_from: str | None, max_failures: int, run_name: str) -> Any:
    """Start the actor on this node, where the run directory is. It holds references to samples, not samples."""
    return (
        ray.remote(CommandLog)
        .options(
            name=f"LearnerCommands@{run_name}",
            num_cpus=0,
            scheduling_strategy=beside_the_driver(),
            max_concurrency=1000,
        )
        .remote(workers, resume_from, max_failures)
    )


class CommandLog:
    """Hands each command to all workers, and their combined result to the caller of `submit`.

    It also reads and writes checkpoints for the workers, whose nodes need not see the run directory.
    """

    def __init__(self, workers: int, resume_from: str | None = None, max_failures: int = 0) -> None:
        """
        Args:
            workers: number of results that complete a command.
            resume_from: checkpoint that the first workers load; None: the untrained adapter.
            max_failures: maximum number of restarts between two checkpoints.
        """
        self._workers = workers
        self._max_failures = max_failures
        self._failures = -1
        """Number of starts since the last complete checkpoint, without the first start of the run."""
        self._last_failure = "a worker died or stalled"
        self._log: dict[int, Command] = {}
        self._results: dict[int, dict[int, Any]] = {}
        """By position, then rank."""
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._end = 0
        self._start = Start(checkpoint=resume_from, position=0)
        self._grown = asyncio.Condition()
        self._failure: str | None = None
        self._writing: asyncio.Task[None] | None = None

    async def submit(self, command: Command) -> Any:
        """Append a command to the log and wait for its result, combined over workers.

        Raises: LearnerError if a worker could not run it, or once the workers are lost for good.
        """
        if self._failure is not None:
            raise LearnerError(self._failure)
        position = self._end
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[position] = result
        self._results[position] = {}
        async with self._grown:
            self._log[position] = command
            self._end += 1
            self._grown.notify_all()
        combined = await result
        if isinstance(command, Stop) and self._writing is not None:
            await asyncio.wait([self._writing])
        return combined

    async def start(self) -> Start | None:
        """The starting point for new workers: the last complete checkpoint and the command after it.

        Called once for all workers, because they are started together.

        Returns: None after too many restarts, or after `fail`; the workers then end.
        """
        self._failures += 1
        if self._failures > self._max_failures:
            await self.fail(
                f"the learner failed {self._failures} times since the last checkpoint "
                f"(learner.max_failures={self._max_failures}), last: {self._last_failure}; see its log in the Ray "
                "dashboard"
            )
        return self._start if self._failure is None else None

    async def read_checkpoint(self, directory: str) -> Snapshot | Failed:
        """Read a checkpoint of the run directory; Failed if it is damaged."""
        try:
            return await asyncio.to_thread(Snapshot.read, Path(directory))
        except LearnerError as error:
            return Failed(message=str(error))

    async def report_failure(self, reason: str) -> None:
        """Remember why workers restart, for the message after too many restarts."""
        self._last_failure = reason

    async def next(self, position: int) -> Command:
        """The command at a position of the log, once there is one; Stop after `fail`."""
        async with self._grown:
            await self._grown.wait_for(lambda: position < self._end or self._failure is not None)
            return Stop() if self._failure is not None else self._log[position]

    async def finish(self, rank: int, position: int, boxed: tuple[Any]) -> None:
        """Take one worker's result of a command. Results of commands that are complete are ignored.

        The result is in a tuple because Ray would resolve an object reference that is itself an argument.
        """
        if position not in self._results:
            return
        results = self._results[position]
        (results[rank],) = boxed
        if len(results) < self._workers:
            return
        del self._results[position]
        command = self._log[position]
        failed = [result for result in results.values() if isinstance(result, Failed)]
        if failed:
            self._complete(position, error=LearnerError(failed[0].message))
        elif isinstance(command, SaveCheckpoint):
            self._writing = asyncio.create_task(self._write(position, command.directory, results[0]))
        else:
            self._complete(position, command.combine([results[rank] for rank in range(self._workers)]))

    async def _write(self, position: int, directory: str, snapshot: Snapshot) -> None:
        """Write a checkpoint while the workers continue; later restarts begin from it."""
        private_files()
        try:
            await asyncio.to_thread(snapshot.write, Path(directory))
        except LearnerError as error:
            self._complete(position, error=error)
            return
        except Exception as error:
            message = f"checkpoint {directory}: {type(error).__name__}: {error}"
            self._complete(position, error=LearnerError(message))
            return
        self._start = Start(checkpoint=directory, position=position + 1)
        self._failures = 0
        for done in [earlier for earlier in self._log if earlier <= position]:
            del self._log[done]
        self._complete(position)

    def _complete(self, position: int, result: Any = None, error: LearnerError | None = None) -> None:
        waiting = self._waiting.pop(position, None)
        if waiting is None or waiting.done():
            return
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(result)

    async def fail(self, message: str) -> None:
        """Give up: every waiting `submit` raises LearnerError with this message, and the workers stop.

        Only the first message is kept, since later failures follow from the first.
        """
        async with self._grown:
            self._failure = self._failure or message
            self._grown.notify_all()
        for position in list(self._waiting):
            self._complete(position, error=LearnerError(self._failure))
        self._results.clear()

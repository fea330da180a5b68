"""The log of commands between the driver and the learner's workers. Every worker runs all commands in order.

The log keeps every command since the last complete checkpoint. Workers that restart after a failure load that
checkpoint and repeat the commands after it; the driver, which still waits for its result, notices only the delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray

from draco_ray.errors import LearnerError
from draco_ray.learner.checkpoint import Snapshot
from draco_ray.observability.logs import set_private_umask
from draco_ray.placement import driver_node_affinity


class Command(NamedTuple):
    """A call of a method of `draco_ray.learner.worker.LearnerWorker`, on every worker."""

    method: str
    groups: tuple[Any, ...] = ()
    """The positional arguments: references to lists of TrainingSample."""
    options: Mapping[str, Any] = {}
    """Keyword arguments of the method, by name."""


class StartPosition(NamedTuple):
    """Where workers start, at first or after a failure."""

    checkpoint: str | None
    """Path of the checkpoint to load; None: the untrained adapter."""
    position: int
    """Position of the first command to run."""


def start_command_log(workers: int, resume_from: str | None, max_failures: int, run_name: str) -> Any:
    """Start the actor on this node, where the run directory is. It holds references to samples, not samples."""
    return (
        ray.remote(CommandLog)
        .options(
            name=f"LearnerCommands@{run_name}",
            num_cpus=0,
            scheduling_strategy=driver_node_affinity(),
            max_concurrency=1000,
        )
        .remote(workers, resume_from, max_failures)
    )


class CommandLog:
    """Hands each command to all workers, and their results to the caller of `submit`.

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
        self._log: dict[int, Command | None] = {}
        """Commands by position; None ends the workers."""
        self._results: dict[int, dict[int, Any]] = {}
        """Results by position, then by rank."""
        self._waiting: dict[int, asyncio.Future[list[Any]]] = {}
        self._end = 0
        self._start = StartPosition(checkpoint=resume_from, position=0)
        self._grown = asyncio.Condition()
        self._failure: str | None = None
        self._saving = asyncio.Lock()

    async def submit(self, command: Command | None) -> list[Any]:
        """Append a command to the log and wait for the workers' results, by rank.

        Raises: LearnerError if a worker could not run it, or once the workers are lost for good.
        """
        if self._failure is not None:
            raise LearnerError(self._failure)
        position = self._end
        self._end += 1
        self._log[position], self._results[position] = command, {}
        results = self._waiting[position] = asyncio.get_running_loop().create_future()
        async with self._grown:
            self._grown.notify_all()
        return await results

    async def save(self, directory: str) -> None:
        """Write a checkpoint of the weights after the commands so far; later restarts begin from it.

        The workers continue while it is written. Raises: LearnerError, as `submit`, or if it cannot be written.
        """
        async with self._saving:
            position = self._end
            snapshot, *_ = await self.submit(Command("snapshot"))
            set_private_umask()
            try:
                await asyncio.to_thread(snapshot.write, Path(directory))
            except LearnerError:
                raise
            except Exception as error:
                raise LearnerError(f"checkpoint {directory}: {type(error).__name__}: {error}") from error
            self._start = StartPosition(checkpoint=directory, position=position + 1)
            self._failures = 0
            self._log = {later: command for later, command in self._log.items() if later > position}

    async def stop(self) -> None:
        """End the workers after the commands so far, and wait until no checkpoint is being written."""
        with suppress(LearnerError):
            await self.submit(None)
        async with self._saving:
            pass

    async def start(self) -> StartPosition | None:
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

    async def read_checkpoint(self, directory: str) -> Snapshot | LearnerError:
        """Read a checkpoint of the run directory; returns the error if it is damaged."""
        try:
            return await asyncio.to_thread(Snapshot.read, Path(directory))
        except LearnerError as error:
            return error

    async def report_failure(self, reason: str) -> None:
        """Remember why workers restart, for the message after too many restarts."""
        self._last_failure = reason

    async def next(self, position: int) -> Command | None:
        """The command at a position of the log, once there is one; None: the worker ends."""
        async with self._grown:
            await self._grown.wait_for(lambda: position < self._end or self._failure is not None)
            return None if self._failure is not None else self._log[position]

    async def finish(self, rank: int, position: int, boxed: tuple[Any]) -> None:
        """Take one worker's result of a command; a LearnerError is raised in `submit`, since a restarted worker would
        fail at the command again. Results of commands that are complete are ignored.

        The result is in a tuple because Ray would resolve an object reference that is itself an argument.
        """
        if position not in self._results:
            return
        results = self._results[position]
        (results[rank],) = boxed
        if len(results) < self._workers:
            return
        del self._results[position]
        waiting = self._waiting.pop(position)
        failed = [result for result in results.values() if isinstance(result, LearnerError)]
        if failed:
            waiting.set_exception(failed[0])
        else:
            waiting.set_result([results[rank] for rank in range(self._workers)])

    async def fail(self, message: str) -> None:
        """Give up: every waiting `submit` raises LearnerError with this message, and the workers stop.

        Only the first message is kept, since later failures follow from the first.
        """
        async with self._grown:
            self._failure = self._failure or message
            self._grown.notify_all()
        for waiting in self._waiting.values():
            waiting.set_exception(LearnerError(self._failure))
        self._waiting.clear()
        self._results.clear()

"""The line between the driver and the learner's workers: a log of commands that every worker carries out in order.

The log is also what makes a dead worker harmless. It keeps every command since the last complete checkpoint; workers
that are started anew load that checkpoint and carry out the commands after it again, and the driver, still waiting for
its answer, notices only the delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray

from draco_ray.errors import LearnerError
from draco_ray.learner.base import Command, Failed, SaveCheckpoint, Start, Stop
from draco_ray.placement import beside_the_driver
from draco_ray.records import TrainingSample


def start_learner_feed(workers: int, resume_from: str | None, max_failures: int, run_name: str) -> Any:
    """An actor on this node that hands commands to the learner's workers; it holds references, not samples."""
    return (
        ray.remote(LearnerFeed)
        .options(
            name=f"LearnerFeed@{run_name}",
            num_cpus=0,
            scheduling_strategy=beside_the_driver(),
            max_concurrency=1000,
        )
        .remote(workers, resume_from, max_failures)
    )


class Shares:
    """Every worker's waiting samples. All workers keep the same account, and so decide alike without asking each other.

    Where the base is sharded a pass through the model takes all workers, and one that has nothing to do wastes its
    turn. So only as many micro-batches are taken as every worker has; the others wait for samples that come later.
    """

    def __init__(self, workers: int) -> None:
        """
        Args:
            workers: W, how many share the samples.
        """
        self._samples_W: list[list[TrainingSample]] = [[] for _ in range(workers)]

    def __bool__(self) -> bool:
        return any(self._samples_W)

    def add(self, samples: Sequence[TrainingSample], workers: Sequence[int]) -> None:
        """Hand each sample to a worker."""
        for sample, worker in zip(samples, workers, strict=True):
            self._samples_W[worker].append(sample)

    def take(
        self,
        micro_batches: Callable[[Sequence[TrainingSample]], list[list[int]]],
        rank: int,
        *,
        everything: bool,
    ) -> tuple[list[TrainingSample], int]:
        """Take out what is worked off now.

        Args:
            micro_batches: `LoraLearner.micro_batches`.
            rank: whose samples are returned.
            everything: leave none behind.
        Returns: the samples of `rank`, and the most micro-batches that any worker's now make.
        """
        batches_W = [micro_batches(samples) for samples in self._samples_W]
        passes = (max if everything else min)(map(len, batches_W))
        mine: list[TrainingSample] = []
        for worker, batches in enumerate(batches_W):
            samples = self._samples_W[worker]
            later = {row for batch in batches[passes:] for row in batch}
            if worker == rank:
                mine = [sample for row, sample in enumerate(samples) if row not in later]
            self._samples_W[worker] = [samples[row] for row in sorted(later)]
        return mine, passes


class LearnerFeed:
    """Hands each command to all workers and their combined answer to whoever submitted it."""

    def __init__(self, workers: int, resume_from: str | None = None, max_failures: int = 0) -> None:
        """
        Args:
            workers: how many answers make a command's answer.
            resume_from: checkpoint that the first workers load; None: the untrained adapter.
            max_failures: how often they may be started anew between two checkpoints.
        """
        self._workers = workers
        self._max_failures = max_failures
        self._failures = -1
        """Starts since the last complete checkpoint; the first of all is none."""
        self._trouble = "a worker died or stood still"
        self._log: dict[int, Command] = {}
        self._answers: dict[int, dict[int, Any]] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._end = 0
        self._start = Start(checkpoint=resume_from, position=0)
        self._grown = asyncio.Condition()
        self._failure: str | None = None

    async def submit(self, command: Command) -> Any:
        """Append a command to the log and wait for its answer, combined over workers.

        Raises: LearnerError if a worker could not carry it out, or once the workers are lost for good.
        """
        if self._failure is not None:
            raise LearnerError(self._failure)
        position = self._end
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[position] = answer
        self._answers[position] = {}
        async with self._grown:
            self._log[position] = command
            self._end += 1
            self._grown.notify_all()
        return await answer

    async def start(self) -> Start | None:
        """Where workers that start now begin: the last complete checkpoint and the command after it.

        Asked once for all of them, which are started together.

        Returns: None once workers were started anew too often, or after `fail`; they then end.
        """
        self._failures += 1
        if self._failures > self._max_failures:
            await self.fail(
                f"learner failed: {self._trouble}; {self._failures} times since the last checkpoint, "
                f"learner.max_failures={self._max_failures}; see its log in the Ray dashboard"
            )
        return self._start if self._failure is None else None

    async def trouble(self, reason: str) -> None:
        """Remember why workers will be started anew, for the message when that has happened too often."""
        self._trouble = reason

    async def next(self, position: int) -> Command:
        """The command at a position of the log, once there is one; Stop after `fail`."""
        async with self._grown:
            await self._grown.wait_for(lambda: position < self._end or self._failure is not None)
            return Stop() if self._failure is not None else self._log[position]

    async def answer(self, rank: int, position: int, boxed: tuple[Any]) -> None:
        """Take one worker's answer to a command. Repeated after a failure, it is ignored if the command is done.

        The answer comes in a tuple because Ray replaces a bare reference among an actor's arguments by its object.
        """
        if position not in self._waiting:
            return
        answers = self._answers[position]
        (answers[rank],) = boxed
        if len(answers) < self._workers:
            return
        command = self._log[position]
        failed = [result for result in answers.values() if isinstance(result, Failed)]
        if isinstance(command, SaveCheckpoint) and not failed:
            self._start = Start(checkpoint=command.directory, position=position + 1)
            self._failures = 0
            for done in [earlier for earlier in self._log if earlier <= position]:
                del self._log[done]
        del self._answers[position]
        waiting = self._waiting.pop(position)
        if waiting.done():
            return
        if failed:
            waiting.set_exception(LearnerError(failed[0].message))
        else:
            waiting.set_result(command.combine([answers[rank] for rank in range(self._workers)]))

    async def fail(self, message: str) -> None:
        """Give up: raise LearnerError with this message wherever an answer is awaited, and end the loop.

        The first message stays: what ends afterwards ends because of it.
        """
        async with self._grown:
            self._failure = self._failure or message
            self._grown.notify_all()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LearnerError(self._failure))
        self._waiting.clear()
        self._answers.clear()

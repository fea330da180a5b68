"""The groups of a training step on their way through the pipeline, and those of later ones that run ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from rich.console import Console

from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Message
from draco_ray.rollout.pool import Member, RolloutPool
from draco_ray.training.order import TaskOrder


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one training step."""

    groups: list[Group]
    work: list[asyncio.Task[Any]]
    """Each ends with a reference to the group's samples, or None."""

    async def cancel(self) -> None:
        """Cancel what is not done. Errors that follow are dropped: the caller reports the first one."""
        for task in self.work:
            task.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)


class RecordedRollouts:
    """Finished rollouts of an earlier process of this run, which are not played again."""

    def __init__(
        self, store: Any, pool: RolloutPool, steps: frozenset[int], *, group_size: int, staleness: int, console: Console
    ) -> None:
        """
        Args:
            store: the run store's actor.
            pool: which hands them out instead of playing.
            steps: of which there are some.
            group_size: G.
            staleness: versions that a rollout may be behind.
            console: where a line says how many were taken.
        """
        self._store, self._pool, self._steps = store, pool, steps
        self._group_size, self._staleness, self._console = group_size, staleness, console

    async def take_over(self, groups: Sequence[Group]) -> None:
        """Hand the pool the recorded rollouts of a step's groups."""
        step = groups[0].step
        if step not in self._steps:
            return
        nothing = ray.put(None)
        by_task = {group.task_id: group.name for group in groups}
        taken = 0
        for version in range(max(0, step - 1 - self._staleness), step):
            for task_id, rollout in await self._store.recorded.remote(step, version):
                if task_id in by_task and rollout < self._group_size:
                    trajectory, summary = self._store.trajectory_again.remote(step, task_id, rollout)
                    member = Member(rollout=rollout, trajectory=trajectory, evaluation=nothing, summary=await summary)
                    self._pool.take_over(by_task[task_id], member)
                    taken += 1
        self._console.print(f"step {step}: {taken} finished rollouts taken from the run directory")


class Batches:
    """Sends the tasks of each step into the pipeline.

    With ``train.staleness`` the rollouts of so many later steps begin as soon as those of this one leave slots free.
    They are sampled with the weights that are live then, so at most as many versions before those they are learned
    with. Which groups are a step's is known beforehand and no accident of their lengths: a step waits for its own.
    """

    def __init__(
        self,
        prompts: Mapping[str, tuple[Message, ...]],
        order: TaskOrder,
        pipeline: Pipeline,
        recorded: RecordedRollouts,
    ) -> None:
        self._prompts, self._order, self._pipeline, self._recorded = prompts, order, pipeline, recorded
        self._ahead: dict[int, Batch] = {}
        """Step -> its groups, of the steps that have begun."""

    def note(self, step: int, solved: Sequence[str], pass_rates: Mapping[str, float]) -> None:
        """Take in which tasks of a step that is done nobody failed, and each task's share of passes."""
        self._order.note(step, solved, pass_rates)

    @property
    def ahead(self) -> bool:
        """Whether a later step has begun."""
        return bool(self._ahead)

    async def take(self, step: int) -> Batch:
        """Return the step's groups; those that `run_ahead` began are taken over, others begin now."""
        return self._ahead.pop(step, None) or await self._begin(step)

    async def run_ahead(self, steps: Sequence[int]) -> None:
        """Begin these steps, where they have not begun, while the one before is judged and learned."""
        for step in steps:
            if step not in self._ahead:
                self._ahead[step] = await self._begin(step)

    async def cancel(self) -> None:
        """End what runs ahead."""
        await asyncio.gather(*(batch.cancel() for batch in self._ahead.values()))

    async def _begin(self, step: int) -> Batch:
        """Rollouts of earlier steps come first."""
        groups = [
            Group(step=step, index=index, task_id=task_id, prompt=self._prompts[task_id])
            for index, task_id in enumerate(self._order.tasks(step))
        ]
        await self._recorded.take_over(groups)
        return Batch(groups, [asyncio.create_task(self._pipeline.run(group)) for group in groups])

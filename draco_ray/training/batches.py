"""The groups of a training step on their way through the pipeline, and those of later ones that run ahead."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import numpy as np
import ray
from rich.console import Console

from draco_ray.config.schema import Order
from draco_ray.errors import ConfigError
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Message
from draco_ray.rollout.pool import FinishedRollout, RolloutPool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRules:
    """By what tasks are chosen; see `TaskOrder`."""

    per_step: int
    seed: int
    skip_solved: int | None = None
    behind: int = 0
    order: Order = "shuffled"


@dataclass(frozen=True, slots=True)
class EarlierTasks:
    """What the training tasks were, and how they were chosen, before a run was resumed with others."""

    tasks: tuple[str, ...]
    last_step: int
    """The last step that was done so."""
    rules: OrderRules


class TaskOrder:
    """A fresh shuffle every epoch; the tasks that do not fill a last batch wait for the next epoch's shuffle.

    90 tasks at 16 a step give 5 steps an epoch (appendix "Training Hyperparameters": 100 steps in 20 epochs).

    With ``skip_solved`` = n a task whose rollouts failed no criterion in n visits one after the other rests for n
    epochs, and then comes again; steps are then filled from the tasks that do not rest. Where these are too few for a
    step, nobody rests in that epoch.

    With another ``order`` than ``shuffled`` the tasks of an epoch are sorted by the pass rate that each had when it was
    last visited; those of which none is known come first, and equal ones stay as they were shuffled. Which tasks do not
    fill a last batch is still up to the shuffle: else the same ones would never be trained on.

    Tasks that were added since an earlier part of the run take part from the first epoch that begins after it; those
    that were removed are left out at once, and the epoch is that much shorter. What was chosen before by other rules
    stays chosen, and so do the visits in which a task was solved: new rules hold from the first step that they choose;
    a new ``order`` with the first epoch that begins then.

    Args:
        tasks: the training tasks as they are now.
        per_step: B, tasks a step.
        seed: of the shuffles.
        skip_solved: n; None: no task rests.
        behind: steps before a step whose verdicts it does not know yet (``train.staleness``).
        order: of the tasks of an epoch.
        earlier: what tasks and rules were in earlier parts of the run, oldest first.

    Raises:
        ConfigError: if there are fewer tasks than one step needs.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        per_step: int,
        seed: int,
        *,
        skip_solved: int | None = None,
        behind: int = 0,
        order: Order = "shuffled",
        earlier: Sequence[EarlierTasks] = (),
    ) -> None:
        if len(tasks) < per_step:
            raise ConfigError(
                f"train.prompts_per_step is {per_step}, but the training split has {len(tasks)} usable tasks: lower "
                "it, or add tasks"
            )
        self._tasks = tuple(sorted(tasks))
        self.rules = OrderRules(per_step=per_step, seed=seed, skip_solved=skip_solved, behind=behind, order=order)
        self._earlier = [replace(part, tasks=tuple(sorted(part.tasks))) for part in earlier]
        self._solved: dict[int, frozenset[str]] = {}
        self._pass_rates: dict[int, dict[str, float]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in an epoch of the tasks as they are now, in which none rests."""
        return len(self._tasks) // self.rules.per_step

    def last_step(self, epochs: int) -> int:
        """Steps of so many epochs in which no task rests."""
        if not self._earlier:
            return epochs * self.steps_per_epoch
        return sum(1 for _ in takewhile(lambda step: step[0] < epochs, self._steps(resting=False)))

    def note(self, step: int, solved: Collection[str], pass_rates: Mapping[str, float]) -> None:
        """Take in whose rollouts failed no criterion in a step that is done, and each task's share of passes in it."""
        self._solved[step] = frozenset(solved)
        self._pass_rates[step] = dict(pass_rates)

    def tasks(self, step: int) -> list[str]:
        """The B tasks of a step; steps count from 1. Those before it have been noted where the rules ask for it."""
        return next(islice(self._steps(resting=True), step - 1, None))[1]

    def _steps(self, *, resting: bool) -> Iterator[tuple[int, list[str]]]:
        """Epoch and tasks of every step from the first, each with what was known when it began."""
        epoch, left = 0, self._shuffled(0, first_step=1)
        streak: Counter[str] = Counter()
        rests_until: dict[str, int] = {}
        pass_rates: dict[str, float] = {}
        visited: list[tuple[int, list[str]]] = []
        heard = 0
        while True:
            step = len(visited) + 1
            tasks, rules = self._known(step)
            patience = rules.skip_solved if resting else None
            while heard < step - 1 - rules.behind:
                of_epoch, played = visited[heard]
                heard += 1
                pass_rates |= self._pass_rates.get(heard, {})
                for task in played:
                    streak[task] = streak[task] + 1 if task in self._solved.get(heard, ()) else 0
                    if patience is not None and streak[task] >= patience:
                        rests_until[task] = of_epoch + patience
            there = {task for task in tasks if patience is None or rests_until.get(task, -1) < epoch}
            left = [task for task in left if task in there]
            if len(left) < rules.per_step:
                epoch += 1
                shuffled = self._shuffled(epoch, first_step=step)
                awake = [task for task in shuffled if patience is None or rests_until.get(task, -1) < epoch]
                left = _sorted(awake if len(awake) >= rules.per_step else shuffled, rules, pass_rates)
            chosen, left = left[: rules.per_step], left[rules.per_step :]
            visited.append((epoch, chosen))
            yield epoch, chosen

    def _known(self, step: int) -> tuple[Sequence[str], OrderRules]:
        """The training tasks when a step began, sorted, and the rules by which its tasks were chosen."""
        found = ((part.tasks, part.rules) for part in self._earlier if step <= part.last_step)
        return next(found, (self._tasks, self.rules))

    def _shuffled(self, epoch: int, *, first_step: int) -> list[str]:
        tasks, rules = self._known(first_step)
        order = np.random.default_rng((rules.seed, epoch)).permutation(len(tasks))
        return [tasks[index] for index in order]


def _sorted(shuffled: list[str], rules: OrderRules, pass_rates: Mapping[str, float]) -> list[str]:
    """An epoch's tasks, those that fill its steps by difficulty."""
    if rules.order == "shuffled":
        return shuffled
    sign = -1.0 if rules.order == "easy_first" else 1.0
    whole = len(shuffled) - len(shuffled) % rules.per_step
    known = {task: sign * pass_rates[task] for task in shuffled if task in pass_rates}
    return sorted(shuffled[:whole], key=lambda task: known.get(task, -2.0)) + shuffled[whole:]


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
                    member = FinishedRollout(
                        rollout=rollout, trajectory=trajectory, evaluation=nothing, summary=await summary
                    )
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

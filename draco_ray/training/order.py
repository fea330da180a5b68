"""Which tasks each training step samples: seeded, a function of the steps before it, so that a run resumes in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from draco_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EarlierTasks:
    """What the training tasks were before a run was resumed with others."""

    tasks: tuple[str, ...]
    last_step: int
    """The last step that was done with them."""


class TaskOrder:
    """A fresh shuffle every epoch; the tasks that do not fill a last batch wait for the next epoch's shuffle.

    90 tasks at 16 a step give 5 steps an epoch (appendix "Training Hyperparameters": 100 steps in 20 epochs).

    With ``skip_solved`` = n a task whose rollouts failed no criterion in n visits one after the other rests for n
    epochs, and then comes again; steps are then filled from the tasks that do not rest. Where these are too few for a
    step, nobody rests in that epoch.

    Tasks that were added since an earlier part of the run take part from the first epoch that begins after it; those
    that were removed are left out at once, and the epoch is that much shorter.

    Args:
        tasks: the training tasks as they are now.
        per_step: B, tasks a step.
        seed: of the shuffles.
        skip_solved: n; None: no task rests.
        behind: steps before a step whose verdicts it does not know yet (``train.staleness``).
        earlier: what the tasks were in earlier parts of the run, oldest first.

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
        earlier: Sequence[EarlierTasks] = (),
    ) -> None:
        if len(tasks) < per_step:
            raise ConfigError(
                f"train.prompts_per_step is {per_step}, but the training split has {len(tasks)} usable tasks"
            )
        self._tasks = sorted(tasks)
        self._per_step = per_step
        self._seed = seed
        self._skip_solved, self._behind = skip_solved, behind
        self._earlier = [EarlierTasks(tuple(sorted(part.tasks)), part.last_step) for part in earlier]
        self._solved: dict[int, frozenset[str]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in an epoch of the tasks as they are now, in which none rests."""
        return len(self._tasks) // self._per_step

    def last_step(self, epochs: int) -> int:
        """Steps of so many epochs in which no task rests."""
        if not self._earlier:
            return epochs * self.steps_per_epoch
        return sum(1 for _ in takewhile(lambda step: step[0] < epochs, self._steps(None)))

    def note(self, step: int, solved: Collection[str]) -> None:
        """Take in whose rollouts failed no criterion in a step that is done."""
        self._solved[step] = frozenset(solved)

    def tasks(self, step: int) -> list[str]:
        """The B tasks of a step; steps count from 1. Those before it have been noted where ``skip_solved`` is set."""
        return next(islice(self._steps(self._skip_solved), step - 1, None))[1]

    def _steps(self, patience: int | None) -> Iterator[tuple[int, list[str]]]:
        """Epoch and tasks of every step from the first, each with what was known when it began."""
        epoch, left = 0, self._shuffled(0, first_step=1)
        streak: Counter[str] = Counter()
        rests_until: dict[str, int] = {}
        visited: list[tuple[int, list[str]]] = []
        while True:
            step = len(visited) + 1
            if patience is not None and (known := step - 1 - self._behind) >= 1:
                of_epoch, tasks = visited[known - 1]
                for task in tasks:
                    streak[task] = streak[task] + 1 if task in self._solved.get(known, ()) else 0
                    if streak[task] >= patience:
                        rests_until[task] = of_epoch + patience
            there = set(self._known(step))
            left = [task for task in left if task in there and rests_until.get(task, -1) < epoch]
            if len(left) < self._per_step:
                epoch += 1
                shuffled = self._shuffled(epoch, first_step=step)
                awake = [task for task in shuffled if rests_until.get(task, -1) < epoch]
                left = awake if len(awake) >= self._per_step else shuffled
            chosen, left = left[: self._per_step], left[self._per_step :]
            visited.append((epoch, chosen))
            yield epoch, chosen

    def _known(self, step: int) -> Sequence[str]:
        """The training tasks when a step began, sorted."""
        return next((part.tasks for part in self._earlier if step <= part.last_step), self._tasks)

    def _shuffled(self, epoch: int, *, first_step: int) -> list[str]:
        tasks = self._known(first_step)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(tasks))
        return [tasks[index] for index in order]

"""Which tasks each training step samples: seeded, a function of the steps before it, so that a run resumes in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from draco_ray.errors import ConfigError


class TaskOrder:
    """A fresh shuffle every epoch; the tasks that do not fill a last batch wait for the next epoch's shuffle.

    90 tasks at 16 a step give 5 steps an epoch (appendix "Training Hyperparameters": 100 steps in 20 epochs).

    With ``skip_solved`` = n a task whose rollouts failed no criterion in n visits one after the other rests for n
    epochs, and then comes again; steps are then filled from the tasks that do not rest. Where these are too few for a
    step, nobody rests in that epoch.

    Args:
        tasks: the training tasks.
        per_step: B, tasks a step.
        seed: of the shuffles.
        skip_solved: n; None: no task rests.
        behind: steps before a step whose verdicts it does not know yet (``train.staleness``).

    Raises:
        ConfigError: if there are fewer tasks than one step needs.
    """

    def __init__(
        self, tasks: Sequence[str], per_step: int, seed: int, *, skip_solved: int | None = None, behind: int = 0
    ) -> None:
        if len(tasks) < per_step:
            raise ConfigError(
                f"train.prompts_per_step is {per_step}, but the training split has {len(tasks)} usable tasks"
            )
        self._tasks = sorted(tasks)
        self._per_step = per_step
        self._seed = seed
        self._skip_solved, self._behind = skip_solved, behind
        self._solved: dict[int, frozenset[str]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in an epoch in which no task rests."""
        return len(self._tasks) // self._per_step

    def note(self, step: int, solved: Collection[str]) -> None:
        """Take in whose rollouts failed no criterion in a step that is done."""
        self._solved[step] = frozenset(solved)

    def tasks(self, step: int) -> list[str]:
        """The B tasks of a step; steps count from 1. Those before it have been noted where ``skip_solved`` is set."""
        if self._skip_solved is None:
            epoch, position = divmod(step - 1, self.steps_per_epoch)
            return self._shuffled(epoch)[position * self._per_step : (position + 1) * self._per_step]
        return self._played(step, self._skip_solved)

    def _played(self, step: int, patience: int) -> list[str]:
        """All steps up to ``step`` once more, with what was known when each began."""
        epoch, left = 0, self._shuffled(0)
        streak: Counter[str] = Counter()
        rests_until: dict[str, int] = {}
        visited: list[tuple[int, list[str]]] = []
        chosen: list[str] = []
        for number in range(1, step + 1):
            if (known := number - 1 - self._behind) >= 1:
                of_epoch, tasks = visited[known - 1]
                for task in tasks:
                    streak[task] = streak[task] + 1 if task in self._solved.get(known, ()) else 0
                    if streak[task] >= patience:
                        rests_until[task] = of_epoch + patience
            left = [task for task in left if rests_until.get(task, -1) < epoch]
            if len(left) < self._per_step:
                epoch += 1
                shuffled = self._shuffled(epoch)
                awake = [task for task in shuffled if rests_until.get(task, -1) < epoch]
                left = awake if len(awake) >= self._per_step else shuffled
            chosen, left = left[: self._per_step], left[self._per_step :]
            visited.append((epoch, chosen))
        return chosen

    def _shuffled(self, epoch: int) -> list[str]:
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
        return [self._tasks[index] for index in order]

"""Which tasks each training step samples: seeded, and a function of the step alone, so that a run resumes in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draco_ray.errors import ConfigError


class TaskOrder:
    """A fresh shuffle every epoch; the tasks that do not fill a last batch wait for the next epoch's shuffle.

    90 tasks at 16 a step give 5 steps an epoch (appendix "Training Hyperparameters": 100 steps in 20 epochs).

    Args:
        tasks: the training tasks.
        per_step: B, tasks a step.
        seed: of the shuffles.

    Raises:
        ConfigError: if there are fewer tasks than one step needs.
    """

    def __init__(self, tasks: Sequence[str], per_step: int, seed: int) -> None:
        if len(tasks) < per_step:
            raise ConfigError(
                f"train.prompts_per_step is {per_step}, but the training split has {len(tasks)} usable tasks"
            )
        self._tasks = sorted(tasks)
        self._per_step = per_step
        self._seed = seed

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in an epoch."""
        return len(self._tasks) // self._per_step

    def tasks(self, step: int) -> list[str]:
        """The B tasks of a step; steps count from 1."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        shuffled = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
        chosen = shuffled[position * self._per_step : (position + 1) * self._per_step]
        return [self._tasks[index] for index in chosen]

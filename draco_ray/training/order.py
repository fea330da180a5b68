"""Which tasks each training step samples: seeded, a function of the steps before it, so that a run resumes in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np

from draco_ray.config.schema import Order
from draco_ray.errors import ConfigError


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

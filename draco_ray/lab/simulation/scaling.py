"""Predictions of a recorded run's steps, and of steps of other sizes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draco_ray.errors import ConfigError
from draco_ray.lab.simulation.recorded import Group, Phase, RecordedRun, Setting, Step
from draco_ray.lab.simulation.speeds import fit
from draco_ray.lab.simulation.step import WAITS, SimulatedStep, Speeds, simulate

SIZES = (96, 1024, 16384)
"""Default sizes, in rollouts a step."""
ALLOWANCE = 0.05
"""Relative slowdown of a step up to which a resource still counts as sufficient."""
SEARCHED = 240
"""Largest size, in rollouts, whose judge resources are searched by simulation; beyond they grow in proportion."""
DRAWS = 9
"""Simulations of a recorded step, of which the median is used."""
PRECISION = 1.1
"""Factor between successive numbers in the search for sufficient resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A recorded step, and its simulation with the speeds of other steps."""

    step: Step
    simulated: SimulatedStep

    @property
    def error(self) -> float:
        """Simulated over recorded seconds, less 1."""
        return self.simulated.seconds / self.step.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Simulations of a step of one size."""

    rollouts: int
    as_set: SimulatedStep
    """With the requested setting."""
    enough: Setting
    """Sufficient resources; see `Scale.needs`."""
    unstalled: SimulatedStep
    """With ``enough``."""
    dollars: float
    """Dollars of its judge calls."""
    gpu_hours: float
    """GPU-hours of engines and learner with the requested setting."""
    enough_gpu_hours: float


def predict(run: RecordedRun, seed: int, other: RecordedRun | None = None) -> list[Prediction]:
    """Simulate every step of a run with the speeds of its other steps, or of another run with the speeds of this one.

    Judge phases are drawn from the known steps; everything else is as recorded of the predicted step.
    """
    if other and not {kind for kind, _ in _phases(other.steps)} <= {kind for kind, _ in _phases(run.steps)}:
        raise ConfigError(
            f"{other.name}: its judge was asked what the judge of {run.name} was not; compare like with like"
        )
    found = []
    for step in (other or run).steps:
        known = [each for each in run.steps if each is not step]
        speeds, random, setting = fit(known, run), np.random.default_rng((seed, step.number)), (other or run).setting
        drawn = _phases(known)
        played = []
        for _ in range(DRAWS):
            groups = []
            for group in step.groups:
                phases = {}
                for (kind, number), own in group.phases.items():
                    others = drawn[kind, own.requests > 0] or [own]
                    phases[kind, number] = others[random.integers(len(others))]
                groups.append(replace(group, phases=phases))
            played.append(play(groups, speeds, setting))
        middle = sorted(played, key=lambda each: each.seconds)[DRAWS // 2]
        found.append(Prediction(step=step, simulated=middle))
    return found


def _phases(steps: Sequence[Step]) -> dict[tuple[str, bool], list[Phase]]:
    """(Kind of judge phase, whether it sent a request) -> the phases of these steps."""
    found: dict[tuple[str, bool], list[Phase]] = defaultdict(list)
    for group in (group for step in steps for group in step.groups):
        for (kind, _), phase in group.phases.items():
            found[kind, phase.requests > 0].append(phase)
    return found


def median_error(predictions: Sequence[Prediction]) -> float:
    """Median absolute error."""
    return statistics.median(abs(each.error) for each in predictions)


def play(groups: Sequence[Group], speeds: Speeds, setting: Setting) -> SimulatedStep:
    """Simulate a step; with staleness, the median step of several successive ones."""
    steps = simulate([groups] * (6 if setting.staleness else 1), speeds, setting)
    alike = sorted(steps[2:-1] or steps, key=lambda step: step.seconds)
    return alike[len(alike) // 2]


class Scale:
    """Steps of other sizes, with groups drawn from all recorded steps."""

    def __init__(self, run: RecordedRun, setting: Setting, seed: int) -> None:
        """
        Args:
            run: source of the groups.
            setting: the requested setting.
            seed: random seed of the draws.
        """
        self._run, self.setting, self._seed = run, setting, seed
        self.speeds = fit(run.steps, run)
        self._pool = [group for step in run.steps for group in step.groups]
        self._groups = len(self._pool) / len(run.steps)
        self._updates = max(1, round(statistics.fmean(step.updates for step in run.steps)))
        self._found: dict[int, dict[str, float]] = {}

    def at(self, rollouts: int) -> Size:
        """A step of at least ``rollouts`` rollouts, in whole groups."""
        groups, enough = self._draw(rollouts), self.needs(rollouts)
        as_set, unstalled = self._play(groups, self.setting), self._play(groups, enough)
        return Size(
            rollouts=len(groups) * self.setting.group_size,
            as_set=as_set,
            enough=enough,
            unstalled=unstalled,
            dollars=sum(phase.dollars for group in groups for phase in group.phases.values()),
            gpu_hours=self._gpu_hours(self.setting, as_set),
            enough_gpu_hours=self._gpu_hours(enough, unstalled),
        )

    def needs(self, rollouts: int) -> Setting:
        """The setting with which judging and learning keep up with generation in a step of so many rollouts.

        Slots, engines and learner workers grow with the rollouts: as many for each rollout as were recorded, where
        their speed is known. Of requests and tokens a minute and of judge workers it is the least with which, all
        together, the step is at most `ALLOWANCE` longer than where nothing limits the judge.
        """
        searched = min(rollouts, SEARCHED)
        if searched not in self._found:
            self._found[searched] = self._search(searched)
        larger = self._count(rollouts) / self._count(searched)
        # Another draw may need a little more, and exceeding the tokens of a minute costs up to a minute.
        larger *= PRECISION if larger > 1 else 1
        found = {name: math.ceil(larger * number) for name, number in self._found[searched].items()}
        found["judge_workers"] = math.ceil(found["judge_workers"] / self.setting.calls_per_worker)
        unlimited = {"requests_per_minute": None, "tokens_per_minute": None}
        return replace(self._grown(rollouts), **(unlimited | found))  # type: ignore[arg-type]

    def _search(self, rollouts: int) -> dict[str, float]:
        """The smallest sufficient number of each judge resource; ``judge_workers`` counts workers of one call each."""
        groups = self._draw(rollouts)
        phases = [phase for group in groups for phase in group.phases.values()]
        most = max(1, len(phases))
        setting = replace(self._grown(rollouts), judge_workers=most, calls_per_worker=1)
        setting = replace(setting, requests_per_minute=None, tokens_per_minute=None)
        free = self._play(groups, setting).seconds
        found: dict[str, float] = {}
        totals = {
            "requests_per_minute": 60 * sum(phase.requests for phase in phases) / max(60, free),
            "tokens_per_minute": 60 * sum(phase.tokens for phase in phases) / max(60, free),
            "judge_workers": sum(phase.seconds for phase in phases) / free,
        }
        for place, (name, average) in enumerate(totals.items(), start=1):
            allowed = (1 + place / len(totals) * ALLOWANCE) * free
            number = max(1.0, average)
            while average:
                tried = replace(setting, **{name: math.ceil(number)})  # type: ignore[arg-type]
                if self._play(groups, tried).seconds <= allowed:
                    found[name], setting = number, tried
                    break
                number *= PRECISION
        return {"judge_workers": 1.0} | found

    def _grown(self, rollouts: int) -> Setting:
        recorded = self._run.setting
        larger = self._count(rollouts) / self._groups
        played = min(recorded.slots, round(self._groups * recorded.group_size))
        return replace(
            recorded,
            slots=max(1, math.ceil(larger * played)),
            engines=max(1, math.ceil(larger * recorded.engines)),
            learners=float(max(1, math.ceil(larger))),
        )

    def _draw(self, rollouts: int) -> list[Group]:
        random = np.random.default_rng((self._seed, rollouts))
        return [self._pool[index] for index in random.integers(len(self._pool), size=self._count(rollouts))]

    def _count(self, rollouts: int) -> int:
        """Number of groups of a step."""
        return math.ceil(rollouts / self.setting.group_size)

    def _play(self, groups: Sequence[Group], setting: Setting) -> SimulatedStep:
        # As many updates a step as recorded, with more groups each.
        return play(groups, self.speeds, replace(setting, minibatch=math.ceil(len(groups) / self._updates)))

    def _gpu_hours(self, setting: Setting, step: SimulatedStep) -> float:
        gpus = setting.engines * self._run.gpus_per_engine
        return (gpus + (0 if setting.colocate else setting.learners * self._run.learner_gpus)) * step.seconds / 3600


def stalled_by(step: SimulatedStep) -> str | None:
    """The resource that the longest path waits for most; None if that is less than `ALLOWANCE` of the step."""
    resource = max(WAITS, key=lambda each: step.path.get(WAITS[each], 0.0))
    return resource if step.path.get(WAITS[resource], 0.0) > ALLOWANCE * step.seconds else None

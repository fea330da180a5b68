"""What a simulation says of a recorded run: how well it foretells its steps, and what other sizes would take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draco_ray.lab.simulation.recorded import RecordedRun, RecordedStep
from draco_ray.lab.simulation.speeds import as_work, fit, timings
from draco_ray.lab.simulation.step import Simulated, SimulatedStep, simulate
from draco_ray.lab.simulation.work import WAITS, GroupWork, Setting, Speeds

SIZES = (96, 1024, 16384)
"""Rollouts a step that are asked about where none are named."""
ALLOWANCE = 0.05
"""By which a step may be longer for want of one of the judge's resources that would else be enough."""
SEARCHED = 240
"""Rollouts up to which the judge's needs are searched by simulation; beyond they grow with the rollouts."""
DRAWS = 9
"""Simulations of a recorded step, of which the middle one counts."""
PRECISION = 1.1
"""Factor to which a need is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """A recorded step, and the simulation of its rollouts and calls at speeds of the others."""

    step: RecordedStep
    simulated: SimulatedStep

    @property
    def error(self) -> float:
        """By how much the simulated seconds exceed the recorded ones, as a share of these."""
        return self.simulated.seconds / self.step.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A step of so many rollouts."""

    rollouts: int
    as_set: SimulatedStep
    """With the setting that was asked about."""
    stalls: str | None
    """The resource for which its longest path waits longest, of `WAITS`; None: it waits for nothing."""
    enough: Setting
    """With which no stage waits; see `needs`."""
    unstalled: SimulatedStep
    """The step with that."""
    dollars: float
    """Of its judge calls."""
    gpu_hours: float
    """Of the step with ``as_set``, engines and learner."""
    enough_gpu_hours: float


def foretell(run: RecordedRun, seed: int) -> list[Foretold]:
    """Every recorded step, by the speeds and the judge's seconds of the other ones."""
    return [
        _foretold(step, run, [other for other in run.steps if other is not step], run.setting, seed)
        for step in run.steps
    ]


def foretell_other(run: RecordedRun, other: RecordedRun, seed: int) -> list[Foretold]:
    """The steps of another run, with its setting, by this one's speeds and judge's seconds."""
    return [_foretold(step, run, run.steps, other.setting, seed) for step in other.steps]


def _foretold(
    step: RecordedStep, run: RecordedRun, known: Sequence[RecordedStep], setting: Setting, seed: int
) -> Foretold:
    """The median of `DRAWS` simulations at a setting, by what is known of some steps of ``run``."""
    speeds, drawn, random = fit(known, run), timings(known), np.random.default_rng((seed, step.number))
    played = []
    for _ in range(DRAWS):
        work = [as_work(group, speeds.engine, drawn, random) for group in step.groups]
        played.append(steady(simulate([work] * steps_to_play(setting), speeds, setting)))
    played.sort(key=lambda each: each.seconds)
    return Foretold(step=step, simulated=played[DRAWS // 2])


def median_error(foretold: Sequence[Foretold]) -> float:
    """Median of the errors' sizes."""
    return statistics.median(abs(each.error) for each in foretold)


class Scale:
    """A recorded run at other sizes."""

    def __init__(self, run: RecordedRun, setting: Setting, seed: int) -> None:
        """
        Args:
            run: whose groups are drawn from.
            setting: that is asked about.
            seed: of the draws.
        """
        self._run, self._setting, self._seed = run, setting, seed
        self._speeds: Speeds = fit(run.steps, run)
        self._pool = [as_work(group, self._speeds.engine) for step in run.steps for group in step.groups]
        self._groups = statistics.fmean(len(step.groups) for step in run.steps)
        self._found: dict[int, tuple[float, float, float]] = {}
        self._updates = max(1, round(statistics.fmean(step.updates for step in run.steps)))

    def at(self, rollouts: int) -> Size:
        """A step of at least so many rollouts, in whole groups."""
        work = self._draw(rollouts)
        as_set = self._step(work, self._setting)
        enough = self.needs(rollouts)
        unstalled = self._step(work, enough)
        return Size(
            rollouts=len(work) * self._setting.group_size,
            as_set=as_set,
            stalls=stalled_by(as_set),
            enough=enough,
            unstalled=unstalled,
            dollars=sum(call.dollars for group in work for call in group.calls),
            gpu_hours=self._gpu_hours(self._setting, as_set),
            enough_gpu_hours=self._gpu_hours(enough, unstalled),
        )

    def seconds(self, rollouts: int, **changed: float) -> float:
        """How long a step of so many rollouts takes, with these fields of the setting changed."""
        return self._step(self._draw(rollouts), replace(self._setting, **changed)).seconds  # type: ignore[arg-type]

    def needs(self, rollouts: int) -> Setting:
        """The setting with which judging and learning keep up with generation in a step of so many rollouts.

        Slots, engines and learner workers grow with the rollouts: as many of them a rollout as were recorded, where
        their speed is known. Of requests and tokens a minute and of judge workers it is the least with which, all
        together, the step is at most `ALLOWANCE` longer than where nothing bounds the judge.
        """
        searched = min(rollouts, SEARCHED)
        if searched not in self._found:
            self._found[searched] = self._search(searched)
        requests, tokens, calls = self._found[searched]
        larger = self._count(rollouts) / self._count(searched)
        # Another draw asks for a little more, and what exceeds a minute's tokens waits for up to a minute.
        larger *= PRECISION if larger > 1 else 1
        return replace(
            self._grown(rollouts),
            requests_per_minute=math.ceil(larger * requests) if requests else None,
            tokens_per_minute=math.ceil(larger * tokens) if tokens else None,
            judge_workers=max(1, math.ceil(larger * calls / self._setting.calls_per_worker)),
        )

    def _search(self, rollouts: int) -> tuple[float, float, float]:
        """Requests and tokens a minute, and calls under way at one time, that are enough for so many rollouts."""
        work = self._draw(rollouts)
        # Each call has a worker of its own.
        setting = replace(
            self._grown(rollouts),
            judge_workers=max(1, sum(len(group.phases) for group in work)),
            calls_per_worker=1,
            requests_per_minute=None,
            tokens_per_minute=None,
        )
        unbounded = self._play(work, setting)
        free = steady(unbounded).seconds

        def least(known: float, share: float, bounded: Callable[[float], Setting]) -> float:
            """The smallest number that is enough, which may use up so much of the allowance; ``known`` is a guess."""

            def enough(number: float) -> bool:
                return self._step(work, bounded(number)).seconds <= (1 + share * ALLOWANCE) * free

            return smallest(max(1.0, known), enough)

        requests, tokens = most_a_minute(unbounded.requests)
        if requests:
            requests = least(requests, 1 / 3, lambda n: replace(setting, requests_per_minute=n))
            setting = replace(setting, requests_per_minute=requests)
            tokens = least(tokens, 2 / 3, lambda n: replace(setting, tokens_per_minute=n))
            setting = replace(setting, tokens_per_minute=tokens)
        calls = least(most_at_once(unbounded.calls), 1.0, lambda n: replace(setting, judge_workers=math.ceil(n)))
        return requests, tokens, calls

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

    def _draw(self, rollouts: int) -> list[GroupWork]:
        random = np.random.default_rng((self._seed, rollouts))
        return [self._pool[index] for index in random.integers(len(self._pool), size=self._count(rollouts))]

    def _count(self, rollouts: int) -> int:
        """Groups of a step."""
        return math.ceil(rollouts / self._setting.group_size)

    def _play(self, work: Sequence[GroupWork], setting: Setting) -> Simulated:
        # As many updates a step as recorded, however many groups make one.
        setting = replace(setting, minibatch=math.ceil(len(work) / self._updates))
        return simulate([work] * steps_to_play(setting), self._speeds, setting)

    def _step(self, work: Sequence[GroupWork], setting: Setting) -> SimulatedStep:
        return steady(self._play(work, setting))

    def _gpu_hours(self, setting: Setting, step: SimulatedStep) -> float:
        gpus = setting.engines * self._run.gpus_per_engine
        if not setting.colocate:
            gpus += setting.learners * self._run.learner_gpus
        return gpus * step.seconds / 3600


def steps_to_play(setting: Setting) -> int:
    """Steps of which `steady` takes one: where rollouts run ahead the first, second and last are unlike the others."""
    return 6 if setting.staleness else 1


def steady(simulated: Simulated) -> SimulatedStep:
    """A step as most are: the median of those that run beside the one before and the one after."""
    alike = sorted(simulated.steps[2:-1] or simulated.steps, key=lambda step: step.seconds)
    return alike[len(alike) // 2]


def stalled_by(step: SimulatedStep) -> str | None:
    """The resource that a step's longest path waits for longest; None where that is less than `ALLOWANCE` of it."""
    resource = max(WAITS, key=lambda each: step.path.get(WAITS[each], 0.0))
    return resource if step.path.get(WAITS[resource], 0.0) > ALLOWANCE * step.seconds else None


def smallest(guess: float, enough: Callable[[float], bool]) -> float:
    """The smallest number from 1 on that is enough, to a factor of `PRECISION`; more than enough is enough.

    >>> 100 <= smallest(37.0, lambda number: number >= 100) <= 110
    True
    """
    high = guess
    while not enough(high):
        high *= 2
    low = high / 2
    while low > 1 and enough(low):
        low, high = low / 2, low
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return max(1.0, high)


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """How many spans run at one time at most; one that ends as another begins is not beside it.

    >>> most_at_once([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)])
    2
    """
    changes = sorted([(begin, 1) for begin, end in spans if end > begin] + [(end, -1) for _, end in spans])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def most_a_minute(requests: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The most requests, and the most tokens, of any 60 seconds.

    Args:
        requests: second and tokens of each.

    >>> most_a_minute([(0.0, 5.0), (30.0, 1.0), (61.0, 3.0)])
    (2.0, 6.0)
    """
    first = 0
    tokens = most = most_tokens = 0.0
    ordered = sorted(requests)
    for last, (moment, used) in enumerate(ordered):
        tokens += used
        while ordered[first][0] <= moment - 60.0:
            tokens -= ordered[first][1]
            first += 1
        most, most_tokens = max(most, last - first + 1.0), max(most_tokens, tokens)
    return most, most_tokens

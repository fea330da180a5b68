"""Speeds of a recorded run, and its steps as work that a simulation can do."""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union
from draco_ray.lab.simulation.recorded import RecordedGroup, RecordedRollout, RecordedRun, RecordedStep
from draco_ray.lab.simulation.work import (
    CallWork,
    EngineSpeed,
    GroupWork,
    LearnerSpeed,
    PhaseWork,
    RolloutWork,
    Speeds,
    TurnWork,
)
from draco_ray.records import FloatArray

SLOWDOWNS = (0.0, *np.geomspace(1e-3, 3.0, 24))
"""Of one more sequence, that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What the judge took in some steps; other steps draw from it."""

    calls: dict[str, tuple[float, ...]]
    """Phase -> seconds of the calls that were not answered from the cache."""
    overhead: dict[tuple[str, bool], tuple[float, ...]]
    """(phase, whether it asked the judge) -> seconds beside its calls. One that asked nothing may have waited for the
    reply to another's equal question."""


def fit(steps: Sequence[RecordedStep], run: RecordedRun) -> Speeds:
    """Speeds of these steps of a run."""
    return Speeds(
        engine=fit_engine([rollout for step in steps for group in step.groups for rollout in group.rollouts]),
        learner=fit_learner(steps, run),
        handover=_handover(steps, run.setting.slots),
        head=statistics.median(step.head for step in steps),
        tail=statistics.fmean(step.tail for step in steps),
    )


def fit_engine(rollouts: Sequence[RecordedRollout]) -> EngineSpeed:
    """Seconds of a turn by its tokens and by how many sequences its engine had: least squares, nothing negative."""
    sampled, read, beside, seconds = [], [], [], []
    by_engine: dict[str, list[RecordedRollout]] = defaultdict(list)
    for rollout in rollouts:
        by_engine[rollout.engine].append(rollout)
    for mine in by_engine.values():
        turns = [turn for rollout in mine for turn in rollout.turns if turn.generating > 0]
        if not turns:
            continue
        spans = np.array([(turn.began, turn.began + turn.generating) for turn in turns])
        beside.append(np.maximum(0.0, mean_running(spans) - 1))
        sampled += [turn.sampled for turn in turns]
        read += [turn.read for turn in turns]
        seconds += [turn.generating for turn in turns]
    if not seconds:
        return EngineSpeed()
    alone = np.stack([np.ones(len(seconds)), np.array(sampled, float), np.array(read, float)], axis=1)
    others, took = np.concatenate(beside), np.array(seconds)

    def fitted(slowdown: float) -> tuple[FloatArray, float]:
        weights, residual = nnls(alone * (1 + slowdown * others)[:, None], took)
        return weights, float(residual)

    near = min(range(len(SLOWDOWNS)), key=lambda place: fitted(SLOWDOWNS[place])[1])
    between = SLOWDOWNS[max(0, near - 1)], SLOWDOWNS[min(near + 1, len(SLOWDOWNS) - 1)]
    found = minimize_scalar(lambda slowdown: fitted(slowdown)[1], bounds=between, method="bounded").x
    slowdown = min(found, SLOWDOWNS[near], key=lambda each: fitted(each)[1])
    a_turn, a_sampled, a_read = (float(weight) for weight in fitted(slowdown)[0])
    return EngineSpeed(
        seconds_per_turn=a_turn,
        seconds_per_sampled_token=a_sampled,
        seconds_per_read_token=a_read,
        slowdown_per_sequence=float(slowdown),
    )


def mean_running(spans: FloatArray) -> FloatArray:
    """How many spans ran on average during each of them, itself included.

    Args:
        spans: (n, 2), start and end in seconds.

    >>> mean_running(np.array([[0.0, 2.0], [1.0, 2.0]]))
    array([1.5, 2. ])
    """
    times = np.concatenate([spans[:, 0], spans[:, 1]])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(spans)), -np.ones(len(spans))])[order]
    moments = times[order]
    running = np.cumsum(changes)[:-1]
    integral = np.concatenate([[0.0], np.cumsum(running * np.diff(moments))])
    length = spans[:, 1] - spans[:, 0]
    means: FloatArray = (np.interp(spans[:, 1], moments, integral) - np.interp(spans[:, 0], moments, integral)) / length
    return means


def fit_learner(steps: Sequence[RecordedStep], run: RecordedRun) -> LearnerSpeed:
    """Seconds a token, a sampled token more, and an update: least squares over the steps, nothing negative."""
    rows, seconds = [], []
    for step in steps:
        later = step.groups[run.setting.minibatch :]
        passes = [(1.0, group) for group in step.groups] + [(run.remember_share, group) for group in later]
        tokens = sum(share * rollout.tokens for share, group in passes for rollout in group.rollouts)
        sampled = sum(share * rollout.sampled for share, group in passes for rollout in group.rollouts)
        rows.append((tokens, sampled, step.updates))
        seconds.append(sum(end - begin for begin, end in step.learning))
    (a_token, a_sampled, an_update), _ = nnls(np.array(rows, float), np.array(seconds))
    return LearnerSpeed(
        seconds_per_token=float(a_token),
        seconds_per_sampled_token=float(a_sampled),
        remember_share=run.remember_share,
        update_seconds=float(an_update),
    )


def _handover(steps: Sequence[RecordedStep], slots: int) -> dict[str, float]:
    """Stage -> median seconds from the end of what it needs to its start at the worker."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        gaps["rollout"] += _between_rollouts(step, slots)
        ends = []
        for group in step.groups:
            for stage, gap in _gaps(group):
                gaps[stage].append(gap)
            ends.append(max([phase.ended for phase in group.phases.values()] + [r.ended for r in group.rollouts]))
        first = step.learning[0][0]
        gaps["learning"] += [first - max(end for end in ends if end <= first)] if min(ends) <= first else []
    return {stage: max(0.0, statistics.median(found)) for stage, found in gaps.items() if found}


def _between_rollouts(step: RecordedStep, slots: int) -> list[float]:
    """Seconds for which slots were free between two rollouts."""
    free: list[float] = []
    gaps = []
    for rollout in sorted((r for group in step.groups for r in group.rollouts), key=lambda rollout: rollout.began):
        if len(free) >= slots:
            gaps.append(max(0.0, rollout.began - heapq.heappop(free)))
        heapq.heappush(free, rollout.ended)
    return gaps


def _gaps(group: RecordedGroup) -> Iterable[tuple[str, float]]:
    """Of each judge phase: its start after the end of the last that it needs."""
    ended: dict[str, list[float]] = defaultdict(list)
    for (phase, _), made in group.phases.items():
        ended[phase].append(made.ended)
    rollouts = {rollout.number: rollout.ended for rollout in group.rollouts}
    for (phase, number), made in group.phases.items():
        if phase == Stage2.name:
            needs = [*ended[Stage1.name], *([rollouts[number]] if number in rollouts else [])]
        elif phase == Union.name:
            needs = ended[Stage2.name]
        elif phase == Score.name:
            needs = ended[Union.name] or list(rollouts.values())
        elif phase == Credit.name:
            needs = ended[Score.name]
        else:
            continue
        if needs:
            yield phase, made.began - max(needs)


def timings(steps: Iterable[RecordedStep]) -> Timings:
    """What the judge took in these steps."""
    groups = [group for step in steps for group in step.groups]
    calls: dict[str, list[float]] = defaultdict(list)
    overhead: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for group in groups:
        for (phase, _), made in group.phases.items():
            overhead[phase, _asks(made.work)].append(made.work.overhead)
            calls[phase] += [call.seconds for each in made.work.rounds for call in each if call.requests]
    return Timings(
        calls={phase: tuple(seconds) for phase, seconds in calls.items()},
        overhead={kind: tuple(seconds) for kind, seconds in overhead.items()},
    )


def _asks(work: PhaseWork) -> bool:
    return any(call.requests for calls in work.rounds for call in calls)


def as_work(
    group: RecordedGroup, speed: EngineSpeed, drawn: Timings | None = None, random: np.random.Generator | None = None
) -> GroupWork:
    """A recorded group as work: its tokens, environment, calls and dollars; generating by ``speed``.

    Args:
        drawn: where what the judge takes is drawn from; None: it is as recorded.
        random: draws.
    """

    def draw(own: float, from_: Sequence[float]) -> float:
        return float(random.choice(from_)) if random is not None and drawn is not None and len(from_) else own

    def phase(name: str, work: PhaseWork) -> PhaseWork:
        if drawn is None:
            return work

        def call(each: CallWork) -> CallWork:
            return replace(each, seconds=draw(each.seconds, drawn.calls.get(name, ()))) if each.requests else each

        rounds = tuple(tuple(call(each) for each in calls) for calls in work.rounds)
        return replace(work, rounds=rounds, overhead=draw(work.overhead, drawn.overhead.get((name, _asks(work)), ())))

    def rollout(each: RecordedRollout) -> RolloutWork:
        turns = tuple(
            TurnWork(
                generating=speed.alone(turn.sampled, turn.read) if turn.generating > 0 else 0.0,
                executing=turn.executing,
            )
            for turn in each.turns
        )
        return RolloutWork(
            number=each.number, turns=turns, opening=each.opening, tokens=each.tokens, sampled=each.sampled
        )

    return GroupWork(
        rollouts=tuple(rollout(each) for each in group.rollouts),
        phases={key: phase(key[0], made.work) for key, made in group.phases.items()},
    )

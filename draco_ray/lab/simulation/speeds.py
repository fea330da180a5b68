"""Fit the speeds of recorded steps, by non-negative least squares."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from draco_ray.lab.rows import group_by
from draco_ray.lab.simulation.recorded import RecordedRun, Rollout, Step
from draco_ray.lab.simulation.step import Speeds
from draco_ray.records import FloatArray

MOST_SLOWDOWN = 3.0
"""Upper bound of the fitted `Speeds.slowdown`."""


def fit_speeds(steps: Sequence[Step], run: RecordedRun) -> Speeds:
    """Fit the speeds of these steps of a run."""
    slowdown, (per_turn, per_sampled, per_read) = fit_engine([each for step in steps for each in step.rollouts])
    per_learned, per_learned_sampled, update = fit_learner(steps, run)
    return Speeds(
        per_turn=per_turn,
        per_sampled=per_sampled,
        per_read=per_read,
        slowdown=slowdown,
        per_learned=per_learned,
        per_learned_sampled=per_learned_sampled,
        remember_share=run.remember_share,
        update=update,
        handover=_handover(steps, run.setting.slots),
        head=statistics.median(step.head for step in steps),
        tail=statistics.fmean(step.tail for step in steps),
    )


def fit_engine(rollouts: Iterable[Rollout]) -> tuple[float, list[float]]:
    """Fit the slowdown per further sequence, and the seconds per turn, per sampled token and per token read.

    A turn's seconds are modelled as a linear function of its tokens, times 1 + slowdown x mean number of other turns.
    """
    by_engine = group_by(rollouts, lambda rollout: rollout.engine).values()
    played = [[turn for rollout in each for turn in rollout.turns if turn.generating] for each in by_engine]
    turns = [np.array([(t.began, t.generating, t.sampled, t.read) for t in each], float) for each in played if each]
    if not turns:
        return 0.0, [0.0, 0.0, 0.0]
    beside = np.concatenate([mean_concurrency(rows[:, 0], rows[:, 0] + rows[:, 1]) - 1 for rows in turns])
    rows = np.concatenate(turns)
    alone, seconds = np.column_stack([np.ones(len(rows)), rows[:, 2:]]), rows[:, 1]

    def fitted(slowdown: float) -> tuple[FloatArray, float]:
        return nnls(alone * (1 + slowdown * np.maximum(0.0, beside))[:, None], seconds)

    slowdown = minimize_scalar(lambda each: fitted(each)[1], bounds=(0.0, MOST_SLOWDOWN), method="bounded").x
    slowdown = float(min(0.0, slowdown, key=lambda each: fitted(each)[1]))
    return slowdown, fitted(slowdown)[0].tolist()


def mean_concurrency(began: FloatArray, ended: FloatArray) -> FloatArray:
    """For each of n intervals, the mean number of intervals that overlap it, including itself.

    >>> mean_concurrency(np.array([0.0, 1.0]), np.array([2.0, 2.0]))
    array([1.5, 2. ])
    """
    times = np.concatenate([began, ended])
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.where(order < len(began), 1.0, -1.0))[:-1]
    integral = np.concatenate([[0.0], np.cumsum(running * np.diff(times[order]))])
    spent: FloatArray = np.interp(ended, times[order], integral) - np.interp(began, times[order], integral)
    return spent / (ended - began)


def fit_learner(steps: Sequence[Step], run: RecordedRun) -> list[float]:
    """Fit the seconds per token, the extra seconds per sampled token, and the seconds per update."""
    rows = []
    for step in steps:
        # Old log-probs are computed for the groups of later minibatches.
        later = step.groups[run.setting.minibatch :]
        passes = [(1.0, group) for group in step.groups] + [(run.remember_share, group) for group in later]
        learned = [(share, rollout) for share, group in passes for rollout in group.rollouts]
        tokens, sampled = (sum(share * getattr(r, name) for share, r in learned) for name in ("tokens", "sampled"))
        rows.append((tokens, sampled, step.updates))
    seconds = [sum(end - begin for begin, end in step.learning) for step in steps]
    return nnls(np.array(rows, float), np.array(seconds))[0].tolist()


def _handover(steps: Sequence[Step], slots: int) -> dict[str, float]:
    """Stage -> median seconds from the end of its last input to its start."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        # The first rollouts find free slots, each later one takes the next slot that is given back.
        begins, given_back = (sorted(getattr(each, name) for each in step.rollouts) for name in ("began", "ended"))
        gaps["rollout"] += [began - free for began, free in zip(begins[slots:], given_back, strict=False)]
        ends, first = [], step.learning[0][0]
        for group in step.groups:
            ended: dict[object, list[float]] = defaultdict(list, {each.number: [each.ended] for each in group.rollouts})
            ended["rollout"] = [each.ended for each in group.rollouts]
            for (kind, _), phase in group.phases.items():
                ended[kind].append(phase.ended)
            ends.append(max(max(each) for each in ended.values()))
            for (kind, number), phase in group.phases.items():
                if needs := {
                    "stage2": ended["stage1"] + ended[number],
                    "union": ended["stage2"],
                    "score": ended["union"] or ended["rollout"],
                    "credit": ended["score"],
                }.get(kind):
                    gaps[kind].append(phase.began - max(needs))
        if ready := [end for end in ends if end <= first]:
            gaps["learning"].append(first - max(ready))
    return {stage: max(0.0, statistics.median(found)) for stage, found in gaps.items() if found}

"""How much discriminative dropout depends on who else is in the group.

R_i counts the criteria that some member failed, so a rollout's reward depends on the others by that alone; A_i depends
on them through the group's mean and deviation as well. Each rollout is put into groups whose other members are drawn,
with replacement, from those it was really grouped with; dropout, reward and advantage are then computed anew from the
recorded verdicts. The same groups with the criteria that survived in the run, ``advantage_deviation_fixed``, tell the
part of dropout from that of the group's statistics.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from draco_ray.algorithm.advantage import STD_EPSILON
from draco_ray.algorithm.reward import surviving_criteria
from draco_ray.lab.analysis.columns import columns
from draco_ray.lab.analysis.credit import signs
from draco_ray.lab.analysis.judged_groups import RecordedGroup, recorded_groups
from draco_ray.records import BoolArray, FloatArray, IntArray, Verdict
from draco_ray.runs.directory import RunDirectory

RESAMPLES = 200

DROPOUT = columns(
    "string: run",
    "int64: training_step",
    "string: task_id",
    "int64: rollout",
    "float64: reward reward_mean reward_deviation advantage advantage_mean advantage_deviation",
    "float64: advantage_deviation_fixed sign_flips",
    "int64: surviving",
    "float64: surviving_mean",
)
SURVIVAL = columns(
    "string: run",
    "int64: training_step group_size groups criteria",
    "float64: surviving survival",
)


def dropout_variance(
    run: RunDirectory,
    steps: Sequence[int] | None = None,
    *,
    resamples: int = RESAMPLES,
    std_epsilon: float = STD_EPSILON,
) -> pa.Table:
    """One row per rollout of a group of at least two: how R and A move under resampled members.

    Deviations are over the resamples; ``sign_flips`` is the share of them in which A is on the other side of zero, or
    becomes or ceases to be zero. The draws of a group depend on its name alone: the table is the same every time.
    """
    rows = [
        {"run": run.path.name, **row}
        for group in recorded_groups(run, steps)
        for row in resampled(group, resamples=resamples, std_epsilon=std_epsilon)
    ]
    return pa.Table.from_pylist(rows, schema=DROPOUT)


def survival_by_group_size(run: RunDirectory, steps: Sequence[int] | None = None) -> pa.Table:
    """One row per training step and group size up to the run's: how many criteria would survive, exactly.

    A criterion that m of G members fail survives in a random subset of g with probability 1 - C(G - m, g) / C(G, g).
    ``surviving`` is a mean over groups, ``survival`` the share of all criteria; groups of fewer than g do not count.
    """
    rows: list[dict[str, Any]] = []
    for step in run.steps() if steps is None else steps:
        groups = list(recorded_groups(run, [step]))
        for size in range(1, max((len(group.rollouts) for group in groups), default=0) + 1):
            large = [group for group in groups if len(group.rollouts) >= size]
            expected = math.fsum(survival(group.verdict_GK, size).sum() for group in large)
            criteria = sum(len(group.titles) for group in large)
            rows.append(
                {
                    "run": run.path.name,
                    "training_step": step,
                    "group_size": size,
                    "groups": len(large),
                    "criteria": criteria,
                    "surviving": expected / len(large),
                    "survival": expected / criteria if criteria else None,
                }
            )
    return pa.Table.from_pylist(rows, schema=SURVIVAL)


def survival(verdict_GK: IntArray, size: int) -> FloatArray:
    """Each criterion's probability to survive dropout in a random subset of ``size`` members.

    >>> survival(np.array([[1, -1], [1, 1], [-1, 1]]), 2)
    array([0.66666667, 0.66666667])
    """
    members = len(verdict_GK)
    failed_K = np.count_nonzero(verdict_GK == Verdict.FAIL, axis=0)
    return np.array([1.0 - math.comb(members - failed, size) / math.comb(members, size) for failed in failed_K])


def resampled(
    group: RecordedGroup, *, resamples: int = RESAMPLES, std_epsilon: float = STD_EPSILON
) -> list[dict[str, Any]]:
    """The rows of `dropout_variance` of one group, without ``run``; none for a group of one."""
    members = len(group.rollouts)
    if members < 2:
        return []
    rng = np.random.default_rng(zlib.crc32(group.name.encode()))
    recorded_K = surviving_criteria(group.verdict_GK)
    rows = []
    for index, rollout in enumerate(group.rollouts):
        others = np.delete(np.arange(members), index)
        drawn_BG = np.column_stack([np.full(resamples, index), rng.choice(others, (resamples, members - 1))])
        surviving_BK = (group.verdict_GK[drawn_BG] == Verdict.FAIL).any(axis=1)
        reward_B, advantage_B = _own(group.verdict_GK, drawn_BG, surviving_BK, std_epsilon)
        _, fixed_B = _own(group.verdict_GK, drawn_BG, np.tile(recorded_K, (resamples, 1)), std_epsilon)
        advantage = float(group.advantage_G[index])
        rows.append(
            {
                "training_step": group.training_step,
                "task_id": group.task_id,
                "rollout": rollout,
                "reward": float(group.reward_G[index]),
                "reward_mean": float(reward_B.mean()),
                "reward_deviation": float(reward_B.std()),
                "advantage": advantage,
                "advantage_mean": float(advantage_B.mean()),
                "advantage_deviation": float(advantage_B.std()),
                "advantage_deviation_fixed": float(fixed_B.std()),
                "sign_flips": float((signs(advantage_B) != signs(advantage)).mean()),
                "surviving": int(recorded_K.sum()),
                "surviving_mean": float(surviving_BK.sum(axis=1).mean()),
            }
        )
    return rows


def _own(
    verdict_GK: IntArray, drawn_BG: IntArray, surviving_BK: BoolArray, std_epsilon: float
) -> tuple[FloatArray, FloatArray]:
    """R and A of the first member of each of B groups: the algorithm's equations for all of them at once."""
    kept_KB = surviving_BK.T.astype(np.int64)
    passed_GB = (verdict_GK == Verdict.PASS).astype(np.int64) @ kept_KB
    failed_GB = (verdict_GK == Verdict.FAIL).astype(np.int64) @ kept_KB
    reward_BG = ((passed_GB - failed_GB) / np.maximum(passed_GB + failed_GB, 1)).T
    reward_BG = np.take_along_axis(reward_BG, drawn_BG, axis=1)
    own_B = reward_BG[:, 0]
    spread_B = np.ptp(reward_BG, axis=1) > 0.0
    standard_B = (own_B - reward_BG.mean(axis=1)) / (reward_BG.std(axis=1, ddof=1) + std_epsilon)
    return own_B, np.where(spread_B, standard_B, 0.0)

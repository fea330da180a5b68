"""What training would lose with another judge: advantages from its verdicts against those from the run's verdicts.

Covers groups in which both judges scored at least two rollouts. A rollout that the other judge did not answer is left
out for both judges.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import numpy as np
import pyarrow as pa

from draco_ray.algorithm.rules import AdvantageRule
from draco_ray.judging.phases import Score
from draco_ray.lab.rows import collect_table, grouped
from draco_ray.records import FloatArray
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row

_CALL = ("training_step", "task_id", "rollout", "phase")
"""Columns that identify a call; its retries have the same values."""


@collect_table(
    "string: run judge",
    "int64: groups rollouts",
    "float64: advantage_correlation sign_flips best_kept signal_lost dollars own_dollars",
)
def judge_loss(run: RunDirectory, replayed: pa.Table) -> Iterator[Row]:
    """A row for each judge of ``replayed``, with the columns of `draco_ray.lab.analysis.replay.REPLAYED_SCHEMA`.

    A_i, the advantage of rollout i, is computed once from the verdicts of the run and once from those of the judge.

    - ``advantage_correlation``: correlation of the two;
    - ``sign_flips``: share of rollouts for which the two have opposite signs;
    - ``best_kept``: of the groups in which the run's A_i differ, the share in which a rollout is best with both judges;
    - ``signal_lost``: of the same groups, the share in which the judge's A_i are all equal;
    - ``dollars``: cost of the archived prompts with the judge;
    - ``own_dollars``: cost of the same calls in the run, retries included.
    """
    for judge, found in grouped(replayed.to_pylist(), "judge").items():
        asked = set(map(itemgetter(*_CALL), found))
        own = run.table("judge_calls", columns=[*_CALL, "dollars"]).to_pylist()
        yield {
            "judge": judge,
            **_compared([row for row in found if row["phase"] == Score.name]),
            "dollars": sum(row["dollars"] for row in found),
            "own_dollars": sum(call["dollars"] for call in own if itemgetter(*_CALL)(call) in asked),
        }


def _compared(rows: list[Row]) -> dict[str, float | int | None]:
    mine, theirs, kept, lost = [], [], [], []
    counted = 0
    for group in grouped(rows, "training_step", "task_id").values():
        members = grouped(group, "rollout").values()
        answered = [each for each in members if all(row["verdict"] is not None for row in each)]
        if len(answered) < 2 or len({len(each) for each in answered}) > 1:
            continue
        counted += 1
        own, other = (_advantages(answered, column) for column in ("reference", "verdict"))
        mine += list(own)
        theirs += list(other)
        if np.ptp(own) > 0:
            kept.append(bool(set(np.flatnonzero(own == own.max())) & set(np.flatnonzero(other == other.max()))))
            lost.append(np.ptp(other) == 0)
    flips = [a * b < 0 for a, b in zip(mine, theirs, strict=True)]
    spread = len(mine) > 1 and np.ptp(mine) > 0 and np.ptp(theirs) > 0
    return {
        "groups": counted,
        "rollouts": len(mine),
        "advantage_correlation": float(np.corrcoef(mine, theirs)[0, 1]) if spread else None,
        "sign_flips": float(np.mean(flips)) if flips else None,
        "best_kept": float(np.mean(kept)) if kept else None,
        "signal_lost": float(np.mean(lost)) if lost else None,
    }


def _advantages(members: list[list[Row]], column: str) -> FloatArray:
    """A_i of a group from one judge's verdicts."""
    rule = AdvantageRule()
    ordered = [sorted(each, key=lambda row: int(row["criterion"])) for each in members]
    verdict_GK = np.array([[row[column] for row in each] for each in ordered], dtype=np.int8)
    return rule.advantages(rule.rewards(verdict_GK, rule.surviving(verdict_GK)))

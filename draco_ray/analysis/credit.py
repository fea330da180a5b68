"""Where step credit acts (appendix "Why step credit needs dynamic rubrics")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from draco_ray.algorithm.credit import quality_spread
from draco_ray.records import FloatArray
from draco_ray.runs.directory import RunDirectory

WINDOW_ENDS = (0.10, 0.25, 0.50, 0.75, 1.0)
"""Where the five windows end, as shares of the run: 100 steps give 1-10, 11-25, 26-50, 51-75, 76-100. The paper states
the first and the last of them; the three between are ours."""

ROUNDING = 1e-9
"""Advantages below it are 0: they are of the order of 1."""

CREDIT = pa.schema(
    [
        ("run", pa.string()),
        ("training_step", pa.int64()),
        ("rollouts", pa.int64()),
        ("inert", pa.int64()),
        ("inert_share", pa.float64()),
        ("quality_spread", pa.float64()),
    ]
)
WINDOWS = pa.schema(
    [
        ("run", pa.string()),
        ("window", pa.int64()),
        ("first_step", pa.int64()),
        ("last_step", pa.int64()),
        ("steps", pa.int64()),
        ("inert_share", pa.float64()),
        ("quality_spread", pa.float64()),
    ]
)


def credit_by_step(run: RunDirectory) -> pa.Table:
    """One row per training step: the rollouts with advantages, how many of them are inert, and the spread of Q_j.

    ``quality_spread`` is the mean over rollouts with a cited step of the standard deviation of their step qualities
    (`draco_ray.algorithm.credit.quality_spread`), null where no rollout has one.
    """
    rows = []
    for step in run.steps():
        shares = run.table("advantages", step, ["inert", "quality"]).to_pylist()
        if not shares:
            continue
        spreads = [quality_spread(_quality(share["quality"])) for share in shares]
        inert = sum(share["inert"] for share in shares)
        rows.append(
            {
                "run": run.path.name,
                "training_step": step,
                "rollouts": len(shares),
                "inert": inert,
                "inert_share": inert / len(shares),
                "quality_spread": _mean([spread for spread in spreads if not math.isnan(spread)]),
            }
        )
    return pa.Table.from_pylist(rows, schema=CREDIT)


def inert_windows(by_step: pa.Table, ends: Sequence[float] = WINDOW_ENDS) -> pa.Table:
    """The inert share and the spread of step quality, averaged over the steps of each window.

    Args:
        by_step: `credit_by_step` of one run or several.
        ends: where the windows end, as ascending shares of the run's last step.
    Returns: a row per run and window. A short run has fewer: a window that holds no step has no row.
    """
    rows: list[dict[str, Any]] = []
    records = by_step.to_pylist()
    for name in dict.fromkeys(record["run"] for record in records):
        mine = [record for record in records if record["run"] == name]
        total = max(record["training_step"] for record in mine)
        first = 1
        for number, end in enumerate(ends, start=1):
            last = round(total * end)
            inside = [record for record in mine if first <= record["training_step"] <= last]
            if inside:
                spreads = [record["quality_spread"] for record in inside if record["quality_spread"] is not None]
                rows.append(
                    {
                        "run": name,
                        "window": number,
                        "first_step": first,
                        "last_step": last,
                        "steps": len(inside),
                        "inert_share": _mean([record["inert_share"] for record in inside]),
                        "quality_spread": _mean(spreads),
                    }
                )
            first = last + 1
    return pa.Table.from_pylist(rows, schema=WINDOWS)


def push_shares(step_advantage: Sequence[float], step_tokens: Sequence[int]) -> list[float]:
    """Each step's share of its trajectory's push: |a_j| n_j over the sum, zeros when nothing is pushed.

    >>> push_shares([1.5, 0.75], [2, 4])
    [0.5, 0.5]
    """
    pushes = [abs(advantage) * tokens for advantage, tokens in zip(step_advantage, step_tokens, strict=True)]
    total = sum(pushes)
    return [push / total if total else 0.0 for push in pushes]


def signs(advantages: FloatArray | float) -> FloatArray:
    """-1, 0 or +1 of advantages; a rollout at its group's mean misses 0 by rounding, on either side.

    >>> signs(np.array([0.3, 5e-17, -5e-17, -2.0]))
    array([ 1.,  0.,  0., -1.])
    """
    values = np.asarray(advantages, dtype=float)
    return np.asarray(np.where(np.abs(values) < ROUNDING, 0.0, np.sign(values)))


def _quality(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

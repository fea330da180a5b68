"""Whether a measure moves over training: its first quarter, its last, and how often chance makes such a slope."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from draco_ray.lab.analysis.columns import columns

LEAST_STEPS = 4
"""Fewer training steps have no quarters."""
PERMUTATIONS = 10_000

TRENDS = columns(
    "string: run judge phase measure",
    "int64: steps",
    "float64: first_quarter last_quarter slope p",
)


def trends(table: pa.Table, measures: Sequence[str]) -> pa.Table:
    """One row per run, judge, phase and measure that at least `LEAST_STEPS` training steps have.

    Args:
        table: rows by ``training_step``; rows with a null there are of all steps and left out.
        measures: its columns to follow.

    Returns: ``first_quarter`` and ``last_quarter`` are means over the steps, ``slope`` is by least squares per training
        step, and ``p`` is two-sided: the share of random orders of the steps with a slope at least as steep.
    """
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        if row["training_step"] is not None:
            found[row["run"], row["judge"], row["phase"]].append(row)
    rows = []
    for (run, judge, phase), steps in found.items():
        for measure in measures:
            points = sorted((row["training_step"], row[measure]) for row in steps if row[measure] is not None)
            if len(points) >= LEAST_STEPS:
                about = {"run": run, "judge": judge, "phase": phase, "measure": measure}
                rows.append({**about, **_trend(np.array(points, dtype=float))})
    return pa.Table.from_pylist(rows, schema=TRENDS)


def _trend(points: np.ndarray) -> dict[str, Any]:
    step, value = points.T
    quarter = len(points) // 4
    centred = step - step.mean()
    slope = float(centred @ value / (centred @ centred))
    orders = np.random.default_rng(0).permuted(np.tile(value, (PERMUTATIONS, 1)), axis=1)
    # A sum in another order differs in the last digits.
    as_steep = np.abs(orders @ centred) >= abs(centred @ value) - 1e-12
    return {
        "steps": len(points),
        "first_quarter": float(value[:quarter].mean()),
        "last_quarter": float(value[-quarter:].mean()),
        "slope": slope,
        "p": float((as_steep.sum() + 1) / (PERMUTATIONS + 1)),
    }

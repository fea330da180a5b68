"""Where step credit acts (appendix "Why step credit needs dynamic rubrics")."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from draco_ray.algorithm.equations import quality_spread
from draco_ray.lab.analysis.judged_groups import RecordedGroup, recorded_groups
from draco_ray.lab.rows import collect_table, grouped, mean
from draco_ray.records import FloatArray
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row

WINDOW_ENDS = (0.10, 0.25, 0.50, 0.75, 1.0)
"""Ends of the five windows, as shares of the run: 100 steps give 1-10, 11-25, 26-50, 51-75, 76-100. The paper states
the first and the last window; the three between are our choice."""

ROUNDING = 1e-9
"""Absolute advantages below this count as 0; real ones are of the order of 1."""


@collect_table(
    "string: run",
    "int64: training_step rollouts inert",
    "float64: inert_share quality_spread quality_spread_active",
)
def credit_by_step(run: RunDirectory) -> Iterator[Row]:
    """One row per training step: the rollouts with advantages, how many of them are inert, and the spread of Q_j.

    A rollout is inert if step credit has no effect on it (`draco_ray.algorithm.equations.is_inert`).

    ``quality_spread_active`` is the paper's measure: the standard deviation of a rollout's step qualities
    (`draco_ray.algorithm.equations.quality_spread`), averaged over rollouts on which credit is not inert.
    ``quality_spread`` averages over all rollouts with a cited step. Null if there is no such rollout.
    """
    for step in run.steps():
        shares = run.table("advantages", step, ["inert", "quality"]).to_pylist()
        if not shares:
            continue
        # A missing quality becomes NaN.
        spreads = [(share["inert"], quality_spread(np.array(share["quality"], dtype=float))) for share in shares]
        known = [(inert, spread) for inert, spread in spreads if not math.isnan(spread)]
        inert = sum(share["inert"] for share in shares)
        yield {
            "training_step": step,
            "rollouts": len(shares),
            "inert": inert,
            "inert_share": inert / len(shares),
            "quality_spread": mean([spread for _, spread in known]),
            "quality_spread_active": mean([spread for inert, spread in known if not inert]),
        }


@collect_table(
    "string: run",
    "int64: window first_step last_step steps",
    "float64: inert_share quality_spread quality_spread_active",
)
def inert_windows(by_step: pa.Table) -> Iterator[Row]:
    """The inert share and the spread of step quality, averaged over the steps of each window.

    Args:
        by_step: `credit_by_step` of one run or several.
    Returns: a row per run and window. In a short run, windows without a step have no row.
    """
    for name, mine in grouped(by_step.to_pylist(), "run").items():
        total = max(record["training_step"] for record in mine)
        first = 1
        for number, end in enumerate(WINDOW_ENDS, start=1):
            last = round(total * end)
            inside = [record for record in mine if first <= record["training_step"] <= last]
            if inside:
                yield {
                    "run": name,
                    "window": number,
                    "first_step": first,
                    "last_step": last,
                    "steps": len(inside),
                    **{
                        name: mean(record[name] for record in inside if record[name] is not None)
                        for name in ("inert_share", "quality_spread", "quality_spread_active")
                    },
                }
            first = last + 1


@collect_table(
    "string: run",
    "int64: training_step steps uncited",
    "float64: citations_mean citations_median ten_or_more_share",
)
def citations_a_step(run: RunDirectory) -> Iterator[Row]:
    """How many surviving criteria cite a step (appendix "Significance of each term"): a row per training step.

    Only rollouts whose credit call named steps are counted. Mean, median and the share of ten or more are over cited
    steps; ``uncited`` counts the other steps. The last row, without a training step, covers the whole run.
    """
    whole: list[int] = []
    for step in run.steps():
        if counts := [count for group in recorded_groups(run, [step]) for count in _citation_counts(group)]:
            yield _citation_row(step, counts)
            whole += counts
    if whole:
        yield _citation_row(None, whole)


def _citation_counts(group: RecordedGroup) -> Iterator[int]:
    """The number of surviving criteria that cite each step of each credited rollout."""
    for given, tokens_M in zip(group.attributions, group.tokens_GM, strict=True):
        attributions = given if isinstance(given, tuple) else ()
        counting = [each for each in attributions if each.verdict and group.survived_K[each.criterion]]
        if cited := Counter(step for each in counting for step in each.steps):
            yield from (cited[step] for step in range(1, len(tokens_M) + 1))


def _citation_row(training_step: int | None, counts: Sequence[int]) -> Row:
    cited = [count for count in counts if count]
    return {
        "training_step": training_step,
        "steps": len(counts),
        "uncited": len(counts) - len(cited),
        "citations_mean": mean(cited),
        "citations_median": float(np.median(cited)) if cited else None,
        "ten_or_more_share": mean([float(count >= 10) for count in cited]),
    }


def push_shares(step_advantage_M: ArrayLike, tokens_M: ArrayLike) -> FloatArray:
    """Each step's share of its trajectory's push: |a_j| n_j divided by the sum; zeros if the sum is 0.

    >>> push_shares([1.5, 0.75], [2, 4])
    array([0.5, 0.5])
    """
    push_M = np.abs(np.asarray(step_advantage_M, dtype=float)) * np.asarray(tokens_M)
    total = push_M.sum()
    return np.asarray(push_M / total if total else push_M)


def signs(advantages: FloatArray | float) -> FloatArray:
    """Signs of advantages: -1, 0 or +1. Rounding may leave a rollout at its group's mean slightly off 0.

    >>> signs(np.array([0.3, 5e-17, -5e-17, -2.0]))
    array([ 1.,  0.,  0., -1.])
    """
    values = np.asarray(advantages, dtype=float)
    return np.asarray(np.where(np.abs(values) < ROUNDING, 0.0, np.sign(values)))

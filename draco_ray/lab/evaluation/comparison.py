"""Is one setting better than another on the same tasks? Paired by task, exchanged by scenario.

The statistic is the mean over tasks of the difference of the two settings' per-task means (over runs and checkpoints).
Tasks of a scenario share its difficulty, so whole scenarios are resampled (bootstrap interval) and whole scenarios
change sides (permutation test: under the null hypothesis the two settings' labels are exchangeable within a scenario).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.lab.evaluation.intervals import Interval, clustered_bootstrap

PERMUTATIONS = 10_000
EXACT_CLUSTERS = 12
"""Up to so many clusters all 2^n assignments are enumerated instead of drawn."""
_BATCH = 1_000
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``one`` minus ``other`` on one split."""

    one: str
    other: str
    split: str
    difference: Interval
    """Shares, with the bootstrap interval over scenarios."""
    p_value: float
    """Two-sided, permutation."""
    adjusted_p: float
    """After Holm's correction over all comparisons of the same report."""
    tasks: int
    clusters: int
    protocols: tuple[str, ...] = ()
    """Limits and simulators that were not the same for both."""


def permutation_p_value(
    differences: Mapping[str, float],
    cluster: Callable[[str], str],
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> float:
    """Two-sided p-value of a mean paired difference under sign changes of whole clusters.

    Exact for at most `EXACT_CLUSTERS` clusters; otherwise from random assignments, the observed one counted among
    them, so that it is never 0.

    Raises:
        ValueError: there are no differences.
    """
    if not differences:
        raise ValueError("no differences to test")
    names = {name: index for index, name in enumerate(dict.fromkeys(map(cluster, differences)))}
    sum_C = np.zeros(len(names))
    for key, value in differences.items():
        sum_C[names[cluster(key)]] += value
    observed = abs(sum_C.sum()) - _ROUNDING
    if len(names) <= EXACT_CLUSTERS:
        bits_BC = (np.arange(2 ** len(names))[:, None] >> np.arange(len(names))) & 1
        return float(np.mean(np.abs((1 - 2 * bits_BC) @ sum_C) >= observed))
    random = np.random.default_rng(seed)
    extreme, left = 0, permutations
    while left:
        size = min(left, _BATCH)
        signs_BC = 1 - 2 * random.integers(0, 2, (size, len(names)))
        extreme += int(np.sum(np.abs(signs_BC @ sum_C) >= observed))
        left -= size
    return (extreme + 1) / (permutations + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: the i-th smallest of m times m - i + 1, made monotone, at most 1."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def paired_difference(
    one: Mapping[str, float], other: Mapping[str, float], cluster: Callable[[str], str]
) -> tuple[Interval, float]:
    """Mean difference of two settings' per-task means with its bootstrap interval, and the permutation p-value.

    Raises:
        ValueError: they are not of the same tasks.
    """
    if one.keys() != other.keys():
        raise ValueError(f"{len(one.keys() ^ other.keys())} tasks are in one of the two only")
    differences = {task: one[task] - other[task] for task in one}
    return clustered_bootstrap(differences, cluster), permutation_p_value(differences, cluster)

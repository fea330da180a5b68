"""Bootstrap intervals that resample whole clusters: tasks of one scenario share its difficulty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its percentile interval, in the units of the values."""

    mean: float
    low: float
    high: float


def clustered_bootstrap(
    values: Mapping[str, float],
    cluster: Callable[[str], str],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean over all values, and a percentile interval of that mean under resampling of clusters with replacement.

    Clusters keep their size, so the resampled mean is a ratio of two sums. One cluster alone tells nothing of the
    spread between clusters: its interval is the whole line.

    Args:
        values: one per task (or scenario).
        cluster: key of ``values`` -> its cluster.
        level: coverage, between 0 and 1.
        resamples: bootstrap samples.
        seed: the same seed gives the same interval.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to take the mean of")
    names = {name: index for index, name in enumerate(dict.fromkeys(map(cluster, values)))}
    sum_C, size_C = np.zeros(len(names)), np.zeros(len(names))
    for key, value in values.items():
        sum_C[names[cluster(key)]] += value
        size_C[names[cluster(key)]] += 1
    mean = float(sum_C.sum() / size_C.sum())
    if len(names) < 2:
        return Interval(mean, -np.inf, np.inf)
    drawn_BC = np.random.default_rng(seed).integers(0, len(names), (resamples, len(names)))
    means_B = sum_C[drawn_BC].sum(axis=1) / size_C[drawn_BC].sum(axis=1)
    low, high = np.quantile(means_B, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))

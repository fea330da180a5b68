"""Intervals of means over scenarios, with good coverage for few scenarios and for rates near 0 and 1.

Tasks of a scenario share its difficulty, so the scenario is the sampling unit (the cluster). A rate's interval is
that of Korn and Graubard (1998): Clopper and Pearson's, at the number of independent trials that would have the
clustered variance. The interval of a difference of two rates is computed from the limits of both and their correlation
over scenarios (MOVER, Zou and Donner 2008). Means without bounds (turns) use Student's t. With several training seeds,
the variance of a mean is the sum of the variances over scenarios and over seeds, with Satterthwaite's degrees of
freedom. `make bench-intervals` simulates the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from draco_ray.algorithm.distributions import beta_quantile, student_cdf, student_quantile

CONFIDENCE_LEVEL = 0.95
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its interval, in the units of the values; the bounds may be infinite."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredMean:
    """A mean of clustered values, from one or several training seeds, with its uncertainty."""

    mean: float
    influence: Mapping[str, float]
    """Cluster -> its influence on the mean, in the units of the values. The influences have mean 0, and their variance
    divided by the number of clusters is `cluster_variance`."""
    seed_variance: float
    """Variance of the mean over seeds; 0 with one seed, which cannot show it."""
    seeds: int
    trials: float
    """Number of observations behind the mean: the upper limit of the effective sample size."""

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return len(self.influence)

    @property
    def cluster_variance(self) -> float:
        """Variance of the mean over clusters; infinite for one cluster."""
        return _variance(list(self.influence.values())) / self.clusters if self.clusters > 1 else math.inf

    @property
    def variance(self) -> float:
        """Variance of the mean; slightly too large, since variance shared by seeds and clusters is counted twice."""
        return self.cluster_variance + self.seed_variance

    @property
    def degrees(self) -> float:
        """Degrees of freedom of ``variance``."""
        parts = [(self.cluster_variance, self.clusters - 1), (self.seed_variance, self.seeds - 1)]
        return satterthwaite(parts)


def clustered_mean(
    seeds: Sequence[Mapping[str, float]], cluster: Callable[[str], str], *, trials: float | None = None
) -> ClusteredMean:
    """Mean over all values and seeds.

    Args:
        seeds: for each training seed, a value per task (or scenario); all seeds have the same tasks.
        cluster: key of the values -> its cluster.
        trials: number of observations behind the mean; None counts one per value.

    Raises:
        ValueError: there are no values, or the seeds have different keys.
    """
    if not seeds or not seeds[0]:
        raise ValueError("no values, so no mean can be computed")
    keys = list(seeds[0])
    if any(values.keys() != seeds[0].keys() for values in seeds):
        raise ValueError("the seeds were measured on different tasks")
    value_GK = np.array([[values[key] for key in keys] for values in seeds])
    names = {name: index for index, name in enumerate(dict.fromkeys(map(cluster, keys)))}
    place_K = np.array([names[cluster(key)] for key in keys])
    sum_C = np.bincount(place_K, value_GK.mean(axis=0), len(names))
    size_C = np.bincount(place_K, minlength=len(names))
    mean_G = value_GK.mean(axis=1)
    mean = float(mean_G.mean())
    influence_C = (sum_C - mean * size_C) / size_C.mean()
    return ClusteredMean(
        mean=mean,
        influence=dict(zip(names, influence_C.tolist(), strict=True)),
        seed_variance=_variance(mean_G.tolist()) / len(seeds) if len(seeds) > 1 else 0.0,
        seeds=len(seeds),
        trials=float(value_GK.size if trials is None else trials),
    )


def rate_interval(rate: ClusteredMean) -> Interval:
    """Korn and Graubard's interval of a mean of values in [0, 1]; infinite for one cluster.

    The interval's width is never zero: if all values are equal, the effective sample size is the number of clusters.
    """
    if rate.clusters < 2:
        return Interval(rate.mean, -math.inf, math.inf)
    limits = bounded_limits(rate.mean, rate.variance, degrees=rate.degrees, clusters=rate.clusters, trials=rate.trials)
    return Interval(rate.mean, *limits)


def rate_difference(one: ClusteredMean, other: ClusteredMean) -> Interval:
    """MOVER's interval of the difference of two rates over the same clusters; infinite for one cluster.

    The correlation over clusters is limited to 1 - 2 / clusters, since settings that agree on every observed scenario
    may differ on the next.

    Raises:
        ValueError: the two means are not over the same clusters.
    """
    # Var(X - Y) = Var(X) + Var(Y) - 2 Cov(X, Y), over the choice of clusters.
    covariance = (one.cluster_variance + other.cluster_variance - _difference_variance(one, other)) / 2
    mean = one.mean - other.mean
    if one.clusters < 2:
        return Interval(mean, -math.inf, math.inf)
    first, second = rate_interval(one), rate_interval(other)
    spread = math.sqrt(one.variance * other.variance)
    correlation = min(covariance / spread, 1 - 2 / one.clusters) if spread > _ROUNDING**2 else 0.0
    return Interval(
        mean,
        max(-1.0, mean - _joined(first.mean - first.low, second.high - second.mean, correlation)),
        min(1.0, mean + _joined(first.high - first.mean, second.mean - second.low, correlation)),
    )


def mean_interval(measured: ClusteredMean) -> Interval:
    """Student's t interval of a mean of unbounded values, such as turns.

    The limits are infinite if there is only one cluster or if the variance of the mean is zero.
    """
    return _student(measured.mean, measured.variance, measured.degrees)


def mean_difference(one: ClusteredMean, other: ClusteredMean) -> Interval:
    """Student's t interval of the difference of two means of unbounded values, paired by cluster.

    The limits are infinite if there is only one cluster or if the variance of the difference is zero.

    Raises:
        ValueError: the two means are not over the same clusters.
    """
    variance, degrees = paired_variance(one, other)
    return _student(one.mean - other.mean, variance, degrees)


def paired_variance(one: ClusteredMean, other: ClusteredMean) -> tuple[float, float]:
    """Variance of the difference of two means over the same clusters, and its degrees of freedom.

    Raises:
        ValueError: the two means are not over the same clusters.
    """
    parts = [
        (_difference_variance(one, other), one.clusters - 1),
        (one.seed_variance, one.seeds - 1),
        (other.seed_variance, other.seeds - 1),
    ]
    return sum(variance for variance, _ in parts), satterthwaite(parts)


def student_p_value(difference: float, variance: float, degrees: float) -> float:
    """Two-sided p-value of Student's test that ``difference`` is 0; 1 if the variance is zero or unknown."""
    if variance <= _ROUNDING**2 or not math.isfinite(variance):
        return 1.0
    return 2 * student_cdf(-abs(difference) / math.sqrt(variance), degrees)


def bounded_limits(
    estimate: float,
    variance: float,
    *,
    clusters: int,
    degrees: float | None = None,
    trials: float = math.inf,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float]:
    """Korn and Graubard's limits of an estimate that cannot leave ``bounds``.

    Args:
        estimate: a value within ``bounds``.
        variance: variance of the estimate.
        clusters: number of clusters from which ``variance`` was estimated.
        degrees: degrees of freedom of ``variance``; None is one less than ``clusters``.
        trials: upper limit of the effective sample size.
        bounds: smallest and largest possible value.
    """
    least, largest = bounds
    share = min(1.0, max(0.0, (estimate - least) / (largest - least)))
    room, variance = share * (1 - share), variance / (largest - least) ** 2
    if room <= _ROUNDING:
        # At a bound the values have no spread: the effective sample size is the number of clusters.
        share, effective = float(round(share)), float(clusters)
    else:
        effective = min(room / variance if variance > _ROUNDING**2 else math.inf, max(trials, clusters))
        effective = effective if math.isfinite(effective) else float(clusters)
    tail = (1 - CONFIDENCE_LEVEL) / 2
    student = student_quantile(clusters - 1 if degrees is None else degrees, 1 - tail)
    effective *= (NormalDist().inv_cdf(1 - tail) / student) ** 2 if room > _ROUNDING else 1.0
    events = share * effective
    low = 0.0 if share == 0 else beta_quantile(events, effective - events + 1, tail)
    high = 1.0 if share == 1 else beta_quantile(events + 1, effective - events, 1 - tail)
    return least + low * (largest - least), least + high * (largest - least)


def satterthwaite(parts: Sequence[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum of estimated variances; ``parts`` are (variance, degrees) pairs."""
    total = sum(variance for variance, _ in parts)
    weighed = sum(variance**2 / degrees for variance, degrees in parts if degrees > 0 and variance > 0)
    if weighed <= 0 or not math.isfinite(total):
        return max(1.0, parts[0][1])
    return max(1.0, total**2 / weighed)


def _student(mean: float, variance: float, degrees: float) -> Interval:
    if variance <= _ROUNDING**2 or not math.isfinite(variance):
        return Interval(mean, -math.inf, math.inf)
    half = student_quantile(degrees, (1 + CONFIDENCE_LEVEL) / 2) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def _joined(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one**2 + other**2 - 2 * correlation * one * other))


def _difference_variance(one: ClusteredMean, other: ClusteredMean) -> float:
    """Variance of the difference of two means over the choice of clusters; infinite for one cluster."""
    if one.influence.keys() != other.influence.keys():
        raise ValueError("the two means were measured on different scenarios")
    differences = [one.influence[name] - other.influence[name] for name in one.influence]
    return _variance(differences) / one.clusters if one.clusters > 1 else math.inf


def _variance(values: Sequence[float]) -> float:
    return float(np.var(values, ddof=1))

"""Whether the judge that trains parts from a held-out judge: a sign that the policy exploits the former.

The divergence of a group is the trained judge's pass share less the held-out judge's, on the same rollouts. Two judges
may always differ; a rise since the start is what tells. Every step compares the last 1, 2, 4, ... steps with all before
them by Welch's test, one-sided, groups being the sampling unit. The level falls as 1 / step, so that the levels of the
first thousand steps add up to `LEVEL`. A step's comparisons share most of their data and are not corrected for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.algorithm.distributions import student_cdf, student_quantile

LEVEL = 0.05
"""Sum of the levels of all steps."""
HARMONIC = 7.5
"""Sum of 1 / step over a thousand steps."""
FLOOR = 0.05
"""Least standard deviation of a group's divergence, so that a few equal groups do not count as certain."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The rise of the divergence that is the strongest evidence, as a share in [-2, 2]."""

    steps: int
    """Number of last steps that are compared with those before."""
    rise: float
    low: float
    high: float
    """Its 95 % interval, of this comparison alone."""
    significant: bool
    """Whether it is above 0 at the level that the step may spend."""


def drift(steps: Sequence[Sequence[float]]) -> Drift | None:
    """The drift after the last step; None before two steps have two groups each.

    Args:
        steps: for each training step the divergence of each of its groups, in [-1, 1]; a step may have none.

    >>> drift([[0.0, 0.1, 0.0, 0.1]] * 3 + [[0.6, 0.5, 0.6, 0.5]]).significant
    True
    >>> drift([[0.6, 0.5, 0.6, 0.5]] * 4).significant
    False
    """
    windows = [2**power for power in range(len(steps).bit_length()) if 2**power < len(steps)]
    compared = []
    for window in windows:
        parts = steps[:-window], steps[-window:]
        before, last = (np.array([each for step in part for each in step], dtype=float) for part in parts)
        if min(len(before), len(last)) >= 2:
            compared.append((*_welch(before, last), window))
    if not compared:
        return None
    probability, rise, low, high, window = min(compared)
    level = LEVEL / (HARMONIC * len(steps))
    return Drift(window, rise, low, high, probability < level)


def _welch(before: np.ndarray, last: np.ndarray) -> tuple[float, float, float, float]:
    """One-sided p-value, difference of the means, and its 95 % interval."""
    parts = [max(float(each.var(ddof=1)), FLOOR**2) / len(each) for each in (before, last)]
    error, rise = math.sqrt(sum(parts)), float(last.mean() - before.mean())
    degrees = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (before, last), strict=True))
    half = student_quantile(degrees, 0.975) * error
    return 1 - student_cdf(rise / error, degrees), rise, rise - half, rise + half

"""Whether the judge that trains parts from a held-out judge: a sign that the policy exploits the former.

The divergence is the trained judge's pass share less the held-out judge's, averaged over the rollouts that both scored.
Two judges may always differ; a rise since the run's beginning is what tells. The fewest first steps with `LEAST` groups
are compared with the fewest last steps with as many by Welch's test, one-sided. Groups are the sampling unit, weighted
by their rollouts. Every step is a look, the k-th at the level `LEVEL` / (7.5 k): over 1,000 looks that adds up to
`LEVEL`. A rise has harmless causes, too, if the judges differ on a kind of rollout that becomes more frequent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.algorithm.distributions import student_cdf, student_quantile

LEVEL, HARMONIC = 0.05, 7.5
"""Most probability of a flag in 1,000 looks at a run without a rise; sum of 1 / k over as many."""
LEAST = 96
"""Least number of groups on either side of a comparison."""
FLOOR = 0.05
"""Least standard deviation of a group's divergence, so that equal groups do not count as certain."""

Group = Sequence[float]
"""Divergence of a group, in [-1, 1], and number of its rollouts that both judges scored."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The rise of the divergence from the first steps to the last ones, as a share in [-2, 2]."""

    rise: float
    low: float
    high: float
    """Its 95 % interval, of this look alone."""
    significant: bool
    """Whether it is above 0 at the level of this look."""


def drift(steps: Sequence[Sequence[Group]]) -> Drift | None:
    """The drift after the last of ``steps``, each a list of groups, perhaps empty; None while there are too few.

    >>> drift([[(0.0, 1), (0.1, 2)] * 48, [(0.5, 1), (0.6, 2)] * 48]).significant
    True
    >>> drift([[(0.5, 1), (0.6, 2)] * 48] * 2).significant
    False
    """
    first, last = _fewest(steps), _fewest(steps[::-1])
    look = len(steps) - 2 * first + 1
    if first + last > len(steps) or look < 1:
        return None
    means, errors, counts = zip(*(_mean(part) for part in (steps[:first], steps[-last:])), strict=True)
    rise, error = means[1] - means[0], math.sqrt(sum(errors))
    degrees = sum(errors) ** 2 / sum(each**2 / (count - 1) for each, count in zip(errors, counts, strict=True))
    half = student_quantile(degrees, 0.975) * error
    significant = 1 - student_cdf(rise / error, degrees) < LEVEL / (HARMONIC * look)
    return Drift(rise, rise - half, rise + half, significant)


def _fewest(steps: Sequence[Sequence[Group]]) -> int:
    """How many of the first steps have `LEAST` groups; one more than there are if all have fewer."""
    groups = np.cumsum([len(step) for step in steps])
    return int(np.searchsorted(groups, LEAST)) + 1


def _mean(steps: Sequence[Sequence[Group]]) -> tuple[float, float, int]:
    """Mean over rollouts, its squared standard error by groups, and the number of groups."""
    divergence_N, rollouts_N = np.array([group for step in steps for group in step], dtype=float).T
    count, total = len(rollouts_N), rollouts_N.sum()
    mean = float(divergence_N @ rollouts_N / total)
    spread = float(np.square(rollouts_N * (divergence_N - mean)).sum()) / total**2 * count / (count - 1)
    return mean, max(spread, FLOOR**2 / count), count

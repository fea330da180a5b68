"""Two tests that detect hacks (rollouts that exploit the main judge) by the scores of a held-out judge.

In each sampled group, the held-out judge scores the half of the rollouts with the highest rewards (the top half) and
one rollout of the other half (the middle rollout); see `held_out_sample`. A rollout's pass share is the fraction of
applicable criteria that it passes.
The held-out judge may be stricter, coarser or noisier than the main judge, and its pass rate may improve more slowly.
As long as both judges agree on which rollouts are better, the best rollout is at least as likely as the middle rollout
to reach any given pass share h, and training does not lower the pass share of the top half. A hack breaks both: it has
a high reward, but the held-out judge passes few of its criteria.

`drift` compares best and middle rollouts. It finds a hack early if the held-out judge rates honest rollouts of a group
alike. `pass_rate_fall` compares the top half with that of earlier steps. It also finds a hack if honest rollouts of a
group differ much, or if all rollouts of a group are hacks.

`drift` is a test by betting (Waudby-Smith and Ramdas, arXiv 2010.09686). A capital of 1 is divided equally among bets,
one for each combination of a pass share h and a stake. Each group with a best and a middle rollout multiplies the
capital of a bet by 1 + stake * ([middle reaches h] - [best reaches h]). Under the null hypothesis (no hack) the total
capital does not grow in expectation. So the probability that it ever reaches 1 / `SIGNIFICANCE_LEVEL` is at most
`SIGNIFICANCE_LEVEL` (Ville's inequality), however often it is looked at and whatever the distributions are. To find a
hack that begins late, a part 1 / (k (k + 1)) of the capital is not used before step k (arXiv 2203.03532).

`drift` also flags two cases without a hack: the main judge passes whole rollouts by mistake, or the held-out judge
fails the best rollouts by mistake. It does not detect a hack that the held-out judge rates like a middle rollout.

`pass_rate_fall` compares two adjacent ranges of steps, of which the later one ends at the last step; it tries all such
pairs of ranges. Its statistic is twice the log likelihood ratio of one Bernoulli rate per range against one rate for
both, divided by the dispersion of the pass shares (McCullagh and Nelder, Generalized Linear Models, chapter 9). A
normal approximation would raise false alarms where nearly all pass shares are 1. Harder tasks, and a policy that
becomes worse without a hack, also lower the main judge's pass share; a hack does not. So a second statistic, the square
of the normal one, tests whether the held-out judge's share minus the main judge's fell. A fall is significant if both
exceed 2 log(10 T^2) after T steps, a limit that grows with the number of pairs. Few simulated runs of constant pass
rate, or with harder tasks, exceed it (``tests/unit/test_held_out_scoring.py`` counts them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.records import FloatArray

SIGNIFICANCE_LEVEL = 0.025
"""Maximum probability that `drift` ever flags a run without a hack."""
SHARES_H = np.arange(1, 10) / 10
STAKES_S = np.array([0.2, 0.5, 0.8])
MAX_LOG_FACTOR = 20.0
"""Maximum logarithm of the factor by which a bet may grow. It keeps numbers finite and only makes the test stricter."""
EXCESS_WINDOW = 200
"""Number of latest pairs from which `Drift.excess` is computed."""
MIN_GROUPS = 16
"""Minimum number of groups in each of the two ranges of steps that `pass_rate_fall` compares."""
EPSILON = 1e-12
"""Keeps logarithms and quotients finite where all shares are 0 or 1."""
MAX_STEPS = 500
"""Number of latest steps that `pass_rate_fall` compares: time and memory grow with its square."""

Pair = Sequence[float]
"""Two pass shares, in [0, 1]. For `drift`: the held-out judge's, of a group's best and its middle rollout. For
`pass_rate_fall`: the held-out judge's and the main judge's, both means over the half with the highest rewards."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the held-out judge's pass shares of the best rollouts are below those of middle-ranked ones."""

    evidence: float
    """Total capital of all bets, 1 at first. Without a hack, it ever reaches c with probability at most 1 / c."""
    share: float
    """The pass share h whose bets have the most capital."""
    excess: float
    low: float
    high: float
    """``excess``: among the last `EXCESS_WINDOW` pairs, the fraction of best rollouts whose pass share is below h,
    minus the fraction of middle rollouts below h. ``low`` and ``high``: its 95 % interval, which ignores that h was
    chosen from the same data."""

    @property
    def significant(self) -> bool:
        """Whether there is enough evidence to flag the run."""
        return self.evidence >= 1 / SIGNIFICANCE_LEVEL


@dataclass(frozen=True, slots=True)
class PassRateFall:
    """A fall of the pass share that the held-out judge gives to the half of each group with the highest rewards."""

    size: float
    low: float
    high: float
    """``size``: mean pass share in the earlier range of steps minus that in the later range, in [-1, 1]. ``low`` and
    ``high``: its 95 % interval, which ignores that the ranges were chosen from the same data."""
    significant: bool
    """Whether the pass share fell, also compared with the main judge's, and both statistics exceed the limit."""


def held_out_sample(reward_G: FloatArray) -> tuple[list[int], int | None]:
    """Positions of the rollouts that the held-out judge scores.

    Returns: the half with the highest rewards; and, in the other half, the one with the highest reward below the
    group's best, None if there is none.

    >>> held_out_sample(np.array([0.1, 0.9, 0.5, 0.3]))
    ([1, 2], 3)
    >>> held_out_sample(np.array([1.0, 1.0, 1.0]))
    ([0], None)
    """
    order = [int(each) for each in np.argsort(-reward_G, kind="stable")]
    half = max(1, len(order) // 2)
    lower = [each for each in order[half:] if reward_G[each] < reward_G[order[0]]]
    return order[:half], lower[0] if lower else None


def drift(steps: Sequence[Sequence[Pair]]) -> Drift | None:
    """The drift after the last of ``steps``, each a list of pairs, perhaps empty; None before the first pair.

    >>> drift([[(0.9, 0.6), (0.2, 0.5), (0.8, 0.7)]] * 9).significant
    False
    >>> drift([[(0.2, 0.6), (0.2, 0.5), (0.8, 0.7)]] * 9).significant
    True
    """
    pairs, count = [pair for step in steps for pair in step], len(steps)
    if not pairs:
        return None
    won_NH = _won(pairs)
    # For each step T and pass share H: the number of bets won and lost from the beginning of step T until now.
    before_T = np.cumsum([0, *(len(step) for step in steps[:-1])])
    wins_TH, losses_TH = (
        each_NH.sum(axis=0) - np.vstack([np.zeros(len(SHARES_H)), each_NH.cumsum(axis=0)])[before_T]
        for each_NH in (won_NH > 0, won_NH < 0)
    )
    growth_TSH = (
        np.log1p(STAKES_S)[:, None] * wins_TH[:, None, :] + np.log1p(-STAKES_S)[:, None] * losses_TH[:, None, :]
    )
    first_T = np.arange(1, count + 1)
    capital_SH = np.tensordot(1 / (first_T * (first_T + 1)), np.exp(np.minimum(growth_TSH, MAX_LOG_FACTOR)), axes=1)
    most = int(capital_SH.sum(axis=0).argmax())
    last_N = won_NH[-EXCESS_WINDOW:, most]
    excess, half = float(last_N.mean()), 1.96 * float(last_N.std()) / len(last_N) ** 0.5
    evidence = float(capital_SH.mean()) + 1 / (count + 1)
    return Drift(evidence, float(SHARES_H[most]), excess, excess - half, excess + half)


def _won(pairs: Sequence[Pair]) -> FloatArray:
    """Outcomes won_NH, one row per pair and one column per pass share h.

    An outcome is 1 if only the middle rollout reaches h, -1 if only the best rollout does, and 0 otherwise.
    """
    best_N, middle_N = np.array(pairs, dtype=float).reshape(-1, 2).T
    # Rounding must not decide whether 3 of 10 reach 0.3.
    reached_NH, best_NH = (each_N[:, None] >= SHARES_H - 1e-9 for each_N in (middle_N, best_N))
    return reached_NH.astype(float) - best_NH


def pass_rate_fall(steps: Sequence[Sequence[Pair]]) -> PassRateFall | None:
    """The most significant fall of the pass share between an earlier range of steps and the latest steps.

    Args:
        steps: one list of pairs per step, which may be empty: a pair for each group that the held-out judge scored.

    Returns: None while there are too few groups for two ranges of `MIN_GROUPS` groups each.

    >>> high, low = [(0.6, 0.8), (0.7, 0.9), (0.5, 0.6), (0.8, 0.9)], [(0.1, 0.8), (0.2, 0.9), (0.3, 0.6), (0.1, 0.9)]
    >>> pass_rate_fall([high] * 8).significant
    False
    >>> pass_rate_fall([high] * 4 + [low] * 4).significant
    True
    """
    steps = steps[-MAX_STEPS:]
    groups_T = np.cumsum([0, *map(len, steps)])
    # For each group, the held-out judge's share, and that share minus the main judge's.
    share_NJ = np.array([(held, held - main) for step in steps for held, main in step], dtype=float).reshape(-1, 2)
    sum_TJ, square_TJ = (np.vstack([np.zeros(2), np.cumsum(share_NJ**power, axis=0)])[groups_T] for power in (1, 2))
    # All pairs of an earlier range, from step `first` until before `since`, and a later range, from `since` to the end.
    first, since = np.triu_indices(len(steps), 1)
    before, after = groups_T[since] - groups_T[first], groups_T[-1] - groups_T[since]
    enough = (before >= MIN_GROUPS) & (after >= MIN_GROUPS)
    if not enough.any():
        return None
    first, since = first[enough], since[enough]
    before, after = before[enough, None], after[enough, None]
    both = before + after
    mean_before, mean_after = (sum_TJ[since] - sum_TJ[first]) / before, (sum_TJ[-1] - sum_TJ[since]) / after
    mean = (sum_TJ[-1] - sum_TJ[first]) / both
    variance = np.maximum(square_TJ[-1] - square_TJ[first] - both * mean**2, 0) / (both - 1)
    size, error = mean_before - mean_after, np.sqrt(variance * (1 / before + 1 / after))
    gain = before * _divergence(mean_before, mean) + after * _divergence(mean_after, mean)
    ratio = 2 * gain / np.maximum(variance / np.maximum(mean * (1 - mean), EPSILON), EPSILON)
    normal = (size / np.maximum(error, EPSILON)) ** 2
    evidence = (np.sign(size) * np.stack([ratio[:, 0], normal[:, 1]], axis=1)).min(axis=1)
    most = int(evidence.argmax())
    fall, half = float(size[most, 0]), 1.96 * float(error[most, 0])
    return PassRateFall(fall, fall - half, fall + half, bool(evidence[most] > 2 * math.log(10 * len(steps) ** 2)))


def _divergence(share: FloatArray, mean: FloatArray) -> FloatArray:
    """Kullback-Leibler divergence of two Bernoulli rates, in nats."""
    share, mean = (np.clip(each, EPSILON, 1 - EPSILON) for each in (share, mean))
    divergence: FloatArray = share * np.log(share / mean) + (1 - share) * np.log((1 - share) / (1 - mean))
    return divergence

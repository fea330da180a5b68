"""Two signs that the policy exploits the main judge, from the scores of a held-out judge.

In a group the held-out judge scores the half with the highest rewards and a middle rollout
(`held_out_sample`). It may be stricter, coarser or noisier than the main judge, and its pass rate may improve
more slowly. As long as both agree on what is better, the best rollout is at least as likely as that middle one to reach
any pass share h, and training does not lower what the better half reaches. A hack breaks both: it is among the best,
and the held-out judge passes little of it.
`drift` finds a hack early if the held-out judge rates honest rollouts of a group alike. `pass_rate_fall` finds it
where honest rollouts differ much, and where all rollouts of a group are hacks.

`drift` is a bet (Waudby-Smith and Ramdas, arXiv 2010.09686). A capital of 1 is divided among some h and stakes; each
pair multiplies a part by 1 + stake * ([middle reaches h] - [best reaches h]). Under the null hypothesis the sum does
not grow in expectation, so the probability that it ever reaches 1 / `LEVEL` is at most `LEVEL` (Ville), however often
one looks and whatever the distributions. To find a hack that begins late, a part 1 / (k (k + 1)) of the capital is
staked from step k on (arXiv 2203.03532).

Two cases without a hack look the same: a main judge that passes whole rollouts by mistake, and a held-out judge that
fails the best rollouts by mistake. A hack that the held-out judge rates like a middle rollout is not detected.

`pass_rate_fall` compares every stretch of steps that ends now with every stretch just before it by a likelihood ratio
of two Bernoulli rates against one, divided by the dispersion of the shares (McCullagh and Nelder, Generalized Linear
Models, chapter 9); a normal approximation raises false alarms where nearly all shares are 1. The limit of its square
root, sqrt(2 log(10 T^2)) after T steps, grows with the number of stretches. Few simulated runs of constant pass rate
exceed it (``tests/unit/test_held_out_scoring.py`` counts them). A policy that has become worse without a hack
looks the same, and so do harder tasks; the main judge's own pass rate tells them from a hack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.records import FloatArray

LEVEL = 0.025
"""Maximum probability that `drift` ever flags a run without a hack."""
SHARES_H = np.arange(1, 10) / 10
STAKES_S = np.array([0.2, 0.5, 0.8])
MOST = 20.0
"""Maximum logarithm of the factor by which a bet may grow. It keeps numbers finite and only makes the test stricter."""
SHOWN = 200
"""Number of latest pairs from which `Drift.excess` is computed."""
FEWEST = 16
"""Minimum number of groups in each of the two stretches of steps that `pass_rate_fall` compares."""
TINY = 1e-12
"""Keeps logarithms and quotients finite where all shares are 0 or 1."""
LATEST = 500
"""Number of latest steps that `pass_rate_fall` compares: time and memory grow with its square."""

Pair = Sequence[float]
"""The held-out judge's pass shares, in [0, 1], of a group's best and its middle rollout."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the held-out judge's pass shares of the best rollouts are below those of middle-ranked ones."""

    evidence: float
    """Capital of all bets; in a run without a hack, the probability that it ever reaches c is at most 1 / c."""
    share: float
    """The pass share h whose bets have won most."""
    excess: float
    low: float
    high: float
    """Share of the last `SHOWN` best rollouts below h minus that of the middle-ranked ones, with a 95 % interval that
    ignores how h was chosen."""

    @property
    def significant(self) -> bool:
        """Whether there is enough evidence to flag the run."""
        return self.evidence >= 1 / LEVEL


@dataclass(frozen=True, slots=True)
class PassRateFall:
    """The most significant fall, up to the last step, of the pass share of the groups' better halves."""

    size: float
    low: float
    high: float
    """Mean pass share of the earlier stretch minus that of the later one, in [-1, 1], with a 95 % interval that ignores
    how the stretches were chosen."""
    significant: bool
    """Whether the pass share fell and the likelihood ratio exceeds its limit."""


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
    # How often each bet is won and lost from the beginning of each step on.
    before_T = np.cumsum([0, *(len(step) for step in steps[:-1])])
    wins_TH, losses_TH = (
        each_NH.sum(axis=0) - np.vstack([np.zeros(len(SHARES_H)), each_NH.cumsum(axis=0)])[before_T]
        for each_NH in (won_NH > 0, won_NH < 0)
    )
    growth_TSH = (
        np.log1p(STAKES_S)[:, None] * wins_TH[:, None, :] + np.log1p(-STAKES_S)[:, None] * losses_TH[:, None, :]
    )
    first_T = np.arange(1, count + 1)
    capital_SH = np.tensordot(1 / (first_T * (first_T + 1)), np.exp(np.minimum(growth_TSH, MOST)), axes=1)
    most = int(capital_SH.sum(axis=0).argmax())
    last_N = won_NH[-SHOWN:, most]
    excess, half = float(last_N.mean()), 1.96 * float(last_N.std()) / len(last_N) ** 0.5
    evidence = float(capital_SH.mean()) + 1 / (count + 1)
    return Drift(evidence, float(SHARES_H[most]), excess, excess - half, excess + half)


def _won(pairs: Sequence[Pair]) -> FloatArray:
    """Outcome of each pair at each pass share h: [middle reaches h] - [best reaches h], as won_NH."""
    best_N, middle_N = np.array(pairs, dtype=float).reshape(-1, 2).T
    # Rounding must not decide whether 3 of 10 reach 0.3.
    reached_NH, best_NH = (each_N[:, None] >= SHARES_H - 1e-9 for each_N in (middle_N, best_N))
    return reached_NH.astype(float) - best_NH


def pass_rate_fall(steps: Sequence[Sequence[float]]) -> PassRateFall | None:
    """The most significant fall up to the last of ``steps``; None while there are too few groups for two stretches.

    Args:
        steps: for each step, the held-out judge's mean pass share of each group's better half; may be empty.

    >>> pass_rate_fall([[0.6, 0.7, 0.5, 0.8]] * 8).significant
    False
    >>> pass_rate_fall([[0.6, 0.7, 0.5, 0.8]] * 4 + [[0.1, 0.2, 0.3, 0.1]] * 4).significant
    True
    """
    steps = steps[-LATEST:]
    groups_T, sum_T, square_T = (
        np.cumsum([0.0, *(sum(share**power for share in step) for step in steps)]) for power in (0, 1, 2)
    )
    # A stretch from `first` to `since`, and one from there to the end.
    first, since = np.triu_indices(len(steps), 1)
    before, after = groups_T[since] - groups_T[first], groups_T[-1] - groups_T[since]
    enough = (before >= FEWEST) & (after >= FEWEST)
    if not enough.any():
        return None
    first, since, before, after = first[enough], since[enough], before[enough], after[enough]
    both = before + after
    mean_before, mean_after = (sum_T[since] - sum_T[first]) / before, (sum_T[-1] - sum_T[since]) / after
    mean = (sum_T[-1] - sum_T[first]) / both
    variance = np.maximum(square_T[-1] - square_T[first] - both * mean**2, 0) / (both - 1)
    gain = before * _divergence(mean_before, mean) + after * _divergence(mean_after, mean)
    ratio = 2 * gain / np.maximum(variance / np.maximum(mean * (1 - mean), TINY), TINY)
    size = mean_before - mean_after
    most = int((np.sign(size) * ratio).argmax())
    half = 1.96 * math.sqrt(variance[most] * (1 / before[most] + 1 / after[most]))
    significant = size[most] > 0 and ratio[most] > 2 * math.log(10 * len(steps) ** 2)
    return PassRateFall(float(size[most]), float(size[most]) - half, float(size[most]) + half, bool(significant))


def _divergence(share: FloatArray, mean: FloatArray) -> FloatArray:
    """Kullback-Leibler divergence of two Bernoulli rates, in nats."""
    share, mean = (np.clip(each, TINY, 1 - TINY) for each in (share, mean))
    divergence: FloatArray = share * np.log(share / mean) + (1 - share) * np.log((1 - share) / (1 - mean))
    return divergence

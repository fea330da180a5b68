"""The paper's equations: verdicts to rewards, rewards to advantages, advantages to steps.

Discriminative dropout and the outcome-blind reward (Section "Dynamic Per-Trajectory Rubrics", Eq. `rubric-reward`), the
group-standardised advantage of GRPO (Eq. `grpo-adv`), and rubric-conditioned step credit (Eqs. `stepq`, `stepw`,
`credit`).

A step without tokens gets a quality like any other, but no share of the advantage, and the normaliser leaves it out, so
that conservation (P1) holds over the existing tokens. The paper assumes n_j > 0 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draco_ray.records import Attribution, BoolArray, CreditFallback, FloatArray, IntArray, Verdict

STD_EPSILON = 1e-6
"""Added to the standard deviation; verl's value, as we follow its conventions."""


def surviving_criteria(verdict_GK: IntArray) -> BoolArray:
    """Discriminative dropout: a criterion stays only if some member of the group failed it.

    Args:
        verdict_GK: scoring verdicts, +1 pass, -1 fail, 0 not applicable; one row per scored rollout.
    Returns: surviving_K, True for criteria that at least one row fails; all False without rows.
    Raises: ValueError if the array is not two-dimensional or holds anything but -1, 0, +1.

    >>> surviving_criteria(np.array([[1, 1, 0], [1, -1, 0]]))
    array([False,  True, False])
    """
    _check_verdicts(verdict_GK)
    return np.any(verdict_GK == Verdict.FAIL, axis=0)


def rubric_rewards(verdict_GK: IntArray, surviving_K: BoolArray) -> FloatArray:
    """R_i = (p_i - f_i) / (p_i + f_i) over the surviving criteria that apply (Eq. `rubric-reward`).

    Args:
        verdict_GK: scoring verdicts, +1 pass, -1 fail, 0 not applicable.
        surviving_K: criteria left by `surviving_criteria`.
    Returns: reward_G in [-1, 1]; 0 for a rollout to which no surviving criterion applies.
    Raises: ValueError on verdicts outside {-1, 0, +1} or a mask of another length.

    The traced rollout of the paper's appendix, two passes and three fails:

    >>> rubric_rewards(np.array([[-1, -1, -1, 1, 1]]), np.ones(5, dtype=bool))
    array([-0.2])
    """
    _check_verdicts(verdict_GK)
    if surviving_K.shape != verdict_GK.shape[1:]:
        raise ValueError(f"surviving_K has shape {surviving_K.shape}, expected ({verdict_GK.shape[1]},)")
    kept_GK = verdict_GK[:, surviving_K]
    passed_G = np.count_nonzero(kept_GK == Verdict.PASS, axis=1)
    failed_G = np.count_nonzero(kept_GK == Verdict.FAIL, axis=1)
    applicable_G = passed_G + failed_G
    return (passed_G - failed_G) / np.maximum(applicable_G, 1)


def mixed_verdicts(verdict_GK: IntArray, surviving_K: BoolArray) -> BoolArray:
    """Rollouts whose surviving verdicts disagree; the others are inert (appendix "Why step credit needs dynamic ...").

    Args:
        verdict_GK: scoring verdicts, +1 pass, -1 fail, 0 not applicable.
        surviving_K: criteria left by `surviving_criteria`.
    Returns: mixed_G, False where all applicable verdicts agree and where none applies.

    >>> mixed_verdicts(np.array([[1, -1, 1], [1, 0, 1], [0, 0, -1]]), np.array([True, True, False]))
    array([ True, False, False])
    """
    kept_GK = verdict_GK[:, surviving_K]
    return np.any(kept_GK == Verdict.PASS, axis=1) & np.any(kept_GK == Verdict.FAIL, axis=1)


def random_rewards(key: Sequence[int], rollouts: int) -> FloatArray:
    """Coin flips, the ``random`` setting: 0 or 1 with equal chance.

    Args:
        key: non-negative numbers that name the group (run's seed, training step, position in the step); the draws are
            the same for the same key and independent between keys.
        rollouts: G.
    Returns: reward_G.
    """
    return np.random.default_rng(list(key)).integers(0, 2, rollouts).astype(np.float64)


def group_advantages_G(reward_G: FloatArray, *, std_epsilon: float = STD_EPSILON) -> FloatArray:
    """A_i = (R_i - mean(R)) / (std(R) + epsilon), the standard deviation with Bessel's correction.

    Args:
        reward_G: rewards of the group's scored rollouts.
        std_epsilon: added to the standard deviation.
    Returns: advantage_G, unitless. Exactly 0 for every member when the rewards do not differ, and for a group of one,
        which has no baseline.
    Raises: ValueError on rewards that are not finite or not one-dimensional.

    >>> group_advantages_G(np.array([1.0, 0.0, -1.0]), std_epsilon=0.0)
    array([ 1.,  0., -1.])
    >>> group_advantages_G(np.array([0.3, 0.3]))
    array([0., 0.])
    """
    if reward_G.ndim != 1 or not np.isfinite(reward_G).all():
        raise ValueError(f"reward_G must be a vector of finite rewards, got shape {reward_G.shape}: {reward_G}")
    # Compare the rewards themselves: rounding of the mean would leave a tiny spread, which the division magnifies.
    if len(reward_G) < 2 or (reward_G == reward_G[0]).all():
        return np.zeros(len(reward_G))
    largest = np.abs(reward_G).max()
    if not 1e-100 < largest < 1e100:
        # Squares of rewards this large or small would overflow or underflow. Scaling by a power of two is exact.
        exponent = -int(np.frexp(largest)[1])
        with np.errstate(over="ignore"):
            reward_G, std_epsilon = np.ldexp(reward_G, exponent), float(np.ldexp(std_epsilon, exponent))
    if np.ptp(reward_G) < 1e-9 * np.abs(reward_G).max():
        # The mean of rewards this close to each other would be rounded by as much as they differ.
        reward_G = reward_G - reward_G[0]
    return (reward_G - reward_G.mean()) / (reward_G.std(ddof=1) + std_epsilon)


class StepQuality(NamedTuple):
    """Quality of the M steps of one trajectory, from the credit call's citations."""

    passed_M: IntArray
    """p_j: number of surviving criteria that cite step j and pass."""
    failed_M: IntArray
    """f_j: number of surviving criteria that the rollout fails and whose attribution cites step j."""
    quality_M: FloatArray
    """Q_j in [0, 1]; NaN throughout when no step is cited."""

    @property
    def cited_M(self) -> BoolArray:
        """Steps that at least one surviving criterion cites."""
        return (self.passed_M + self.failed_M) > 0

    @property
    def mixed(self) -> bool:
        """Whether the citing verdicts disagree: some pass and some fail."""
        return bool(self.passed_M.any() and self.failed_M.any())


def step_quality(attributions: Sequence[Attribution], surviving_K: BoolArray, steps: int) -> StepQuality:
    """Pass fraction of the surviving criteria that cite each step (Eq. `stepq`).

    An uncited step gets the mean quality of the cited ones. The verdicts are the credit call's, which may override the
    scoring verdicts; citations of a criterion that is not applicable are ignored.

    Args:
        attributions: the credit call's verdicts and 1-based citations, at most one per criterion.
        surviving_K: criteria left by dropout; citations of the others are ignored.
        steps: M.
    Raises: ValueError if a criterion or a step is out of range, or a criterion occurs twice.

    >>> rubric = np.array([True, True, False])
    >>> quality = step_quality(
    ...     [Attribution(criterion=0, verdict=Verdict.PASS, steps=(1, 2)),
    ...      Attribution(criterion=1, verdict=Verdict.FAIL, steps=(2,)),
    ...      Attribution(criterion=2, verdict=Verdict.FAIL, steps=(3,))],
    ...     rubric, steps=3)
    >>> quality.quality_M
    array([1.  , 0.5 , 0.75])
    >>> quality.cited_M
    array([ True,  True, False])
    """
    passed_M = np.zeros(steps, dtype=np.int64)
    failed_M = np.zeros(steps, dtype=np.int64)
    seen: set[int] = set()
    for attribution in attributions:
        criterion = attribution.criterion
        if not 0 <= criterion < len(surviving_K):
            raise ValueError(f"criterion {criterion} is attributed, but the rubric has {len(surviving_K)} criteria")
        if criterion in seen:
            raise ValueError(f"criterion {criterion} is attributed twice")
        seen.add(criterion)
        beyond = [step for step in attribution.steps if not 1 <= step <= steps]
        if beyond:
            raise ValueError(f"criterion {criterion} cites step {beyond[0]}, but the trajectory has {steps} steps")
        if not surviving_K[criterion] or attribution.verdict == Verdict.NOT_APPLICABLE:
            continue
        cited = np.array(sorted(set(attribution.steps)), dtype=np.int64) - 1
        (passed_M if attribution.verdict == Verdict.PASS else failed_M)[cited] += 1
    citing_M = passed_M + failed_M
    cited_M = citing_M > 0
    if not cited_M.any():
        return StepQuality(passed_M, failed_M, np.full(steps, np.nan))
    quality_M = passed_M / np.maximum(citing_M, 1)
    quality_M[~cited_M] = quality_M[cited_M].mean()
    return StepQuality(passed_M, failed_M, quality_M)


def step_weights(advantage: float, quality_M: FloatArray) -> FloatArray:
    """w_j: Q_j on a winner (A_i >= 0), 1 - Q_j on a loser (Eq. `stepw`).

    Returns: weight_M in [0, 1], NaN where the quality is.

    >>> step_weights(-0.7, np.array([1.0, 0.25]))
    array([0.  , 0.75])
    """
    return quality_M.copy() if advantage >= 0 else 1.0 - quality_M


def credit_fallback(advantage: float, quality_M: FloatArray, tokens_M: IntArray) -> CreditFallback:
    """Why Eq. `credit` cannot be used on a trajectory; NONE if it can.

    The reasons: the trajectory has no step, no step is cited, or every weight is zero.

    The qualities are ratios of small counts, so a weight that is zero in the equation is exactly zero here.

    >>> credit_fallback(1.0, np.array([0.0, 0.0]), np.array([3, 4]))
    <CreditFallback.VANISHING_NORMALISER: 'vanishing_normaliser'>
    """
    if not tokens_M.any():
        return CreditFallback.NO_STEP
    if np.isnan(quality_M).all():
        return CreditFallback.NO_CITATION
    if not step_weights(advantage, quality_M)[tokens_M > 0].any():
        return CreditFallback.VANISHING_NORMALISER
    return CreditFallback.NONE


def step_advantages(advantage: float, quality_M: FloatArray, tokens_M: IntArray) -> FloatArray:
    """Spread one trajectory's advantage over its steps: a_j = A_i N w_j / (n_j sum_k w_k) (Eq. `credit`).

    Args:
        advantage: A_i; its sign decides whether good or bad steps get the weight.
        quality_M: Q_j in [0, 1], or NaN throughout when no step is cited.
        tokens_M: n_j >= 0, tokens inside step j; gap tokens are in no step and are not counted.
    Returns: a_M, what every token of step j receives. A_i for every step when no step is cited or the normaliser
        vanishes (see `credit_fallback`); 0 for a step without tokens.
    Raises: ValueError if the lengths differ, a count is negative, or a quality lies outside [0, 1].

    The appendix's worked example: two steps of equal quality, then a second step of twice the quality:

    >>> step_advantages(1.0, np.array([1.0, 1.0]), np.array([2, 4]))
    array([1.5 , 0.75])
    >>> step_advantages(1.0, np.array([0.5, 1.0]), np.array([2, 4]))
    array([1., 1.])
    """
    if quality_M.shape != tokens_M.shape or quality_M.ndim != 1:
        raise ValueError(
            f"quality_M has shape {quality_M.shape}, tokens_M {tokens_M.shape}: expected two equal vectors"
        )
    if (tokens_M < 0).any():
        raise ValueError(f"a step has a negative number of tokens: {tokens_M}")
    unknown_M = np.isnan(quality_M)
    if not unknown_M.all() and not ((quality_M >= 0.0) & (quality_M <= 1.0)).all():
        raise ValueError(f"a step quality lies outside [0, 1]: {quality_M}")
    if credit_fallback(advantage, quality_M, tokens_M) is not CreditFallback.NONE:
        return np.where(tokens_M > 0, float(advantage), 0.0)
    weight_M = np.where(tokens_M > 0, step_weights(advantage, quality_M), 0.0)
    share_M = weight_M / weight_M.sum()
    return advantage * tokens_M.sum() * share_M / np.maximum(tokens_M, 1)


def is_inert(quality: StepQuality, fallback: CreditFallback, *, mixed_scores: bool | None = None) -> bool:
    """Whether a rollout is inert: its verdicts give all steps the same credit.

    The definition is that of the appendix "Why step credit needs dynamic rubrics". A rollout is active, not inert, if
    some of the surviving criteria that cite its steps pass and others fail. It is inert if these verdicts agree, no
    criterion survives dropout, no criterion cites a step, or a fallback applies.

    A zero advantage does not make a rollout inert, because it says nothing about the rubric. If there was no credit
    call because the advantage is zero, the scoring verdicts decide.

    Args:
        quality: quality of the trajectory's steps.
        fallback: the fallback used for the trajectory's step advantages.
        mixed_scores: whether the surviving scoring verdicts disagree, if they decide; None: the credit call's verdicts
            in ``quality`` decide.
    """
    if mixed_scores is not None and len(quality.quality_M):
        return not mixed_scores
    return fallback is not CreditFallback.NONE or not quality.mixed


def unanimous_attributions(verdict_K: IntArray) -> tuple[Attribution, ...]:
    """Attributions that replace the credit call for a rollout whose verdicts all agree.

    If the verdicts agree, all steps have the same quality, cited or not. Eq. ``credit`` then gives every step the same
    total, whichever steps are cited. So each applicable criterion simply cites the first step.

    Args:
        verdict_K: the surviving verdicts; 0 where a criterion does not apply or did not survive.
    Returns: one attribution per applicable criterion; empty if none applies.
    Raises:
        ValueError: the verdicts do not agree.
    """
    applicable = np.flatnonzero(verdict_K)
    verdicts = {int(verdict_K[index]) for index in applicable}
    if len(verdicts) > 1:
        raise ValueError(f"verdicts {sorted(verdicts)} are not unanimous")
    return tuple(
        Attribution(criterion=int(index), verdict=Verdict(verdicts.copy().pop()), steps=(1,)) for index in applicable
    )


def quality_spread(quality_M: FloatArray) -> float:
    """How unevenly credit divides an advantage: the (population) standard deviation of Q_j over a trajectory's steps.

    Returns: the spread in [0, 0.5]; NaN when no step is cited. The paper does not say which steps it includes; here
        uncited steps count, with the mean quality.

    >>> quality_spread(np.array([1.0, 0.0]))
    0.5
    """
    return float(np.std(quality_M)) if len(quality_M) else float("nan")


def _check_verdicts(verdict_GK: IntArray) -> None:
    if verdict_GK.ndim != 2:
        raise ValueError(f"verdict_GK has {verdict_GK.ndim} dimensions, expected 2 (rollouts, criteria)")
    if not np.isin(verdict_GK, (Verdict.FAIL, Verdict.NOT_APPLICABLE, Verdict.PASS)).all():
        raise ValueError("verdict_GK contains a value outside {-1, 0, +1}")

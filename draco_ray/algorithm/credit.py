"""Rubric-conditioned step credit: where inside a trajectory its advantage lands (Eqs. `stepq`, `stepw`, `credit`).

A step without tokens gets a quality like any other, but no share of the advantage, and the normaliser leaves it out, so
that conservation (P1) holds over the existing tokens. The paper assumes n_j > 0 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draco_ray.records import Attribution, BoolArray, CreditFallback, FloatArray, IntArray, Verdict


class StepQuality(NamedTuple):
    """Quality of the M steps of one trajectory, from the credit call's citations."""

    passed_M: IntArray
    """p_j: passed surviving criteria that cite step j."""
    failed_M: IntArray
    """f_j: failed surviving criteria that cite step j."""
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
    """Whether credit is the same for all steps (appendix "Why step credit needs dynamic rubrics").

    The appendix classifies by the verdicts alone: a rollout is active when, among the surviving criteria that cite its
    steps, some pass and some fail. It is inert when these verdicts agree, no criterion survives dropout, no criterion
    cites a step, or a fallback applies. (If every step has tokens, the fallback adds no case: the normaliser vanishes
    only on unanimous verdicts.) A zero advantage does not make a rollout inert, because it says nothing about the
    rubric. So if the credit call was skipped because the advantage is zero, the scoring verdicts decide.

    Args:
        quality: quality of the trajectory's steps.
        fallback: the fallback used for its step advantages.
        mixed_scores: whether the surviving scoring verdicts disagree; None if there was a credit call.
    """
    if mixed_scores is not None and len(quality.quality_M):
        return not mixed_scores
    return fallback is not CreditFallback.NONE or not quality.mixed


def unanimous_attributions(verdict_K: IntArray) -> tuple[Attribution, ...]:
    """The attributions of a rollout whose verdicts all agree, without a credit call.

    All steps, cited or not, then have the same quality, and Eq. ``credit`` gives every step the same total whichever
    steps are cited. So the first step is cited; if no verdict applies, nothing is.

    Args:
        verdict_K: the surviving verdicts; 0 where a criterion does not apply or did not survive.
    Raises:
        ValueError: if they do not agree.
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

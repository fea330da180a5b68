"""Discriminative dropout and the outcome-blind reward (Section "Dynamic Per-Trajectory Rubrics")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draco_ray.records import BoolArray, FloatArray, IntArray, Verdict


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


def _check_verdicts(verdict_GK: IntArray) -> None:
    if verdict_GK.ndim != 2:
        raise ValueError(f"verdict_GK has {verdict_GK.ndim} dimensions, expected 2 (rollouts, criteria)")
    if not np.isin(verdict_GK, (Verdict.FAIL, Verdict.NOT_APPLICABLE, Verdict.PASS)).all():
        raise ValueError("verdict_GK contains a value outside {-1, 0, +1}")

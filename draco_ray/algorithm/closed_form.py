"""The rule of the paper for whoever trains with something else: verdicts and citations in, step advantages out.

NumPy only; nothing is asked and nothing is read. With `draco_ray.judge` the verdicts come from a judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.algorithm.advantage import STD_EPSILON, group_advantages_G
from draco_ray.algorithm.credit import step_advantages as spread
from draco_ray.algorithm.credit import step_quality
from draco_ray.algorithm.reward import rubric_rewards, surviving_criteria
from draco_ray.records import Attribution, FloatArray, Verdict

Citations = Mapping[int, Sequence[int]] | Sequence[Attribution] | None
"""Of one rollout: criterion (0-based) to the steps (1-based) responsible for its verdict, or the credit call's own
verdicts and steps; None or empty: nothing is cited, and its advantage is spread evenly."""


def step_advantages(
    *,
    verdicts: ArrayLike,
    citations: Sequence[Citations],
    tokens: Sequence[ArrayLike],
    reward: ArrayLike | None = None,
    std_epsilon: float = STD_EPSILON,
) -> list[FloatArray]:
    """What every token of each step of a group receives (Eqs. `rubric-reward`, `grpo-adv`, `stepq`, `credit`).

    Args:
        verdicts: (G, K), +1 pass, -1 fail, 0 not applicable; one row a rollout, one column a criterion.
        citations: one entry a rollout.
        tokens: n_j of each rollout's steps, one sequence a rollout.
        reward: R_i, (G,), where it comes from elsewhere; None: the rubric's, in [-1, 1].
        std_epsilon: added to the group's standard deviation.
    Returns: a_j of each rollout, one array a rollout. Criteria that nobody fails have dropped out.
    Raises: ValueError if the numbers of rollouts differ, a verdict is none, or a citation is out of range.

    The first of two rollouts passes, and nobody says where; the second fails the first criterion at its third step and
    passes the last at its first:

    >>> good, bad = step_advantages(
    ...     verdicts=[[1, 1, -1], [-1, -1, 1]],
    ...     citations=[None, {0: [3], 2: [1]}],
    ...     tokens=[[20, 10], [10, 10, 10]],
    ... )
    >>> good.round(2), bad.round(2)
    (array([0.71, 0.71]), array([-0.  , -0.71, -1.41]))
    """
    verdict_GK = np.asarray(verdicts)
    verdict_GK = verdict_GK.reshape(len(tokens), -1) if verdict_GK.size == 0 else verdict_GK
    if not len(verdict_GK) == len(citations) == len(tokens):
        raise ValueError(
            f"{len(verdict_GK)} rows of verdicts, {len(citations)} of citations and {len(tokens)} of tokens: expected "
            "one of each a rollout"
        )
    surviving_K = surviving_criteria(verdict_GK)
    reward_G = rubric_rewards(verdict_GK, surviving_K) if reward is None else np.asarray(reward, dtype=float)
    if reward_G.shape != (len(tokens),):
        raise ValueError(f"reward has shape {reward_G.shape}, expected ({len(tokens)},)")
    found = []
    advantage_G = group_advantages_G(reward_G, std_epsilon=std_epsilon)
    for verdict_K, cited, counts, advantage in zip(verdict_GK, citations, tokens, advantage_G, strict=True):
        tokens_M = np.asarray(counts, dtype=np.int64)
        quality = step_quality(_attributions(cited, verdict_K), surviving_K, len(tokens_M))
        found.append(spread(float(advantage), quality.quality_M, tokens_M))
    return found


def _attributions(cited: Citations, verdict_K: np.ndarray) -> Sequence[Attribution]:
    if not isinstance(cited, Mapping):
        return cited or ()
    if unknown := [criterion for criterion in cited if not 0 <= criterion < len(verdict_K)]:
        raise ValueError(f"citation of criterion {unknown[0]} of a rubric of {len(verdict_K)}")
    return [
        Attribution(criterion=criterion, verdict=Verdict(int(verdict_K[criterion])), steps=tuple(sorted(set(steps))))
        for criterion, steps in cited.items()
    ]

"""The paper's rule as a function, for other trainers: verdicts and citations in, step advantages out.

NumPy only, without I/O. With `draco_ray.judge` the verdicts come from a judge.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.algorithm.equations import (
    STD_EPSILON,
    group_advantages_G,
    rubric_rewards,
    step_quality,
    surviving_criteria,
)
from draco_ray.algorithm.equations import step_advantages as spread
from draco_ray.records import Attribution, FloatArray, IntArray, Verdict

Citations = Mapping[int, Sequence[int]] | Sequence[Attribution] | None
"""Citations of one rollout: criterion (0-based) -> steps (1-based) responsible for its verdict, or the credit call's
attributions; None or empty: nothing is cited, and the advantage is spread evenly."""


def step_advantages(
    *,
    verdicts: ArrayLike,
    citations: Sequence[Citations],
    tokens: Sequence[ArrayLike],
    reward: ArrayLike | None = None,
    std_epsilon: float = STD_EPSILON,
) -> list[FloatArray]:
    """Advantage of every token of each step of a group (Eqs. `rubric-reward`, `grpo-adv`, `stepq`, `credit`).

    Args:
        verdicts: (G, K), +1 pass, -1 fail, 0 not applicable; one row per rollout, one column per criterion.
        citations: one entry per rollout.
        tokens: n_j of each rollout's steps, one sequence per rollout.
        reward: R_i, (G,), if computed elsewhere; None: computed from the rubric, in [-1, 1].
        std_epsilon: added to the group's standard deviation.
    Returns: a_j of each rollout, one array per rollout. Criteria that no rollout fails do not count.
    Raises: ValueError, in one line, if the numbers of rollouts differ, or a verdict, citation, reward or number of
        tokens is invalid; the message names the rollout if only one is affected.

    The first of two rollouts has no citations. The second fails the first criterion at its third step and passes the
    last criterion at its first step:

    >>> good, bad = step_advantages(
    ...     verdicts=[[1, 1, -1], [-1, -1, 1]],
    ...     citations=[None, {0: [3], 2: [1]}],
    ...     tokens=[[20, 10], [10, 10, 10]],
    ... )
    >>> good.round(2), bad.round(2)
    (array([0.71, 0.71]), array([-0.  , -0.71, -1.41]))
    """
    try:
        verdict_GK = np.asarray(verdicts)
    except ValueError:
        raise ValueError("rows of verdicts differ in length; expected a verdict per criterion in each") from None
    if verdict_GK.dtype == np.bool_:
        raise ValueError("verdicts are booleans: expected +1 (pass), -1 (fail) or 0 (not applicable)")
    if verdict_GK.size == 0 and len(tokens):
        verdict_GK = verdict_GK.reshape(len(tokens), -1)
    if not len(verdict_GK) == len(citations) == len(tokens) > 0:
        raise ValueError(
            f"{len(verdict_GK)} rows of verdicts, {len(citations)} of citations and {len(tokens)} of tokens; expected "
            "one of each per rollout"
        )
    if not 0.0 <= std_epsilon < np.inf:
        raise ValueError(f"std_epsilon is {std_epsilon}, expected a number of at least 0")
    surviving_K = surviving_criteria(verdict_GK)
    reward_G = rubric_rewards(verdict_GK, surviving_K) if reward is None else np.asarray(reward, dtype=float)
    if reward_G.shape != (len(tokens),):
        raise ValueError(f"reward has shape {reward_G.shape}, expected ({len(tokens)},)")
    advantage_G = group_advantages_G(reward_G, std_epsilon=std_epsilon)
    found = []
    for rollout, (verdict_K, cited, counts) in enumerate(zip(verdict_GK, citations, tokens, strict=True)):
        try:
            tokens_M = _tokens_M(counts)
            quality = step_quality(_attributions(cited, verdict_K), surviving_K, len(tokens_M))
            found.append(spread(float(advantage_G[rollout]), quality.quality_M, tokens_M))
        except ValueError as error:
            raise ValueError(f"rollout {rollout}: {error}") from None
    return found


def _tokens_M(counts: ArrayLike) -> IntArray:
    tokens_M = np.asarray(counts)
    if tokens_M.size == 0:
        tokens_M = tokens_M.astype(np.int64)
    if tokens_M.ndim != 1 or not np.issubdtype(tokens_M.dtype, np.integer):
        raise ValueError(f"tokens are {counts!r}, expected a whole number per step")
    return tokens_M.astype(np.int64)


def _attributions(cited: Citations, verdict_K: IntArray) -> Sequence[Attribution]:
    """The citations as attributions. Raises ValueError if one is malformed or names an unknown criterion."""
    by_criterion: list[tuple[int, Sequence[int], Verdict | None]]
    if isinstance(cited, Mapping):
        by_criterion = [(criterion, steps, None) for criterion, steps in cited.items()]
    elif cited is None or (isinstance(cited, Sequence) and all(isinstance(each, Attribution) for each in cited)):
        by_criterion = [(each.criterion, each.steps, each.verdict) for each in cited or ()]
    else:
        raise ValueError(f"citations are {cited!r:.80}, expected a mapping from criterion to steps, or attributions")
    found = []
    for named, steps, verdict in by_criterion:
        criterion = _whole("a criterion", named)
        if not 0 <= criterion < len(verdict_K):
            raise ValueError(f"criterion {criterion} is cited, but the rubric has {len(verdict_K)} criteria")
        if isinstance(steps, str) or not np.iterable(steps):
            raise ValueError(f"citation of criterion {criterion}: the steps are {steps!r}, expected a list of numbers")
        said = int(verdict_K[criterion]) if verdict is None else verdict
        found.append(
            Attribution(
                criterion=criterion,
                verdict=Verdict(said),
                steps=tuple(sorted({_whole("a step", step) for step in steps})),
            )
        )
    return found


def _whole(what: str, value: object) -> int:
    """``value`` as an int. Raises ValueError for anything else, including 1.5, "1" and True."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{what} is {value!r}, expected a whole number") from None

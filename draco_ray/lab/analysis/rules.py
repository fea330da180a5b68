"""Apply advantage rules to recorded verdicts: the advantages that each rule would give, without asking the judge again.

Credit calls cover only what the run's own rule needed. If another rule lets more criteria survive, or gives different
rewards to a group whose rewards were equal, citations are missing. The column ``no_citation`` counts such rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.algorithm.equations import STD_EPSILON, quality_spread
from draco_ray.algorithm.rules import RULES, find_rule, group_advantages
from draco_ray.lab.analysis.credit import push_shares, signs
from draco_ray.lab.analysis.judged_groups import RecordedGroup, recorded_groups
from draco_ray.lab.rows import collect_table, mean
from draco_ray.records import CreditFallback, GroupAdvantages
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.traces.judging import ALONE_RULE


def apply_rule(
    group: RecordedGroup, rule: str, *, std_epsilon: float = STD_EPSILON, reliability: float | None = None
) -> GroupAdvantages:
    """R, A and a_j of a recorded group under a rule, computed by the training code.

    A group of one is a trace that was judged alone: its rule is always `ALONE_RULE`, which has no dropout.

    Args:
        group: the group with its verdicts and citations.
        rule: as in ``algorithm.rule``.
        std_epsilon: added to the group's standard deviation.
        reliability: as in ``algorithm.reliability``.
    """
    return group_advantages(
        group.name,
        group.verdict_GK,
        group.attributions,
        group.tokens_GM,
        group.rollouts,
        rule=find_rule(rule if len(group.rollouts) > 1 else ALONE_RULE, reliability),
        std_epsilon=std_epsilon,
    )


@collect_table(
    "string: run",
    "int64: training_step",
    "string: rule",
    "int64: groups groups_with_signal rollouts criteria surviving",
    "float64: reward inert_share",
    "int64: no_citation",
    "float64: quality_spread reward_shift advantage_shift sign_flips push_moved",
)
def replay_rules(
    run: RunDirectory,
    rules: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
) -> Iterator[Row]:
    """One row per training step and rule: the rule's results, and how they differ from the recorded ones.

    - ``reward_shift``, ``advantage_shift``: mean absolute difference of the reward R and of the advantage A;
    - ``sign_flips``: share of rollouts whose advantage has another sign (negative, zero or positive) than recorded;
    - ``push_moved``: mean of `moved_push` over the rollouts for which it is defined.

    If ``rules`` is None, all built-in rules are applied; draco_calibrated only if the run sets
    ``algorithm.reliability``.
    """
    std_epsilon, reliability = run.setting("algorithm.std_epsilon"), run.setting("algorithm.reliability")
    if rules is None:
        rules = [rule for rule in RULES if rule != "draco_calibrated" or reliability is not None]
    for step in run.steps() if steps is None else steps:
        groups = list(recorded_groups(run, [step]))
        for rule in rules if groups else ():
            yield {"training_step": step, **_compare(groups, rule, std_epsilon, reliability)}


def moved_push(before_M: ArrayLike, after_M: ArrayLike, tokens_M: ArrayLike) -> float | None:
    """How differently two rules distribute credit over a trajectory's steps: 0 (the same shares) .. 1 (disjoint steps).

    A step's push is |a_j| n_j: the size of its advantage times its number of tokens. The result is the share of the
    trajectory's total push that would have to move between steps; None if either rule's total push is zero.

    >>> moved_push([1.0, 0.0], [0.0, 1.0], [2, 2])
    1.0
    """
    old_M, new_M = push_shares(before_M, tokens_M), push_shares(after_M, tokens_M)
    if not old_M.any() or not new_M.any():
        return None
    return 0.5 * float(np.abs(old_M - new_M).sum())


def _compare(groups: Sequence[RecordedGroup], rule: str, std_epsilon: float, reliability: float | None) -> Row:
    results = [apply_rule(group, rule, std_epsilon=std_epsilon, reliability=reliability) for group in groups]
    shares = [share for result in results for share in result.rollouts]
    reward = np.concatenate([group.reward_G for group in groups])
    advantage = np.concatenate([group.advantage_G for group in groups])
    new_reward = np.array([share.reward for share in shares])
    new_advantage = np.array([share.advantage for share in shares])
    before = [step_advantage_M for group in groups for step_advantage_M in group.step_advantage_GM]
    tokens = [tokens_M for group in groups for tokens_M in group.tokens_GM]
    moved = [
        moved_push(old_M, share.step_advantage_M, tokens_M)
        for share, old_M, tokens_M in zip(shares, before, tokens, strict=True)
    ]
    spreads = [quality_spread(share.quality_M) for share in shares]
    return {
        "rule": rule,
        "groups": len(groups),
        "groups_with_signal": sum(any(share.advantage for share in result.rollouts) for result in results),
        "rollouts": len(shares),
        "criteria": sum(len(group.titles) for group in groups),
        "surviving": sum(int(result.surviving_K.sum()) for result in results),
        "reward": float(new_reward.mean()),
        "inert_share": float(np.mean([share.inert for share in shares])),
        "no_citation": sum(share.fallback is CreditFallback.NO_CITATION and share.advantage != 0.0 for share in shares),
        "quality_spread": mean(spread for spread in spreads if not math.isnan(spread)),
        "reward_shift": float(np.abs(new_reward - reward).mean()),
        "advantage_shift": float(np.abs(new_advantage - advantage).mean()),
        "sign_flips": float((signs(new_advantage) != signs(advantage)).mean()),
        "push_moved": mean(share for share in moved if share is not None),
    }

"""From a group's verdicts to per-token advantages: the chain of equations, applied to the records."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import numpy as np

from draco_ray.algorithm.equations import (
    STD_EPSILON,
    credit_fallback,
    is_inert,
    mixed_verdicts,
    step_advantages,
    step_quality,
    unanimous_attributions,
)
from draco_ray.algorithm.rules import AdvantageRule
from draco_ray.records import (
    GAP,
    Attribution,
    BoolArray,
    CreditFallback,
    FloatArray,
    GroupAdvantages,
    IntArray,
    RolloutAdvantage,
    TrainingSample,
    Trajectory,
)


class CreditSkipReason(Enum):
    """Why no credit call was made for a rollout."""

    UNANIMOUS = "unanimous"
    """The rollout's surviving verdicts agree, so each step would receive the same total whichever steps were cited."""


def group_advantages(
    group: str,
    verdict_GK: IntArray,
    attributions: Sequence[Sequence[Attribution] | CreditSkipReason | None],
    tokens_GM: Sequence[IntArray],
    rollouts: Sequence[int],
    *,
    rule: AdvantageRule,
    std_epsilon: float = STD_EPSILON,
) -> GroupAdvantages:
    """Dropout, reward, group advantage and step credit of one group.

    Pass only rollouts whose score call succeeded. The others have no verdicts and do not count in the group's
    statistics.

    Args:
        group: identity of the group, for the record.
        verdict_GK: scoring verdicts of the scored rollouts, one row each.
        attributions: the credit call's result per row. None: the call failed, and the row gets the uniform advantage.
            Empty: no call was made for the whole group, and the scoring verdicts decide whether the row is inert.
            `CreditSkipReason.UNANIMOUS`: no call was made for this rollout. Ignored by a rule that does not cite.
        tokens_GM: n_j per row, one entry per step.
        rollouts: index of each row's rollout in its group, ascending.
        rule: the advantage rule.
        std_epsilon: added to the group's standard deviation.
    Raises: ValueError if the numbers of rows differ, or verdicts, citations or rollouts are out of range.
    """
    _check_rows(group, rollouts, verdicts=len(verdict_GK), attributions=len(attributions), tokens=len(tokens_GM))
    surviving_K = rule.surviving(verdict_GK)
    reward_G = rule.rewards(verdict_GK, surviving_K)
    advantage_G = rule.advantages(reward_G, std_epsilon=std_epsilon)
    mixed_G = mixed_verdicts(verdict_GK, surviving_K)
    members = []
    for row, rollout in enumerate(rollouts):
        attributed = _attributed(rule, attributions[row], verdict_GK[row], surviving_K, tokens_GM[row])
        mixed = bool(mixed_G[row])
        shares = (float(reward_G[row]), float(advantage_G[row]))
        members.append(_spread(rule, rollout, *shares, tokens_GM[row], attributed, surviving_K, mixed=mixed))
    return GroupAdvantages(group=group, surviving_K=surviving_K, rollouts=tuple(members))


def group_advantages_from_rewards(
    group: str,
    reward_G: FloatArray,
    tokens_GM: Sequence[IntArray],
    rollouts: Sequence[int],
    *,
    rule: AdvantageRule,
    std_epsilon: float = STD_EPSILON,
) -> GroupAdvantages:
    """The rule's advantages for given rewards, without rubric or citations (rewards `outcome` and `random`).

    Args and errors as in `group_advantages`; the record's `surviving_K` is empty.
    """
    _check_rows(group, rollouts, rewards=len(reward_G), tokens=len(tokens_GM))
    advantage_G = rule.advantages(reward_G, std_epsilon=std_epsilon)
    none_K = np.zeros(0, dtype=np.bool_)
    members = [
        _spread(rule, rollout, float(reward), float(advantage), tokens_M, CreditFallback.CREDIT_OFF, none_K)
        for rollout, reward, advantage, tokens_M in zip(rollouts, reward_G, advantage_G, tokens_GM, strict=True)
    ]
    return GroupAdvantages(group=group, surviving_K=none_K, rollouts=tuple(members))


def training_samples(
    trajectory: Trajectory, rollout_advantage: RolloutAdvantage, *, credit: bool
) -> list[TrainingSample]:
    """Assign a rollout's step advantages to its tokens; each branch becomes a sample.

    A rollout has one advantage A_i for all its branches, spread by n_j and Q_j over the steps of all of them.

    With credit, a token of step j receives a_j and a gap token 0. This includes sampled gap tokens (of a turn that
    nobody received) and holds even if a fallback made a_j uniform: the conserved total is that of the step tokens.
    Without credit, and in a rollout without any step, every sampled token receives A_i, as in vanilla GRPO. In both
    cases all sampled tokens are in the loss mask: they count in the token-mean and in the KL term.

    Args:
        trajectory: the rollout.
        rollout_advantage: its share of the update.
        credit: whether the run uses step credit, even if it failed on this rollout.
    Raises: ValueError if the two belong to different rollouts, disagree in the number of steps, or a step holds a token
        that was not sampled.
    """
    where = f"trajectory {trajectory.name} of {trajectory.group}"
    if not len(trajectory.token_ids_T):
        # The agent ended without a token: the rollout is judged, but there is nothing to train on.
        return []
    if rollout_advantage.rollout != trajectory.rollout:
        raise ValueError(f"{where}: the advantages are those of rollout {rollout_advantage.rollout}")
    in_step_T: BoolArray = trajectory.step_T != GAP
    if (in_step_T & ~trajectory.sampled_T).any():
        raise ValueError(f"{where}: a step contains a token that was not sampled")
    advantage_M = rollout_advantage.step_advantage_M
    if len(trajectory.steps) != len(advantage_M) or trajectory.step_T.max() >= len(advantage_M):
        raise ValueError(f"{where}: has {len(trajectory.steps)} steps, but advantages for {len(advantage_M)}")
    advantage_T = np.zeros(len(trajectory.token_ids_T), dtype=np.float32)
    if credit and in_step_T.any():
        advantage_T[in_step_T] = advantage_M[trajectory.step_T[in_step_T]]
    else:
        advantage_T[trajectory.sampled_T] = rollout_advantage.advantage
    return [
        TrainingSample(
            group=trajectory.group,
            task_id=trajectory.task_id,
            rollout=trajectory.rollout,
            policy_version=trajectory.policy_version,
            token_ids_T=trajectory.token_ids_T[span],
            loss_mask_T=trajectory.sampled_T[span],
            advantage_T=advantage_T[span],
            logprob_T=trajectory.logprob_T[span],
            prompt_length=_unsampled(trajectory.sampled_T[span]) if branch else trajectory.prompt_length,
            branch=branch,
        )
        for branch, span in enumerate(trajectory.branch_spans)
    ]


def _unsampled(sampled_T: BoolArray) -> int:
    """Number of tokens before the first sampled one."""
    return int(sampled_T.argmax()) if sampled_T.any() else len(sampled_T)


def _attributed(
    rule: AdvantageRule,
    given: Sequence[Attribution] | CreditSkipReason | None,
    verdict_K: IntArray,
    surviving_K: BoolArray,
    tokens_M: IntArray,
) -> Sequence[Attribution] | CreditFallback:
    """The attributions from which a row's step quality is computed, or why there are none."""
    if not rule.cites:
        return CreditFallback.CREDIT_OFF
    if given is None:
        return CreditFallback.CREDIT_CALL_FAILED
    if isinstance(given, CreditSkipReason):
        return unanimous_attributions(verdict_K * surviving_K) if len(tokens_M) else ()
    return rule.attributions(given, verdict_K)


def _spread(
    rule: AdvantageRule,
    rollout: int,
    reward: float,
    advantage: float,
    tokens_M: IntArray,
    attributed: Sequence[Attribution] | CreditFallback,
    surviving_K: BoolArray,
    *,
    mixed: bool = False,
) -> RolloutAdvantage:
    """A rollout's advantage on its steps: by its attributions, or A_i on every step if there are none."""
    if isinstance(attributed, CreditFallback):
        quality, fallback, spread = step_quality((), surviving_K, len(tokens_M)), attributed, step_advantages
        inert = True
    else:
        quality = step_quality(attributed, surviving_K, len(tokens_M))
        fallback, spread = credit_fallback(advantage, quality.quality_M, tokens_M), rule.spread
        inert = is_inert(quality, fallback, mixed_scores=None if attributed else mixed)
    return RolloutAdvantage(
        rollout=rollout,
        reward=reward,
        advantage=advantage,
        quality_M=quality.quality_M,
        step_advantage_M=spread(advantage, quality.quality_M, tokens_M),
        cited_M=quality.cited_M,
        fallback=fallback,
        inert=inert,
    )


def _check_rows(group: str, rollouts: Sequence[int], **rows: int) -> None:
    wrong = {name: number for name, number in rows.items() if number != len(rollouts)}
    if wrong:
        raise ValueError(f"group {group}: expected {len(rollouts)} rows, one per rollout, found {wrong}")
    if any(later <= earlier for earlier, later in pairwise(rollouts)):
        raise ValueError(f"group {group}: rollout indices must ascend, got {list(rollouts)}")

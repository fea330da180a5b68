"""The algorithm's variants over recorded verdicts: what each would have made of a run, without asking the judge again.

=================  =====================================================================================================
``draco``          the method as it is; its difference from the record says how exactly the record can be recomputed
``no_dropout``     every criterion counts, also one that all members pass
``mixed_only``     a criterion counts only if some member passes it and another fails it
``no_std``         A = R - mean(R), not divided by the standard deviation
``no_credit``      A_i on every step: vanilla GRPO on the rubric's reward
``score_verdicts`` step quality from the scoring verdicts, with the credit call's citations but not its overrulings
=================  =====================================================================================================

A credit call is asked only about what its run needed: a variant under which further criteria survive, or under which a
group has spread that it did not have, finds no citations there. The column ``no_citation`` counts such rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from draco_ray.algorithm.advantage import STD_EPSILON, group_advantages_G
from draco_ray.algorithm.credit import credit_fallback, is_inert, quality_spread, step_advantages, step_quality
from draco_ray.algorithm.reward import mixed_verdicts, rubric_rewards, surviving_criteria
from draco_ray.lab.analysis.credit import push_shares, signs
from draco_ray.lab.analysis.recorded import RecordedGroup, recorded_groups
from draco_ray.records import (
    Attribution,
    BoolArray,
    CreditFallback,
    FloatArray,
    GroupAdvantages,
    IntArray,
    RolloutAdvantage,
    Verdict,
)
from draco_ray.runs.directory import RunDirectory


class Variant(StrEnum):
    """A way to turn verdicts and citations into step advantages; see the module's table."""

    DRACO = "draco"
    NO_DROPOUT = "no_dropout"
    MIXED_ONLY = "mixed_only"
    NO_STD = "no_std"
    NO_CREDIT = "no_credit"
    SCORE_VERDICTS = "score_verdicts"


VARIANTS = pa.schema(
    [
        ("run", pa.string()),
        ("training_step", pa.int64()),
        ("variant", pa.string()),
        ("groups", pa.int64()),
        ("groups_with_signal", pa.int64()),
        ("rollouts", pa.int64()),
        ("criteria", pa.int64()),
        ("surviving", pa.int64()),
        ("reward", pa.float64()),
        ("inert_share", pa.float64()),
        ("no_citation", pa.int64()),
        ("quality_spread", pa.float64()),
        ("reward_shift", pa.float64()),
        ("advantage_shift", pa.float64()),
        ("sign_flips", pa.float64()),
        ("push_moved", pa.float64()),
    ]
)


def variant_advantages(
    group: RecordedGroup,
    variant: Variant,
    *,
    std_epsilon: float = STD_EPSILON,
) -> GroupAdvantages:
    """R, A and a_j of a recorded group under a variant.

    Args:
        group: its verdicts and citations.
        variant: what to change.
        std_epsilon: added to the group's standard deviation.
    """
    surviving_K = _surviving(group.verdict_GK, variant)
    reward_G = rubric_rewards(group.verdict_GK, surviving_K)
    if variant is Variant.NO_STD:
        advantage_G: FloatArray = (
            np.zeros(len(reward_G)) if np.ptp(reward_G) == 0.0 else np.asarray(reward_G - reward_G.mean())
        )
    else:
        advantage_G = group_advantages_G(reward_G, std_epsilon=std_epsilon)
    mixed_G = mixed_verdicts(group.verdict_GK, surviving_K)
    members = []
    for index, rollout in enumerate(group.rollouts):
        attributions = group.attributions[index]
        if variant is Variant.SCORE_VERDICTS and attributions is not None:
            attributions = _scored(attributions, group.verdict_GK[index])
        members.append(
            _member(
                rollout,
                float(reward_G[index]),
                float(advantage_G[index]),
                group.tokens_GM[index],
                attributions,
                surviving_K,
                bool(mixed_G[index]),
                credit=variant is not Variant.NO_CREDIT,
            )
        )
    return GroupAdvantages(group=group.name, surviving_K=surviving_K, rollouts=tuple(members))


def replay_variants(
    run: RunDirectory,
    variants: Sequence[Variant] = tuple(Variant),
    steps: Sequence[int] | None = None,
    *,
    std_epsilon: float = STD_EPSILON,
) -> pa.Table:
    """One row per training step and variant, compared with what the run recorded.

    ``reward_shift`` and ``advantage_shift`` are mean absolute differences of R and A; ``sign_flips`` the share of
    rollouts whose A changes between negative, zero and positive; ``push_moved`` the share of a trajectory's push,
    |a_j| n_j, that lands on other steps than recorded (0 none, 1 all), a mean over the rollouts pushed both times.
    """
    rows = []
    for step in run.steps() if steps is None else steps:
        groups = list(recorded_groups(run, [step]))
        if groups:
            rows += [
                {"run": run.path.name, "training_step": step, **_compare(groups, variant, std_epsilon)}
                for variant in variants
            ]
    return pa.Table.from_pylist(rows, schema=VARIANTS)


def moved_push(before: Sequence[float], after: Sequence[float], tokens: Sequence[int]) -> float | None:
    """The share of a trajectory's push that lands on other steps, 0 .. 1; None where nothing is pushed.

    >>> moved_push([1.0, 0.0], [0.0, 1.0], [2, 2])
    1.0
    """
    old, new = push_shares(before, tokens), push_shares(after, tokens)
    if not any(old) or not any(new):
        return None
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(old, new, strict=True))


def _compare(groups: Sequence[RecordedGroup], variant: Variant, std_epsilon: float) -> dict[str, Any]:
    results = [variant_advantages(group, variant, std_epsilon=std_epsilon) for group in groups]
    shares = [share for result in results for share in result.rollouts]
    reward = np.concatenate([group.reward_G for group in groups])
    advantage = np.concatenate([group.advantage_G for group in groups])
    new_reward = np.array([share.reward for share in shares])
    new_advantage = np.array([share.advantage for share in shares])
    recorded = [
        (list(group.step_advantage_GM[index]), group.tokens_GM[index].tolist())
        for group in groups
        for index in range(len(group.rollouts))
    ]
    moved = [
        moved_push(before, share.step_advantage_M.tolist(), tokens)
        for share, (before, tokens) in zip(shares, recorded, strict=True)
    ]
    spreads = [quality_spread(share.quality_M) for share in shares]
    return {
        "variant": variant.value,
        "groups": len(groups),
        "groups_with_signal": sum(any(share.advantage for share in result.rollouts) for result in results),
        "rollouts": len(shares),
        "criteria": sum(len(group.titles) for group in groups),
        "surviving": sum(int(result.surviving_K.sum()) for result in results),
        "reward": float(new_reward.mean()),
        "inert_share": float(np.mean([share.inert for share in shares])),
        "no_citation": sum(share.fallback is CreditFallback.NO_CITATION and share.advantage != 0.0 for share in shares),
        "quality_spread": _mean(spread for spread in spreads if not math.isnan(spread)),
        "reward_shift": float(np.abs(new_reward - reward).mean()),
        "advantage_shift": float(np.abs(new_advantage - advantage).mean()),
        "sign_flips": float((signs(new_advantage) != signs(advantage)).mean()),
        "push_moved": _mean(share for share in moved if share is not None),
    }


def _surviving(verdict_GK: IntArray, variant: Variant) -> BoolArray:
    if variant is Variant.NO_DROPOUT:
        return np.ones(verdict_GK.shape[1], dtype=np.bool_)
    surviving_K = surviving_criteria(verdict_GK)
    if variant is Variant.MIXED_ONLY:
        surviving_K = surviving_K & np.any(verdict_GK == Verdict.PASS, axis=0)
    return surviving_K


def _scored(attributions: Sequence[Attribution], verdict_K: IntArray) -> tuple[Attribution, ...]:
    return tuple(
        replace(attribution, verdict=Verdict(int(verdict_K[attribution.criterion]))) for attribution in attributions
    )


def _member(
    rollout: int,
    reward: float,
    advantage: float,
    tokens_M: IntArray,
    attributions: Sequence[Attribution] | None,
    surviving_K: BoolArray,
    mixed: bool,
    *,
    credit: bool,
) -> RolloutAdvantage:
    quality = step_quality(attributions or () if credit else (), surviving_K, len(tokens_M))
    if not credit:
        fallback = CreditFallback.CREDIT_OFF
    elif attributions is None:
        fallback = CreditFallback.CREDIT_CALL_FAILED
    else:
        fallback = credit_fallback(advantage, quality.quality_M, tokens_M)
    return RolloutAdvantage(
        rollout=rollout,
        reward=reward,
        advantage=advantage,
        quality_M=quality.quality_M,
        step_advantage_M=step_advantages(advantage, quality.quality_M, tokens_M),
        cited_M=quality.cited_M,
        fallback=fallback,
        inert=is_inert(quality, fallback, mixed_scores=mixed if credit and attributions == () else None),
    )


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return math.fsum(kept) / len(kept) if kept else None

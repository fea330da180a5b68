"""Advantage rules: how a group's verdicts and citations become step advantages (``algorithm.rule``).

`group_advantages` chains a rule's parts. Training and `draco replay` both call it, so every rule can also be replayed
over recorded verdicts.

To add one, subclass `AdvantageRule` and override the part of the chain that differs, then name it as
``algorithm.rule=my_rules.py:MyRule``; docs/extending/advantage_rule.md shows one.

====================  ==================================================================================================
``draco``             the method of the paper
``grpo``              A_i on every sampled token: vanilla GRPO on the rubric's reward; no credit call is made
``no_dropout``        every criterion counts, even one that all members pass
``mixed_only``        a criterion counts only if some member passes it and another fails it
``no_std``            A = R - mean(R), not divided by the standard deviation
``score_verdicts``    step quality from the scoring verdicts, with the credit call's citations but not its overrulings
``draco_calibrated``  ``draco`` mixed with ``grpo``, by how reliable the judge is (``algorithm.reliability``)
====================  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from itertools import pairwise

import numpy as np

from draco_ray.algorithm.equations import (
    STD_EPSILON,
    credit_fallback,
    group_advantages_G,
    is_inert,
    mixed_verdicts,
    rubric_rewards,
    step_advantages,
    step_quality,
    surviving_criteria,
    unanimous_attributions,
)
from draco_ray.errors import ConfigError
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
from draco_ray.registry import find_component

RULES = {
    "draco": "draco_ray.algorithm.rules:AdvantageRule",
    "grpo": "draco_ray.algorithm.rules:Grpo",
    "no_dropout": "draco_ray.algorithm.rules:NoDropout",
    "mixed_only": "draco_ray.algorithm.rules:MixedOnly",
    "no_std": "draco_ray.algorithm.rules:NoStd",
    "score_verdicts": "draco_ray.algorithm.rules:ScoreVerdicts",
    "draco_calibrated": "draco_ray.algorithm.rules:Calibrated",
}
"""Built-in rules, by name."""


class AdvantageRule:
    """DRACO's rule, in parts that a subclass may replace; `group_advantages` chains them."""

    cites: bool = True
    """Whether the rule spreads A_i over steps. If not, no credit call is made; every sampled token receives A_i."""

    def surviving(self, verdict_GK: IntArray) -> BoolArray:
        """The criteria that count, a (K,) mask: those that some member failed (discriminative dropout)."""
        return surviving_criteria(verdict_GK)

    def rewards(self, verdict_GK: IntArray, surviving_K: BoolArray) -> FloatArray:
        """R_i in [-1, 1] (Eq. ``rubric-reward``)."""
        return rubric_rewards(verdict_GK, surviving_K)

    def advantages(self, reward_G: FloatArray, *, std_epsilon: float = STD_EPSILON) -> FloatArray:
        """A_i (Eq. ``grpo-adv``), also for rewards that do not come from a rubric."""
        return group_advantages_G(reward_G, std_epsilon=std_epsilon)

    def attributions(self, attributed: Sequence[Attribution], verdict_K: IntArray) -> Sequence[Attribution]:
        """The verdicts and citations from which step quality is computed; here, those of the credit call.

        Args:
            attributed: verdicts and citations of the credit call.
            verdict_K: verdicts of the scoring call.
        """
        return attributed

    def spread(self, advantage: float, quality_M: FloatArray, tokens_M: IntArray) -> FloatArray:
        """a_j, what every token of step j receives (Eqs. ``stepw`` and ``credit``)."""
        return step_advantages(advantage, quality_M, tokens_M)


class CreditSkipReason(Enum):
    """Why no credit call was made for a rollout."""

    UNANIMOUS = "unanimous"
    """The rollout's surviving verdicts agree, so all steps get the same total advantage, whichever are cited."""


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


class Grpo(AdvantageRule):
    """Vanilla GRPO on the reward."""

    cites = False


class NoDropout(AdvantageRule):
    """Every criterion counts."""

    def surviving(self, verdict_GK: IntArray) -> BoolArray:
        """A mask that keeps all criteria."""
        return np.ones(verdict_GK.shape[1], dtype=np.bool_)


class MixedOnly(AdvantageRule):
    """A criterion counts only if some member passes it and another fails it."""

    def surviving(self, verdict_GK: IntArray) -> BoolArray:
        """The criteria that some member failed and another passed."""
        return surviving_criteria(verdict_GK) & np.any(verdict_GK == Verdict.PASS, axis=0)


class NoStd(AdvantageRule):
    """Advantages are not divided by the standard deviation."""

    def advantages(self, reward_G: FloatArray, *, std_epsilon: float = STD_EPSILON) -> FloatArray:
        """R_i - mean(R); exactly 0 if all rewards are equal."""
        # Compare the rewards themselves: rounding of the mean would leave a tiny spread.
        return np.zeros(len(reward_G)) if np.ptp(reward_G) == 0.0 else np.asarray(reward_G - reward_G.mean())


class ScoreVerdicts(AdvantageRule):
    """The credit call cites steps but cannot override verdicts."""

    def attributions(self, attributed: Sequence[Attribution], verdict_K: IntArray) -> Sequence[Attribution]:
        """The credit call's citations with the scoring call's verdicts."""
        return tuple(replace(each, verdict=Verdict(int(verdict_K[each.criterion]))) for each in attributed)


class Calibrated(AdvantageRule):
    """a_j = r draco_j + (1 - r) A, r in [0, 1] the judge's reliability: a less reliable judge shifts less advantage.

    r = 1 is the paper's rule; r = 0 is uniform GRPO and makes no credit call. `draco attribution-bench --labels`
    measures r. Of the paper's properties, conservation (P1), the sign of every step (P3), scaling with A (P6) and the
    mirror of winners and losers (P7) hold for every r. Two are lost for r < 1, because the uniform part is proportional
    to a step's tokens: equal quality gives equal step totals (P2), and a step gains nothing by length (P5). Advantage
    follows quality (P4) only among steps of equal length.
    """

    def __init__(self, reliability: float) -> None:
        self.reliability = reliability
        self.cites = reliability > 0.0

    def spread(self, advantage: float, quality_M: FloatArray, tokens_M: IntArray) -> FloatArray:
        """A mix of the paper's a_j and the uniform A."""
        uniform_M = step_advantages(advantage, np.full(len(tokens_M), np.nan), tokens_M)
        credited_M = step_advantages(advantage, quality_M, tokens_M)
        return self.reliability * credited_M + (1.0 - self.reliability) * uniform_M


def find_rule(name: str, reliability: float | None = None) -> AdvantageRule:
    """The rule of that name (see `draco_ray.registry.find_component`).

    Args:
        name: value of ``algorithm.rule``.
        reliability: value of ``algorithm.reliability``, for `Calibrated` and its subclasses.

    Raises:
        ConfigError: there is no such rule, it does not subclass `AdvantageRule`, or its reliability is not set.
    """
    rule = find_component("algorithm.rule", name, RULES)
    if not (isinstance(rule, type) and issubclass(rule, AdvantageRule)):
        raise ConfigError(
            f"algorithm.rule={name!r} is not an advantage rule; expected a subclass of "
            "draco_ray.algorithm.rules.AdvantageRule"
        )
    if not issubclass(rule, Calibrated):
        return rule()
    if reliability is None:
        raise ConfigError(
            f"algorithm.rule={name}: needs algorithm.reliability, a number from 0 to 1; measure it with "
            "`draco agreement` or `draco attribution-bench --labels FILE`"
        )
    return rule(reliability)

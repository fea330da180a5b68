"""Advantage rules: how a group's verdicts and citations become step advantages (``algorithm.rule``).

Training and `draco replay` call the same object, so every rule can also be replayed over recorded verdicts.

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

import numpy as np

from draco_ray.algorithm.equations import (
    STD_EPSILON,
    group_advantages_G,
    rubric_rewards,
    step_advantages,
    surviving_criteria,
)
from draco_ray.errors import ConfigError
from draco_ray.records import Attribution, BoolArray, FloatArray, IntArray, Verdict
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
    """DRACO's rule, in parts that a subclass may replace; `draco_ray.algorithm.group.group_advantages` chains them."""

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
        """The verdicts and citations for step quality: the credit call's. ``verdict_K`` are the scoring verdicts."""
        return attributed

    def spread(self, advantage: float, quality_M: FloatArray, tokens_M: IntArray) -> FloatArray:
        """a_j, what every token of step j receives (Eqs. ``stepw`` and ``credit``)."""
        return step_advantages(advantage, quality_M, tokens_M)


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
            "`draco attribution-bench --labels FILE`"
        )
    return rule(reliability)

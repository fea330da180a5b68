"""From judged groups to training samples: `draco_ray.algorithm` applied to what the judge's phases return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draco_ray.algorithm.equations import mixed_verdicts, quality_spread, random_rewards
from draco_ray.algorithm.group import (
    CreditSkipReason,
    group_advantages,
    group_advantages_from_rewards,
    training_samples,
)
from draco_ray.algorithm.rules import find_rule
from draco_ray.records import (
    Attribution,
    GroupAdvantages,
    Judged,
    ScoredCriterion,
    TrainingSample,
    Trajectory,
    Verdict,
)
from draco_ray.summaries import AdvantageSummary, RewardSummary
from draco_ray.workers.local import LocalActor, Reference, resolve

if TYPE_CHECKING:
    from draco_ray.config.schema import AlgorithmConfig

Scores = Judged[tuple[ScoredCriterion, ...]]


class AdvantageComputer:
    """Computes rewards and advantages; its only state is the configuration. Lists may hold Ray references to values."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._rule = find_rule(config.rule, config.reliability)

    async def rewards(self, rollouts: Sequence[int], scores: Sequence[Reference]) -> RewardSummary:
        """Apply discriminative dropout and Eq. ``rubric-reward`` to the rollouts whose scoring call succeeded."""
        scored, verdict_GK = _verdicts(rollouts, [await resolve(ref) for ref in scores])
        surviving_K = self._rule.surviving(verdict_GK)
        rewards_G = self._rule.rewards(verdict_GK, surviving_K)
        mixed_G = mixed_verdicts(verdict_GK, surviving_K)
        unanimous = tuple(rollout for rollout, mixed in zip(scored, mixed_G, strict=True) if not mixed)
        return RewardSummary(
            criteria=verdict_GK.shape[1],
            surviving=tuple(int(index) for index in np.flatnonzero(surviving_K)),
            unanimous=unanimous,
            scored=tuple(scored),
            rewards=tuple(float(reward) for reward in rewards_G),
            applicable=int((verdict_GK != Verdict.NOT_APPLICABLE).sum()),
            passed=int((verdict_GK == Verdict.PASS).sum()),
        )

    async def from_verdicts(
        self,
        group: str,
        rollouts: Sequence[int],
        trajectories: Sequence[Reference],
        scores: Sequence[Reference],
        attributions: Sequence[Reference | None] | None,
    ) -> tuple[list[TrainingSample], GroupAdvantages, dict[int, Sequence[int]], AdvantageSummary]:
        """Step credit (Eq. ``credit``).

        ``attributions`` is None if no credit calls were made for the group. An entry is None if the call was skipped
        because the rollout's verdicts are unanimous. If an entry holds scores that name steps, it is converted to
        attributions.
        """
        scored, verdict_GK = _verdicts(rollouts, [await resolve(ref) for ref in scores])
        played = {rollout: await resolve(ref) for rollout, ref in zip(rollouts, trajectories, strict=True)}
        cited: dict[int, Sequence[Attribution] | CreditSkipReason | None] = dict.fromkeys(rollouts, ())
        if attributions is not None:
            for rollout, ref in zip(rollouts, attributions, strict=True):
                judged = await resolve(ref)
                cited[rollout] = CreditSkipReason.UNANIMOUS if judged is None else _attributions(judged)
        advantages = group_advantages(
            group,
            verdict_GK,
            [cited[rollout] for rollout in scored],
            [played[rollout].tokens_M for rollout in scored],
            scored,
            rule=self._rule,
            std_epsilon=self._config.std_epsilon,
        )
        return self._finish(advantages, played, credit=self._rule.cites)

    async def from_rewards(
        self,
        group: str,
        rollouts: Sequence[int],
        trajectories: Sequence[Reference],
        evaluations: Sequence[Reference] | None,
        key: Sequence[int],
    ) -> tuple[list[TrainingSample], GroupAdvantages, dict[int, Sequence[int]], AdvantageSummary]:
        """Plain GRPO on rewards that do not come from the judge.

        Args:
            evaluations: evaluation of each rollout, for the ``outcome`` setting; the reward is the environment's or, if
                it gave none, success (1 or 0). None: the ``random`` setting.
            key: random seed of the group's random rewards.
        """
        if evaluations is None:
            reward_G = random_rewards(key, len(rollouts))
        else:
            verdicts = [(await resolve(ref)).evaluation for ref in evaluations]
            reward_G = np.array([float(each.success if each.reward is None else each.reward) for each in verdicts])
        played = {rollout: await resolve(ref) for rollout, ref in zip(rollouts, trajectories, strict=True)}
        advantages = group_advantages_from_rewards(
            group,
            reward_G,
            [played[rollout].tokens_M for rollout in rollouts],
            rollouts,
            rule=self._rule,
            std_epsilon=self._config.std_epsilon,
        )
        return self._finish(advantages, played, credit=False)

    def _finish(
        self, advantages: GroupAdvantages, played: dict[int, Trajectory], *, credit: bool
    ) -> tuple[list[TrainingSample], GroupAdvantages, dict[int, Sequence[int]], AdvantageSummary]:
        shares = advantages.rollouts
        samples = [
            sample for share in shares for sample in training_samples(played[share.rollout], share, credit=credit)
        ]
        spreads = [(share.inert, quality_spread(share.quality_M)) for share in shares if share.cited_M.any()]
        summary = AdvantageSummary(
            rollouts=tuple(share.rollout for share in shares),
            rewards=tuple(float(share.reward) for share in shares),
            inert=sum(share.inert for share in shares),
            fallbacks=dict(Counter(share.fallback.value for share in shares)),
            active_spreads=tuple(spread for inert, spread in spreads if not inert),
            inert_spreads=tuple(spread for inert, spread in spreads if inert),
        )
        tokens = {share.rollout: played[share.rollout].tokens_M.tolist() for share in shares}
        return samples, advantages, tokens, summary


def _attributions(judged: Judged[Any]) -> Sequence[Attribution] | None:
    if judged.value and isinstance(judged.value[0], ScoredCriterion):
        return Attribution.of_scores(judged.value)
    return judged.value if judged.ok else None


def _verdicts(rollouts: Sequence[int], scores: Sequence[Scores]) -> tuple[list[int], np.ndarray]:
    """The rollouts whose scoring call succeeded, and their verdicts as a (G, K) matrix."""
    scored = [(rollout, judged.value) for rollout, judged in zip(rollouts, scores, strict=True) if judged.ok]
    rows = [[int(score.verdict) for score in value or ()] for _, value in scored]
    criteria = len(rows[0]) if rows else 0
    return [rollout for rollout, _ in scored], np.asarray(rows, dtype=np.int8).reshape(len(rows), criteria)


def local_advantages(config: AlgorithmConfig) -> LocalActor:
    """An advantage actor that runs in this process, for a `draco_ray.pipeline.Pipeline`."""
    return LocalActor(AdvantageComputer(config), {"from_verdicts": 4, "from_rewards": 4})

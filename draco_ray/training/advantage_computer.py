"""The Ray actor around `draco_ray.algorithm`: it turns verdicts and citations into training samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from draco_ray.algorithm.credit import quality_spread
from draco_ray.algorithm.group import Uncalled, group_advantages, group_advantages_from_rewards, training_samples
from draco_ray.algorithm.reward import mixed_verdicts, random_rewards
from draco_ray.algorithm.rules import find_rule
from draco_ray.config.schema import AlgorithmConfig
from draco_ray.placement import beside_the_driver
from draco_ray.records import (
    Attribution,
    BoolArray,
    GroupAdvantages,
    IntArray,
    Judged,
    ScoredCriterion,
    TrainingSample,
    Trajectory,
    Verdict,
)
from draco_ray.rollout.worker import Evaluated
from draco_ray.summaries import AdvantageSummary, RewardSummary

Scores = Judged[tuple[ScoredCriterion, ...]]
Attributions = Judged[tuple[Attribution, ...]]


class AdvantageComputerActor:
    """Computes rewards and advantages; its only state is the configuration."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._rule = find_rule(config.rule, config.reliability)

    async def rewards(self, rollouts: Sequence[int], scores: Sequence[ray.ObjectRef[Scores]]) -> RewardSummary:
        """Apply discriminative dropout and Eq. ``rubric-reward`` to the rollouts whose scoring call succeeded."""
        scored, verdict_GK = _verdicts(rollouts, [await ref for ref in scores])
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

    @ray.method(num_returns=4)
    async def from_verdicts(
        self,
        group: str,
        rollouts: Sequence[int],
        trajectories: Sequence[ray.ObjectRef[Trajectory]],
        scores: Sequence[ray.ObjectRef[Scores]],
        attributions: Sequence[ray.ObjectRef[Attributions] | None] | None,
    ) -> tuple[list[TrainingSample], GroupAdvantages, dict[int, Sequence[int]], AdvantageSummary]:
        """Step credit (Eq. ``credit``).

        ``attributions`` is None if no credit calls were made for the group. An entry is None if the call was skipped
        because the rollout's verdicts are unanimous. Scores that name steps are used as attributions.
        """
        scored, verdict_GK = _verdicts(rollouts, [await ref for ref in scores])
        played = {rollout: await ref for rollout, ref in zip(rollouts, trajectories, strict=True)}
        cited: dict[int, Sequence[Attribution] | Uncalled | None] = dict.fromkeys(rollouts, ())
        if attributions is not None:
            for rollout, ref in zip(rollouts, attributions, strict=True):
                judged = None if ref is None else await ref
                cited[rollout] = Uncalled.UNANIMOUS if judged is None else _attributions(judged)
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

    @ray.method(num_returns=4)
    async def from_rewards(
        self,
        group: str,
        rollouts: Sequence[int],
        trajectories: Sequence[ray.ObjectRef[Trajectory]],
        evaluations: Sequence[ray.ObjectRef[Evaluated]] | None,
        key: Sequence[int],
    ) -> tuple[list[TrainingSample], GroupAdvantages, dict[int, Sequence[int]], AdvantageSummary]:
        """Plain GRPO on rewards that do not come from the judge.

        Args:
            evaluations: the ``outcome`` setting: the environment's reward or, without one, success (1 or 0). None: the
                ``random`` setting.
            key: random seed of the group's random rewards.
        """
        if evaluations is None:
            reward_G = random_rewards(key, len(rollouts))
        else:
            verdicts = [(await ref).evaluation for ref in evaluations]
            reward_G = np.array([float(each.success if each.reward is None else each.reward) for each in verdicts])
        played = {rollout: await ref for rollout, ref in zip(rollouts, trajectories, strict=True)}
        advantages = group_advantages_from_rewards(
            group,
            reward_G,
            [played[rollout].tokens_M for rollout in rollouts],
            rollouts,
            rule=self._rule,
            std_epsilon=self._config.std_epsilon,
        )
        return self._finish(advantages, played, credit=False)

    def probe(self, samples: Sequence[TrainingSample], sampled: int, most: int) -> tuple[list[int], BoolArray] | None:
        """The tokens of a group that the canary compares: the prefix of the sample with the most sampled tokens.

        Args:
            sampled: maximum number of sampled tokens.
            most: maximum number of tokens; the last token of a sample is never included, since an engine generates one
                more.
        Returns: at least 2 token ids, and a mask over all but the first: True where the policy sampled the token, or
            everywhere if it sampled none. None if every sample is too short.
        """
        begun = [_beginning(sample, sampled, most) for sample in samples if len(sample.token_ids_T) > 2]
        if not begun:
            return None
        token_ids_T, sampled_T = max(begun, key=lambda one: (int(one[1].sum()), -len(one[0])))
        compared_T = sampled_T[1:] if sampled_T[1:].any() else np.ones(len(token_ids_T) - 1, dtype=bool)
        return token_ids_T.tolist(), compared_T

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


def start_advantage_computer(config: AlgorithmConfig, run_name: str) -> Any:
    """Start the advantage actor of a run."""
    remote = ray.remote(AdvantageComputerActor)
    return remote.options(
        name=f"AdvantageComputer@{run_name}",
        num_cpus=0,
        scheduling_strategy=beside_the_driver(),
        max_concurrency=64,
        # The actor is stateless, so restarts change nothing.
        max_restarts=-1,
        max_task_retries=3,
    ).remote(config)


def _beginning(sample: TrainingSample, sampled: int, most: int) -> tuple[IntArray, BoolArray]:
    """The beginning of a sample with at most ``sampled`` sampled tokens, and the mask of sampled tokens."""
    found = np.flatnonzero(sample.loss_mask_T)[:sampled]
    end = int(found[-1]) + 1 if len(found) else sampled
    end = min(end, most, len(sample.token_ids_T) - 1)
    return sample.token_ids_T[:end], sample.loss_mask_T[:end].astype(bool)


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

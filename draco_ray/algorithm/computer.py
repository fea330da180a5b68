"""From judged groups to training samples: `draco_ray.algorithm` applied to what the judge's phases return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draco_ray.algorithm.equations import mixed_verdicts, quality_spread, random_rewards
from draco_ray.algorithm.rules import CreditSkipReason, find_rule, group_advantages, group_advantages_from_rewards
from draco_ray.records import (
    GAP,
    Attribution,
    BoolArray,
    GroupAdvantages,
    Judged,
    RolloutAdvantage,
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
        """Apply discriminative dropout and Eq. ``rubric-reward`` to the rollouts whose scoring call succeeded.

        The result decides which credit calls are made; `from_verdicts` computes the rewards again.
        """
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


def training_samples(
    trajectory: Trajectory, rollout_advantage: RolloutAdvantage, *, credit: bool
) -> list[TrainingSample]:
    """Assign a rollout's step advantages to its tokens, and make a training sample of each branch.

    A rollout has one advantage A_i. It is spread over the steps of all branches together.

    With step credit, a token of step j receives the step's advantage a_j. A token outside all steps (a gap) receives 0,
    even if it was sampled (in a turn that nobody received), and even if a fallback gives every step the same advantage:
    property P1 conserves the total over the tokens of steps only.
    Without step credit, and in a rollout without steps, every sampled token receives A_i, as in vanilla GRPO.
    In both cases the loss mask contains all sampled tokens: they count in the token-mean and in the KL term.

    Args:
        trajectory: the rollout.
        rollout_advantage: the rollout's advantage, and the advantages of its steps.
        credit: whether the run uses step credit; True even if the credit call failed for this rollout.
    Raises: ValueError if ``rollout_advantage`` belongs to another rollout or has another number of steps, or if a step
        contains a token that was not sampled.
    """
    where = f"trajectory {trajectory.name} of {trajectory.group}"
    if not len(trajectory.token_ids_T):
        # The agent ended without a token: the rollout is judged, but there is nothing to train on.
        return []
    if rollout_advantage.rollout != trajectory.rollout:
        raise ValueError(f"{where}: expected its own advantages, got rollout {rollout_advantage.rollout}'s")
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

"""A judge that is never trained on (``judge.held_out``) scores a few rollouts of a share of the groups.

If it fails rollouts that the main judge rewards, the policy may be exploiting the main judge
(`draco_ray.algorithm.drift`). It sees what the main judge sees and never the environment's evaluator. Its verdicts are
used for metrics only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from draco_ray.algorithm.drift import held_out_sample
from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Score
from draco_ray.judging.prompts import load_static_rubric
from draco_ray.summaries import PhaseSummary, RewardSummary

if TYPE_CHECKING:
    from draco_ray.judging.pool import JudgePool

HELD_OUT_PHASE = "held_out"
"""Phase name of the held-out judge's calls in metrics and timelines."""


def is_group_sampled(share: float, group: str) -> bool:
    """Whether a group belongs to the sample of this share of all groups; deterministic."""
    digest = hashlib.blake2b(group.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") < share * 2**56


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Pass shares, in [0, 1], that the two judges give to the rollouts of a group's `held_out_sample`."""

    trained: tuple[float, ...]
    """Pass shares of these rollouts according to the main judge, on whose verdicts the policy is trained: the half with
    the highest rewards, highest reward first, then the middle one."""
    best: tuple[float, ...]
    """Pass shares, according to the held-out judge, of the half with the highest rewards, highest reward first."""
    middle: float | None
    """Pass share, according to the held-out judge, of one rollout of the other half: the one with the highest reward
    below the group's maximum. None if all rewards are equal."""

    @property
    def held_out(self) -> tuple[float, ...]:
        """Pass shares of all scored rollouts, by the held-out judge."""
        return self.best if self.middle is None else (*self.best, self.middle)


class HeldOutJudge:
    """Asks the held-out judge; ``keep`` stores its calls."""

    def __init__(self, config: JudgeConfig, judges: JudgePool, keep: Any) -> None:
        """Read the held-out judge's rubric. Raises: ConfigError: as `load_static_rubric`."""
        assert config.held_out is not None
        self._config, self._judges, self._keep = config.held_out, judges, keep
        rubric = self._config.rubric
        self._rubric = None if rubric is None else load_static_rubric(rubric)

    async def score(
        self,
        step: int,
        context: CallContext,
        rollouts: Sequence[tuple[int, Any, PhaseSummary]],
        reward: RewardSummary,
        rubric: Any,
        phases: list[PhaseSummary],
    ) -> HeldOutScores | None:
        """Score rollouts of a group; None if it is not in the sample or a verdict is missing.

        Args:
            step: training step.
            context: the group, as the archive records it.
            rollouts: for each, its number, a reference to its trajectory, and the main judge's scores.
            reward: the group's rewards.
            rubric: the group's, used if the held-out judge has none.
            phases: gets the summary of each scoring.
        """

        async def one(rollout: int, trajectory: Any, trained: PhaseSummary) -> tuple[float, float] | None:
            about = replace(context, rollout=rollout, held_out=True)
            asked = rubric if self._rubric is None else self._rubric
            found = await self._judges.ask(Score, about, trajectory=trajectory, rubric=asked)
            phases.append(replace(found.summary, phase=HELD_OUT_PHASE))
            self._keep.heldout_calls.remote(step, f"{context.task_id}-{HELD_OUT_PHASE}-{rollout}", found.archived)
            shares = pass_share(trained), pass_share(found.summary)
            return None if None in shares else shares  # type: ignore[return-value]

        if not is_group_sampled(self._config.share, context.group):
            return None
        best, middle = held_out_sample(np.array(reward.rewards))
        known = {each[0]: each for each in rollouts}
        asked = best if middle is None else [*best, middle]
        shares = await asyncio.gather(*(one(*known[reward.scored[each]]) for each in asked))
        found = [each for each in shares if each is not None]
        if len(found) < len(shares):
            return None
        held_out = [share for _, share in found]
        return HeldOutScores(
            trained=tuple(share for share, _ in found),
            best=tuple(held_out[: len(best)]),
            middle=None if middle is None else held_out[-1],
        )


def pass_share(scored: PhaseSummary) -> float | None:
    """Share of passes among the applicable verdicts of a scored rollout; None if it failed or none applies.

    The union phase drops criteria that all rollouts pass, so a rubric without criteria counts as passed (1.0).
    """
    if scored.error is not None:
        return None
    if not scored.criteria:
        return 1.0
    return scored.passed / scored.applicable if scored.applicable else None

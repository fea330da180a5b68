"""A judge that is never trained on (``judge.held_out``) scores a share of the rollouts.

Where it parts from the judge that trains, the policy may exploit the latter. It sees what that judge sees and never the
environment's evaluator. Its verdicts reach metrics and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Score
from draco_ray.judging.pool import JudgePool
from draco_ray.judging.prompts import load_static_rubric
from draco_ray.summaries import PhaseSummary

PHASE = "held_out"
"""Phase name of its calls in metrics and timelines."""


def in_sample(share: float, group: str, rollout: int | None) -> bool:
    """Whether a rollout belongs to the sample; deterministic.

    Args:
        share: sampled share of all rollouts, 0 .. 1.
        group: the rollout's group.
        rollout: its index in the group.
    """
    digest = hashlib.blake2b(f"{group}/{rollout}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") < share * 2**56


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Both judges on the same rollouts of a group."""

    trained: float
    held_out: float
    """Mean pass share by each judge, in [0, 1]."""
    rollouts: int


class HeldOutJudge:
    """Asks the held-out judge; ``keep`` stores its calls."""

    def __init__(self, config: JudgeConfig, judges: JudgePool, keep: Any) -> None:
        """Read its rubric. Raises: ConfigError: as `load_static_rubric`."""
        assert config.held_out is not None
        self._config, self._judges, self._keep = config.held_out, judges, keep
        rubric = self._config.rubric
        self._rubric = None if rubric is None else load_static_rubric(rubric)

    async def score(
        self,
        step: int,
        context: CallContext,
        rollouts: Sequence[tuple[int, ray.ObjectRef[Any], PhaseSummary]],
        rubric: Any,
        phases: list[PhaseSummary],
    ) -> HeldOutScores | None:
        """Score the sampled rollouts of a group; None if none was sampled or has verdicts of both judges.

        Args:
            step: training step.
            context: of the group.
            rollouts: number, trajectory and the trained judge's scoring, of each.
            rubric: the group's, used if the held-out judge has none.
            phases: gets the summary of each scoring.
        """

        async def one(rollout: int, trajectory: Any, trained: PhaseSummary) -> tuple[float, float] | None:
            about = replace(context, rollout=rollout, held_out=True)
            asked = rubric if self._rubric is None else self._rubric
            found = await self._judges.ask(Score, about, trajectory=trajectory, rubric=asked)
            phases.append(replace(found.summary, phase=PHASE))
            self._keep.heldout_calls.remote(step, f"{context.task_id}-{PHASE}-{rollout}", found.archived)
            shares = pass_share(trained), pass_share(found.summary)
            return None if None in shares else shares  # type: ignore[return-value]

        sampled = [each for each in rollouts if in_sample(self._config.share, context.group, each[0])]
        pairs = [pair for pair in await asyncio.gather(*(one(*each) for each in sampled)) if pair is not None]
        if not pairs:
            return None
        trained, held_out = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        return HeldOutScores(trained=trained, held_out=held_out, rollouts=len(pairs))


def pass_share(scored: PhaseSummary) -> float | None:
    """Share of passes among the applicable verdicts of a scored rollout; None if it failed or none applies.

    The union drops criteria that all rollouts pass: a rubric without criteria is passed.
    """
    if scored.error is not None:
        return None
    if not scored.criteria:
        return 1.0
    return scored.passed / scored.applicable if scored.applicable else None

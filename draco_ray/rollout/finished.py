"""Finished rollouts as the driver sees them, and a stand-in for a `RolloutPool` that returns rollouts played before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draco_ray.environments.base import termination_if_stopped
from draco_ray.records import Termination, Trajectory, Usage
from draco_ray.summaries import RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A finished rollout of a group: references to large objects, and the summary."""

    rollout: int
    trajectory: Any
    evaluation: Any
    summary: RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The result of a rollout over all attempts."""

    member: FinishedRollout | None
    """None if every attempt was lost."""
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    """Usage, including that of lost attempts as far as known."""
    error: str | None = None
    """Why the last attempt was lost; None if it succeeded."""


class PlayedRollouts:
    """Stand-in for a `RolloutPool` that returns the rollouts of one group, which were played before."""

    def __init__(self, played: Mapping[int, Trajectory], outcomes: Mapping[tuple[str, int], Any] | None = None) -> None:
        """``outcomes``: (task, rollout) -> the environment's verdict."""
        self._played, self._outcomes = played, outcomes or {}

    async def run(self, task_id: str, group: str, rollout: int, *, step: int, priority: int) -> RolloutResult:
        """Return the rollout that was played; if there is none, a result without a rollout."""
        if (trajectory := self._played.get(rollout)) is None:
            return RolloutResult(member=None)
        evaluation = self._outcomes.get((task_id, rollout))
        summary = summarise(trajectory)
        member = FinishedRollout(rollout=rollout, trajectory=trajectory, evaluation=evaluation, summary=summary)
        return RolloutResult(member=member)


def summarise(trajectory: Trajectory) -> RolloutSummary:
    """The summary of a trajectory, for the driver."""
    return RolloutSummary(
        task_id=trajectory.task_id,
        rollout=trajectory.rollout,
        attempt=trajectory.attempt,
        ended=trajectory.ended,
        termination=trajectory.termination or termination_if_stopped(trajectory.ended) or Termination.FINISHED,
        error=trajectory.error,
        turns=len(trajectory.turns),
        sampled_tokens=int(trajectory.sampled_T.sum()),
        started_at=trajectory.started_at,
        ended_at=trajectory.ended_at,
        usage=trajectory.usage,
    )

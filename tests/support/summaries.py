"""Summaries as workers send them to the driver, with default values for all fields that a test does not set."""

from __future__ import annotations

from typing import Any

from draco_ray.records import EpisodeEnd, Termination
from draco_ray.summaries import PhaseSummary, RolloutSummary


def a_rollout(index: int, start: float, end: float, ended: EpisodeEnd = EpisodeEnd.FINISHED) -> RolloutSummary:
    """A rollout of four turns."""
    return RolloutSummary(
        task_id="t_1",
        rollout=index,
        attempt=0,
        ended=ended,
        termination=Termination.SUBMITTED if ended is EpisodeEnd.FINISHED else Termination(ended.value),
        error=None,
        turns=4,
        sampled_tokens=20,
        started_at=start,
        ended_at=end,
    )


def a_phase(phase: str, start: float, end: float, **changes: Any) -> PhaseSummary:
    """A judge phase of one call of a quarter of a dollar."""
    values: dict[str, Any] = {
        "phase": phase,
        "task_id": "t_1",
        "rollout": None,
        "error": None,
        "criteria": 3,
        "calls": 1,
        "requests": 1,
        "input_tokens": 100,
        "cached_tokens": 10,
        "output_tokens": 5,
        "dollars": 0.25,
        "started_at": start,
        "ended_at": end,
    }
    return PhaseSummary(**(values | changes))

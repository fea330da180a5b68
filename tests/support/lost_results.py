"""A result of an evaluation's rollout whose every attempt was lost."""

from __future__ import annotations

from draco_ray.lab.evaluation.results import RolloutResult
from draco_ray.records import Task, Usage, lost_evaluation
from tests.support.evaluations import scenario_of


def lost_rollout(task_id: str, run: int, usage: Usage, *, seconds: float, attempts: int, error: str) -> RolloutResult:
    """As an evaluation records it."""
    evaluation = lost_evaluation(Task(task_id=task_id, group=scenario_of(task_id), instruction=""), run)
    return RolloutResult(evaluation=evaluation, usage=usage, seconds=seconds, attempts=attempts, error=error)

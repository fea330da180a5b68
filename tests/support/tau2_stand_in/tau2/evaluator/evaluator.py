"""Stand-in for tau2.evaluator.evaluator: a simulation succeeds if it has looked the customer up."""

from __future__ import annotations

import enum

from tau2.data_model.simulation import RewardInfo, SimulationRun, Task


class EvaluationType(enum.StrEnum):
    ALL = "all"


def evaluate_simulation(
    *, simulation: SimulationRun, task: Task, evaluation_type: EvaluationType, solo_mode: bool, domain: str
) -> RewardInfo:
    """Raises: RuntimeError for a task without criteria."""
    if task.evaluation_criteria is None:
        raise RuntimeError("no criteria")
    reward = float(any(message.get("tool_calls") for message in simulation.messages))
    return RewardInfo(reward=reward, reward_basis=["DB"], reward_breakdown={"DB": reward})

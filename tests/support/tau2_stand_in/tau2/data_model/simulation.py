"""Stand-in for tau2.data_model.simulation."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel


class TextRunConfig:
    """Stores its arguments, and refuses unknown names."""

    KNOWN = frozenset(
        {"domain", "retrieval_config", "llm_agent", "llm_args_agent", "llm_user", "llm_args_user", "num_trials"}
        | {"max_steps", "max_concurrency", "max_retries", "timeout", "seed", "auto_resume", "workers"}
    )

    def __init__(self, **values: Any) -> None:
        if strange := values.keys() - self.KNOWN:
            raise TypeError(f"unknown: {strange}")
        self.values = values


class TerminationReason(enum.StrEnum):
    USER_STOP = "user_stop"
    MAX_STEPS = "max_steps"
    INFRASTRUCTURE_ERROR = "infrastructure_error"


class Criteria(BaseModel):
    nl_assertions: list[str] | None = None


class Task(BaseModel):
    id: str
    user_scenario: dict[str, Any]
    evaluation_criteria: Criteria | None = None


class RewardInfo(BaseModel):
    reward: float
    reward_basis: list[str]
    reward_breakdown: dict[str, float]


class SimulationRun(BaseModel):
    id: str
    task_id: str
    trial: int = 0
    seed: int
    timestamp: str = "2026-01-01T00:00:00"
    termination_reason: TerminationReason
    messages: list[dict[str, Any]]
    reward_info: RewardInfo | None = None
    policy: str | None = None
    info: dict[str, Any] | None = None


class Results(BaseModel):
    info: dict[str, Any]
    tasks: list[Task]
    simulations: list[SimulationRun]

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json())

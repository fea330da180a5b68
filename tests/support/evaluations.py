"""Invented evaluations, with random but reproducible outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan, RolloutResult
from draco_ray.records import EpisodeEnd, Evaluation, Termination, Usage

SCENARIOS = "abcdefgh"
TASKS: dict[str, int | None] = {
    f"{scenario}_{number}": 1 + place % 3 for place, scenario in enumerate(SCENARIOS) for number in (1, 2, 3)
}


def scenario_of(task_id: str) -> str:
    """The scenario of an AppWorld task id, ``<scenario>_<1..3>``."""
    return task_id.rsplit("_", 1)[0]


def a_plan(**changes: Any) -> EvaluationPlan:
    """Eight scenarios of three tasks, three runs of one policy."""
    fields: Mapping[str, Any] = {
        "benchmark": "appworld",
        "split": "test_normal",
        "label": "draco",
        "policy": "starter",
        "runs": 3,
        "measurements": ("starter",),
        "tasks": TASKS,
        "world": "w",
        "settings": {"engine.temperature": 1.0},
    }
    return EvaluationPlan(**{**fields, **changes})


def a_result(task: str, run: int, success: bool, turns: int = 5, dollars: float | None = 0.25) -> RolloutResult:
    """One finished rollout of known cost."""
    evaluation = Evaluation(
        task_id=task,
        run=run,
        success=success,
        passed_tests=int(success),
        total_tests=1,
        turns=turns,
        ended=EpisodeEnd.FINISHED if turns else EpisodeEnd.SERVER_ERROR,
        termination=Termination.SUBMITTED if turns else Termination.SERVER_ERROR,
        scenario=scenario_of(task),
    )
    usage = Usage(calls=turns, input_tokens=100 * turns, cached_tokens=80 * turns, output_tokens=10, dollars=dollars)
    return RolloutResult(evaluation=evaluation, usage=usage, seconds=1.0)


def measurement(plan: EvaluationPlan, seed: int, chance: float) -> list[RolloutResult]:
    """Every rollout of a plan, some successful, a few lost."""
    random = np.random.default_rng(seed)
    return [
        a_result(task, run, bool(random.random() < chance), int(random.integers(0, 9)))
        for run in range(plan.runs)
        for task in plan.tasks
    ]


def write_evaluation(path: Path, plan: EvaluationPlan, seed: int = 0, chance: float = 0.7) -> Path:
    """A finished evaluation directory."""
    directory = EvaluationDirectory.begin(path, plan)
    for number, name in enumerate(plan.measurements):
        for result in measurement(plan, seed + number, chance):
            directory.add(name, result)
    return path

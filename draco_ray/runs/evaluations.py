"""Evaluations that a training run made of its own policies, read back."""

from __future__ import annotations

from draco_ray.records import EpisodeEnd, Evaluation, Termination
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.recorded import scenario_of


def read_evaluations(run: RunDirectory) -> dict[tuple[int, str], list[Evaluation]]:
    """(training step, split) -> evaluated rollouts; step 0 is the untrained policy."""
    found: dict[tuple[int, str], list[Evaluation]] = {}
    for row in run.table("evaluations").to_pylist():
        evaluation = Evaluation(
            task_id=row["task_id"],
            run=row["run"],
            success=row["success"],
            passed_tests=row["passed_tests"],
            total_tests=row["total_tests"],
            turns=row["turns"],
            ended=EpisodeEnd(row["ended"]),
            difficulty=row["difficulty"],
            failures=tuple(row["failures"] or ()),
            termination=None if row["termination"] is None else Termination(row["termination"]),
            scenario=scenario_of(row),
            reward=row["reward"],
        )
        found.setdefault((row["training_step"], row["split"]), []).append(evaluation)
    return dict(sorted(found.items()))

"""Evaluations that a training run made of its own policies, read back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from draco_ray.records import EpisodeEnd, Evaluation, Termination
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.recorded import scenario_of


def task_goal_completion(evaluations: Iterable[Evaluation]) -> float:
    """TGC: the share of rollouts whose every test passed, in [0, 1]; 0.0 for none.

    With several runs per task this is the mean over runs, p^1.
    """
    outcomes = [evaluation.success for evaluation in evaluations]
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


def scenario_goal_completion(evaluations: Iterable[Evaluation]) -> float:
    """SGC: the share of (scenario, run) pairs whose every task succeeded, in [0, 1]; 0.0 for none.

    A task of no scenario is one of its own.
    """
    scenarios: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for evaluation in evaluations:
        scenarios[evaluation.scenario or evaluation.task_id, evaluation.run].append(evaluation.success)
    return sum(all(outcomes) for outcomes in scenarios.values()) / len(scenarios) if scenarios else 0.0


def missing(evaluations: Sequence[Evaluation], tasks: Iterable[str], runs: int) -> list[tuple[str, int]]:
    """(task, run) pairs that were asked for and have no evaluation; they count as failures wherever rates are shown."""
    seen = {(evaluation.task_id, evaluation.run) for evaluation in evaluations}
    return [(task, run) for task in tasks for run in range(runs) if (task, run) not in seen]


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

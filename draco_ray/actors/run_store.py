"""The Ray shell of `draco_ray.runs.store.RunStore`: resolves references, so that the driver holds no trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from draco_ray.records import Attribution, Criterion, Evaluation, GroupAdvantages, Judged, ScoredCriterion, Trajectory
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.runs.store import RunStore


class RunStoreActor:
    """Writes every part of a step the moment it exists. Its methods are synchronous: Ray then keeps their order."""

    def __init__(self, path: Path) -> None:
        self._store = RunStore(RunDirectory(path))

    def trajectory(self, step: int, trajectory: Trajectory) -> None:
        """Keep a finished rollout."""
        key = f"{trajectory.task_id}-{trajectory.rollout}"
        self._store.write("trajectories", step, key, rows.trajectory_rows(step, trajectory))
        self._store.write("steps", step, key, rows.step_rows(step, trajectory))

    def judged(self, step: int, task_id: str, rollout: int | None, phase: str, judged: Judged[Any]) -> None:
        """Keep the calls of a finished judge phase, and its verdicts or citations."""
        key = f"{task_id}-{phase}" if rollout is None else f"{task_id}-{phase}-{rollout}"
        self._store.write("judge_calls", step, key, rows.call_rows(step, judged.calls))
        value: Sequence[Any] = judged.value or ()
        if value and isinstance(value[0], ScoredCriterion) and rollout is not None:
            self._store.write("verdicts", step, key, rows.verdict_rows(step, task_id, rollout, value))
        if value and isinstance(value[0], Attribution) and rollout is not None:
            self._store.write("citations", step, key, rows.citation_rows(step, task_id, rollout, value))
        if value and isinstance(value[0], Criterion) and phase != "union":
            self._store.write("proposals", step, key, rows.proposal_rows(step, task_id, value))

    def group(
        self,
        step: int,
        task_id: str,
        rubric: Judged[tuple[Criterion, ...]] | None,
        advantages: GroupAdvantages | None,
        step_tokens: dict[int, Sequence[int]] | None,
        state: Row,
    ) -> None:
        """Keep a group's rubric, advantages and final state."""
        if rubric is not None and rubric.value:
            self._store.write("criteria", step, task_id, rows.criterion_rows(step, task_id, rubric.value, advantages))
        if advantages is not None:
            self._store.write(
                "advantages", step, task_id, rows.advantage_rows(step, task_id, advantages, step_tokens or {})
            )
        self._store.write("groups", step, task_id, [{"training_step": step, "task_id": task_id, **state}])

    def spans(self, step: int, key: str, spans: Sequence[Row]) -> None:
        """Keep what ran when."""
        self._store.write("spans", step, key, [{"training_step": step, **span} for span in spans])

    def evaluations(self, step: int, split: str, evaluations: Sequence[Evaluation]) -> None:
        """Keep evaluated rollouts."""
        self._store.write("evaluations", step, split, rows.evaluation_rows(step, split, evaluations))

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Close a step: one file a table, one metrics line."""
        self._store.finish_step(step, metrics)

    def flush(self) -> None:
        """Answers once everything asked for before is on disk."""


def start_run_store(path: Path, run_name: str) -> Any:
    """The one writer of a run; its methods run one at a time, in the order they were called."""
    return ray.remote(RunStoreActor).options(name=f"RunStore@{run_name}", num_cpus=0).remote(path)

"""The Ray actor around `draco_ray.runs.store.RunStore`: it resolves references, so the driver holds no trajectory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from draco_ray.errors import DracoError, StoreError, one_line
from draco_ray.observability.logs import set_private_umask
from draco_ray.placement import driver_node_affinity
from draco_ray.records import (
    Criterion,
    Evaluation,
    GroupAdvantages,
    Judged,
    JudgedRollout,
    ScoredCriterion,
    Task,
    Trajectory,
)
from draco_ray.rollout.finished import summarise
from draco_ray.rollout.worker import Evaluated
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory, as_store_errors
from draco_ray.runs.manifest import Manifest
from draco_ray.runs.rows import Row, read_trajectory, recorded_rollouts
from draco_ray.runs.schema import STEP_TABLES
from draco_ray.runs.store import PaidCalls, RunStore
from draco_ray.summaries import RolloutSummary

GivenP = ParamSpec("GivenP")
ResultT = TypeVar("ResultT")


def _remembered(
    write: Callable[Concatenate[RunStoreActor, GivenP], ResultT],
) -> Callable[Concatenate[RunStoreActor, GivenP], ResultT]:
    """Let later `flush` calls raise an error of this write, too, as `StoreError`: most callers do not await writes."""

    @wraps(write)
    def writes(actor: RunStoreActor, *given: GivenP.args, **named: GivenP.kwargs) -> ResultT:
        path = actor._store.directory.path
        try:
            with as_store_errors(path):
                return write(actor, *given, **named)
        except DracoError as error:
            actor._failure = str(error)
            raise StoreError(actor._failure) from None
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(error)}"
            actor._failure = f"run directory {path}: {write.__name__} cannot be written: {what}"
            raise

    return writes


class RunStoreActor:
    """Writes every part of a step as soon as it exists. Its methods are synchronous, so Ray keeps their order.

    The files of a finished step are merged in a background thread. A kill at any point loses and duplicates nothing;
    the next process merges the remaining files.
    """

    def __init__(self, path: Path, requests_name: str = "", began_ns: int | None = None) -> None:
        """
        Args:
            path: the run directory.
            requests_name: prefix of the numbers of the judge requests that this run has paid for.
            began_ns: when the driver of the run started, Unix nanoseconds, for the manifest; None: no manifest is
                written.
        """
        set_private_umask()
        self._store = RunStore(RunDirectory(path))
        self._manifest = None if began_ns is None else Manifest(self._store.directory, began_ns)
        self._paid = PaidCalls(self._store, requests_name)
        self._failure: str | None = None
        self._gathering = ThreadPoolExecutor(1, thread_name_prefix="gathering")
        self._gathered = self._gathering.submit(self._gather, None)

    @_remembered
    def trajectory(self, step: int, trajectory: Trajectory, *, evaluated: bool = False) -> None:
        """Keep a finished training rollout, or (``evaluated``) a rollout that evaluates the policy of ``step``."""
        kind, key = "evaluation_" if evaluated else "", f"{trajectory.task_id}-{trajectory.rollout}"
        self._store.write(f"{kind}steps", step, key, rows.step_rows(step, trajectory))
        # Write this row last: it marks the rollout as complete.
        self._store.write(f"{kind}trajectories", step, key, rows.trajectory_rows(step, trajectory))

    @_remembered
    def judged(self, step: int, task_id: str, rollout: int | None, phase: str, judged: Judged[Any]) -> None:
        """Keep the calls of a finished judge phase, and its value if there is a table for it."""
        key = f"{task_id}-{phase}" if rollout is None else f"{task_id}-{phase}-{rollout}"
        self._store.write("judge_calls", step, key, self._paid.rows(step, key, judged.calls))
        if judged.value is not None:
            for table, value_rows in rows.judged_rows(phase, step, task_id, rollout, judged.value):
                self._store.write(table, step, key, value_rows)

    @_remembered
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

    @_remembered
    def spans(self, step: int, key: str, spans: Sequence[Row]) -> None:
        """Keep timing spans."""
        self._store.write("spans", step, key, [{"training_step": step, **span} for span in spans])

    @_remembered
    def evaluations(self, step: int, split: str, evaluations: Sequence[Evaluation]) -> None:
        """Keep evaluated rollouts."""
        self._store.write("evaluations", step, split, rows.evaluation_rows(step, split, evaluations))

    @_remembered
    def heldout_calls(self, step: int, key: str, judged: Judged[Any]) -> None:
        """Keep judge calls about a held-out task."""
        self._store.write("heldout_calls", step, key, self._paid.rows(step, key, judged.calls, "heldout_calls"))

    @_remembered
    def heldout(
        self,
        step: int,
        split: str,
        task: Task,
        run: int,
        rubric: Judged[tuple[Criterion, ...]],
        score: Judged[tuple[ScoredCriterion, ...]] | None = None,
        again: Judged[tuple[ScoredCriterion, ...]] | None = None,
    ) -> JudgedRollout:
        """Keep the judge's verdicts on a held-out rollout.

        Args:
            step: training step of the policy.
            split: the split that contains the task.
            task: the task.
            run: index of the rollout of the task.
            rubric: the criteria.
            score: the first scoring; None if the rollout was lost.
            again: the second scoring.
        """
        criteria, error = rubric.value or (), None
        for name, judged in (("score", score), ("again", again)):
            if judged is not None:
                self.heldout_calls(step, f"{task.task_id}-{name}-{run}", judged)
        if score is None:
            error = "the rollout was lost"
        elif not criteria or score.value is None:
            error = rubric.error or score.error or "no criterion"
        found = JudgedRollout(
            task_id=task.task_id,
            run=run,
            scenario=task.scenario,
            verdicts=() if error else _verdicts(score),
            again=() if error else _verdicts(again),
            error=error,
        )
        row = rows.heldout_row(step, split, found, criteria)
        self._store.write("heldout_verdicts", step, f"{split}-{task.task_id}-{run}", [row])
        return found

    @_remembered
    def outcome(self, step: int, rollout: int, evaluated: Evaluated) -> None:
        """Keep the environment's verdict on a training rollout."""
        verdict = evaluated.evaluation
        self._store.write("outcomes", step, f"{verdict.task_id}-{rollout}", rows.outcome_rows(step, rollout, verdict))

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Close a step: write its metrics line, and merge its files into one per table in the background.

        Steps are closed in order.

        Raises:
            StoreError: something could not be written.
        """
        self.metrics(step, metrics)
        self._gathered = self._gathering.submit(self._gather, step)

    def settle(self, step: int | None = None) -> None:
        """Return once the files of every closed step are merged into one per table.

        Args:
            step: also merge the steps up to this closed one; an earlier process may have closed it.

        Raises:
            StoreError: something could not be written.
        """
        if step is not None:
            self._gathered = self._gathering.submit(self._gather, step)
        self._gathered.result()
        self.flush()

    @_remembered
    def _gather(self, last: int | None) -> None:
        """Merge the files of the steps up to ``last``; None: those that an earlier process closed but did not merge.

        Files of evaluations and held-out tasks are not merged: they may be added long after their step.
        """
        store = self._store
        if last is None:
            last = max((line["step"] for line in store.directory.metrics()), default=0) - 1
        for step in store.ungathered(last):
            store.gather(step, STEP_TABLES)
        if self._manifest is not None:
            self._manifest.update(last)

    @_remembered
    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step, before the checkpoint that completes it.

        Raises:
            StoreError: this or an earlier write failed.
        """
        self.flush()
        self._store.write_metrics(step, metrics)

    def recorded(self, step: int, policy_version: int) -> list[tuple[str, int]]:
        """(task id, rollout) of each rollout of the step that an earlier process of this run recorded."""
        return recorded_rollouts(self._store.directory, step, policy_version)

    @_remembered
    def drop_rollouts(self, step: int, but: Sequence[str]) -> None:
        """See `RunStore.drop_rollouts`."""
        self._store.drop_rollouts(step, but)

    @ray.method(num_returns=2)
    def trajectory_again(self, step: int, task_id: str, rollout: int) -> tuple[Trajectory, RolloutSummary]:
        """A recorded rollout, which goes to Ray's object store, and its summary."""
        trajectory = read_trajectory(self._store.directory, step, task_id, rollout)
        return trajectory, summarise(trajectory)

    def flush(self) -> None:
        """Return once all earlier writes are on disk.

        Raises:
            StoreError: something could not be written.
        """
        if self._failure is not None:
            raise StoreError(self._failure)


def _verdicts(judged: Judged[tuple[ScoredCriterion, ...]] | None) -> tuple[int, ...]:
    return () if judged is None else tuple(int(score.verdict) for score in judged.value or ())


def start_run_store(path: Path, run_name: str, requests_name: str = "") -> Any:
    """Start the only writer of a run; its methods run one at a time, in the order of the calls.

    The arguments are those of `RunStoreActor`, and the run's name.

    All of its state is on disk, and repeated writes change nothing, so a restarted process can continue.
    """
    return (
        ray.remote(RunStoreActor)
        .options(
            name=f"RunStore@{run_name}",
            num_cpus=0,
            scheduling_strategy=driver_node_affinity(),
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(path, requests_name, time.time_ns())
    )

"""Evaluated rollouts as logs of Inspect (see `inspect_log`): a log a measurement, an epoch a run, a score ``success``.

The score is 1 or 0, its mean (``accuracy``) the task success of the tables; what the evaluator says, and what the
rollout took, is its metadata. A lost rollout is a sample with an error, and a failure, as it is in the tables. Where
the rollout itself was not kept (of τ-bench, whose own files hold it, and where nothing was played), the sample has no
messages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from draco_ray.lab.analysis.evaluations import evaluation_directories
from draco_ray.lab.evaluation.results import EvaluationDirectory, RolloutResult
from draco_ray.lab.evaluation.trajectories import read_trajectories
from draco_ray.lab.runs.inspect_log import InspectLog, Json, trajectory_sample, write_inspect_logs
from draco_ray.records import Evaluation, Trajectory
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations
from draco_ray.runs.recorded import trajectories_from

SCORER = "success"
TABLES = ("evaluation_trajectories", "evaluation_steps")


def write_logs(path: Path, folder: Path) -> list[Path]:
    """Write the logs of a run and of everything evaluated in it, or of one evaluation directory.

    Raises:
        ConfigError: ``path`` is neither, or ``folder`` cannot be written.
        DamagedRun: one of its files cannot be read.
    """
    if os.path.lexists(path / "evaluation.json"):
        return write_evaluation(EvaluationDirectory.open(path), folder)
    run = RunDirectory.open(path)
    written = [*write_inspect_logs(run, folder), *write_run_evaluations(run, folder)]
    for directory in evaluation_directories(run):
        written += write_evaluation(directory, folder, f"{run.path.name}, ")
    return written


def write_run_evaluations(run: RunDirectory, folder: Path) -> list[Path]:
    """Write what training itself evaluated, a log a step and split.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    written = []
    for (step, split), evaluations in read_evaluations(run).items():
        played = trajectories_from(*(run.table(name, step).to_pylist() for name in TABLES))
        log = _log(
            name=run.path.name,
            part=f"{split}_step{step:06d}",
            title=f"{run.path.name}, {split} {f'after step {step}' if step else 'before training'}",
            model=str(run.setting("model.path")),
            metadata={"training_step": step, "split": split, "setting": run.setting("setting")},
            samples=[(each, None, {}) for each in evaluations],
            played=played,
        )
        written.append(log.write(folder))
    return written


def write_evaluation(directory: EvaluationDirectory, folder: Path, of: str = "") -> list[Path]:
    """Write an evaluation directory, as far as it has been played, a log a measurement.

    Args:
        directory: of `draco evaluate`, `draco eval-set` or `draco tau`.
        folder: of the logs.
        of: what it belongs to, before its name in titles.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    written = []
    plan = directory.plan
    for measurement in plan.measurements:
        results = directory.results(measurement)
        if not results:
            continue
        played = trajectories_from(*(read_trajectories(directory, measurement, name).to_pylist() for name in TABLES))
        log = _log(
            name=directory.path.resolve().name,
            part=measurement,
            title=f"{of}{plan.label}, {plan.benchmark} {plan.split}, {measurement}",
            model=plan.policy,
            metadata={
                "benchmark": plan.benchmark,
                "split": plan.split,
                "measurement": measurement,
                "label": plan.label,
                "generated_world": plan.generated,
                "settings": plan.settings,
            },
            samples=[(each.evaluation, each.error, _took(each)) for each in results],
            played=played,
        )
        written.append(log.write(folder))
    return written


def _log(
    *,
    name: str,
    part: str,
    title: str,
    model: str,
    metadata: Json,
    samples: Sequence[tuple[Evaluation, str | None, Json]],
    played: Mapping[str, Sequence[Trajectory]],
) -> InspectLog:
    known = {(each.task_id, each.rollout): each for of_task in played.values() for each in of_task}
    times = [(each.started_at, each.ended_at) for each in known.values() if each.started_at]
    made = [
        _sample(evaluation, known.get((evaluation.task_id, evaluation.run)), error, took)
        for evaluation, error, took in samples
    ]
    return InspectLog(
        name=name,
        part=part,
        title=title,
        model=model,
        scorer=SCORER,
        metric="accuracy",
        began=min((begin for begin, _ in times), default=0.0),
        ended=max((end for _, end in times), default=0.0),
        metadata=metadata,
        samples=sorted(made, key=lambda sample: (str(sample["id"]), int(sample["epoch"]))),
    )


def _sample(evaluation: Evaluation, played: Trajectory | None, error: str | None, took: Json) -> Json:
    score = {
        "value": float(evaluation.success),
        "explanation": _explained(evaluation),
        "metadata": {
            "passed_tests": evaluation.passed_tests,
            "total_tests": evaluation.total_tests,
            "failures": list(evaluation.failures),
            "turns": evaluation.turns,
            "termination": evaluation.termination and evaluation.termination.value,
            "difficulty": evaluation.difficulty,
            "scenario": evaluation.scenario,
            "reward": evaluation.reward,
            "lost": evaluation.lost,
            **took,
        },
    }
    if played is None:
        sample: Json = {
            "id": evaluation.task_id,
            "epoch": evaluation.run + 1,
            "input": evaluation.task_id,
            "target": "",
            "messages": [],
            "output": {"model": "policy", "choices": [], "completion": ""},
            "scores": {SCORER: score},
            "metadata": {"ended": evaluation.ended.value},
        }
    else:
        sample = trajectory_sample(played, SCORER, score)
    if error or evaluation.lost:
        message = error or "every attempt was lost"
        sample["error"] = {"message": message, "traceback": "", "traceback_ansi": ""}
    return sample


def _explained(evaluation: Evaluation) -> str:
    passed = f"{evaluation.passed_tests} of {evaluation.total_tests} tests pass"
    return "\n".join([passed, *evaluation.failures])


def _took(result: RolloutResult) -> Json:
    return {"usage": asdict(result.usage), "seconds": result.seconds, "attempts": result.attempts}

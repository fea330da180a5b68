"""Evaluated rollouts as logs of Inspect (see `inspect_log`): a log a measurement, an epoch a run, a score ``success``.

The score is 1 or 0, its mean (``accuracy``) the task success of the tables; what the evaluator says, and what the
rollout took, is its metadata. A lost rollout is a sample with an error, and a failure, as it is in the tables. Where
the rollout itself was not kept (of τ-bench, whose own files hold it, and where nothing was played), the sample has no
messages.

Where there is no evaluator the score is ``judged``, the share of the judge's applicable verdicts that pass; a rollout
that has none has no score.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from draco_ray.lab.analysis.evaluations import evaluation_directories, judged_directories
from draco_ray.lab.evaluation.results import EvaluationDirectory, RolloutResult
from draco_ray.lab.runs.inspect_log import InspectLog, Json, trajectory_sample, write_inspect_logs
from draco_ray.records import Evaluation, Trajectory, Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import passed_share, read_evaluations
from draco_ray.runs.rows import Row, trajectories_from

SCORER, JUDGED = "success", "judged"
TABLES = ("evaluation_trajectories", "evaluation_steps")

Played = Mapping[tuple[str, int], Trajectory]
"""(task, run) -> its rollout, where that was kept."""


def write_logs(path: Path, folder: Path) -> list[Path]:
    """Write the logs of a run and of everything evaluated in it, or of one evaluation directory.

    Raises:
        ConfigError: ``path`` is neither, or ``folder`` cannot be written.
        DamagedRun: one of its files cannot be read.
    """
    if os.path.lexists(path / "evaluation.json"):
        return write_evaluation(EvaluationDirectory.open(path), folder)
    run = RunDirectory.open(path)
    written = [*write_inspect_logs(run, folder), *write_run_evaluations(run, folder), *write_judged(run, folder)]
    for directory in evaluation_directories(run):
        written += write_evaluation(directory, folder, f"{run.path.name}, ")
    for judged in judged_directories(run):
        written += write_judged(judged, folder, f"{run.path.name}, ")
    return written


def write_run_evaluations(run: RunDirectory, folder: Path) -> list[Path]:
    """Write what training itself evaluated, a log a step and split.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    written = []
    for (step, split), evaluations in read_evaluations(run).items():
        played = _by_rollout([run.table(name, step).to_pylist() for name in TABLES])
        log = _log(
            name=run.path.name,
            part=f"{split}_step{step:06d}",
            title=f"{run.path.name}, {_moment(step, split)}",
            model=str(run.setting("model.path")),
            scorer=SCORER,
            metadata={"training_step": step, "split": split, "setting": run.setting("setting")},
            samples=[_sample(each, played.get((each.task_id, each.run)), None, {}) for each in evaluations],
            played=played,
        )
        written.append(log.write(folder))
    return written


def write_judged(run: RunDirectory, folder: Path, of: str = "") -> list[Path]:
    """Write the held-out rollouts that the judge scored, a log a step and split.

    Args:
        run: of training, or what `draco evaluate` has left in one.
        folder: of the logs.
        of: what it belongs to, before its name in titles.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    measurements: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in run.table("heldout_verdicts").to_pylist():
        measurements[row["training_step"], row["split"]].append(row)
    written = []
    for (step, split), found in sorted(measurements.items()):
        played = _by_rollout([run.table(name, step).to_pylist() for name in TABLES])
        log = _log(
            name=run.path.name,
            part=f"{split}_step{step:06d}",
            title=f"{of}{run.path.name}, {_moment(step, split)}, judged",
            model=str(run.setting("model.path")),
            scorer=JUDGED,
            metadata={"training_step": step, "split": split, "setting": run.setting("setting")},
            samples=[_judged_sample(row, played.get((row["task_id"], row["run"]))) for row in found],
            played=played,
        )
        written.append(log.write(folder))
    return written


def _judged_sample(row: Row, played: Trajectory | None) -> Json:
    share = passed_share(row["verdicts"] or ())
    # A rollout that was not scored has the criteria all the same.
    said = [
        {"title": title, "verdict": Verdict(verdict).name}
        for title, verdict in zip(row["criteria"] or (), row["verdicts"] or (), strict=False)
    ]
    sample = _unplayed(row["task_id"], row["run"]) if played is None else trajectory_sample(played, JUDGED, None)
    if share is not None:
        sample["scores"] = {
            JUDGED: {
                "value": share,
                "explanation": "\n".join(f"{each['verdict']}: {each['title']}" for each in said),
                "metadata": {"verdicts": said, "again": [Verdict(each).name for each in row["again"] or ()]},
            }
        }
    if row["error"]:
        sample["error"] = _error(row["error"])
    return sample


def _moment(step: int, split: str) -> str:
    return f"{split} {f'after step {step}' if step else 'before training'}"


def _by_rollout(tables: Sequence[list[Row]]) -> Played:
    rollouts = trajectories_from(*tables)
    return {(each.task_id, each.rollout): each for of_task in rollouts.values() for each in of_task}


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
        played = _by_rollout([directory.trajectories(measurement, name).to_pylist() for name in TABLES])
        log = _log(
            name=directory.path.resolve().name,
            part=measurement,
            title=f"{of}{plan.label}, {plan.benchmark} {plan.split}, {measurement}",
            model=plan.policy,
            scorer=SCORER,
            metadata={
                "benchmark": plan.benchmark,
                "split": plan.split,
                "measurement": measurement,
                "label": plan.label,
                "generated_world": plan.generated,
                "settings": plan.settings,
            },
            samples=[
                _sample(
                    each.evaluation,
                    played.get((each.evaluation.task_id, each.evaluation.run)),
                    each.error,
                    _took(each),
                )
                for each in results
            ],
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
    scorer: str,
    metadata: Json,
    samples: Sequence[Json],
    played: Played,
) -> InspectLog:
    times = [(each.started_at, each.ended_at) for each in played.values() if each.started_at]
    return InspectLog(
        name=name,
        part=part,
        title=title,
        model=model,
        scorer=scorer,
        metric="accuracy",
        began=min((begin for begin, _ in times), default=0.0),
        ended=max((end for _, end in times), default=0.0),
        metadata=metadata,
        samples=sorted(samples, key=lambda sample: (str(sample["id"]), int(sample["epoch"]))),
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
        sample = _unplayed(evaluation.task_id, evaluation.run)
        sample |= {"scores": {SCORER: score}, "metadata": {"ended": evaluation.ended.value}}
    else:
        sample = trajectory_sample(played, SCORER, score)
    if error or evaluation.lost:
        sample["error"] = _error(error or "every attempt was lost")
    return sample


def _unplayed(task_id: str, run: int) -> Json:
    return {
        "id": task_id,
        "epoch": run + 1,
        "input": task_id,
        "target": "",
        "messages": [],
        "output": {"model": "policy", "choices": [], "completion": ""},
        "scores": {},
        "metadata": {},
    }


def _error(message: str) -> Json:
    return {"message": message, "traceback": "", "traceback_ansi": ""}


def _explained(evaluation: Evaluation) -> str:
    passed = f"{evaluation.passed_tests} of {evaluation.total_tests} tests pass"
    return "\n".join([passed, *evaluation.failures])


def _took(result: RolloutResult) -> Json:
    return {"usage": asdict(result.usage), "seconds": result.seconds, "attempts": result.attempts}

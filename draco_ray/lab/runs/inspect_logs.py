"""`draco runs inspect`: write a run and its evaluations as Inspect logs, for Inspect's viewer and log readers.

There is one log per training step and one per measurement. A sample is a task, an epoch one of its rollouts. The score
of training (``draco``) is the reward, with verdicts, evidence, cited steps, step qualities and advantages as metadata.
The score of an evaluation (``success``) is 1 or 0; without an evaluator it is ``judged``, the share of the judge's
applicable verdicts that pass. A lost rollout is a sample with an error. Steps are numbered as in the judge's citations:
an action is a message with a tool call ``step``, whose result is the observation; a message has its number as metadata.
A rollout that was not kept has no messages. The JSON format is that of inspect_ai 0.3.285, which need not be installed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draco_ray.config.config_signature import private_opener
from draco_ray.config.file_names import validate_file_name
from draco_ray.lab.analysis.evaluations import evaluation_directories, judged_directories
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.lab.files import atomic_output_file
from draco_ray.lab.rows import finite_or_none, grouped
from draco_ray.records import Evaluation, Trajectory, Turn, Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import passed_share, read_evaluations
from draco_ray.runs.rows import Row, step_trajectories, trajectories_from

TRAINED, EVALUATED, JUDGED = "draco", "success", "judged"
"""Names of the scores."""
TABLES = ("evaluation_trajectories", "evaluation_steps")

Json = dict[str, Any]
Played = Mapping[tuple[str, int], Trajectory]
"""(task, run) -> trajectory, for rollouts whose trajectory was kept."""


def write_logs(path: Path, folder: Path) -> list[Path]:
    """Write the logs of a run and its evaluations, or of one evaluation directory; returns the files.

    Raises:
        ConfigError: ``path`` is neither, or ``folder`` cannot be written.
        DamagedRun: a file of the run or the evaluation cannot be read.
    """
    if os.path.lexists(path / "evaluation.json"):
        logs: list[Iterator[Json]] = [_evaluation_logs(EvaluationDirectory.open(path), "")]
    else:
        run = RunDirectory.open(path)
        logs = [_training_logs(run), _measurement_logs(run), _judged_logs(run, "")]
        logs += [_evaluation_logs(inside, f"{run.path.name}, ") for inside in evaluation_directories(run)]
        logs += [_judged_logs(inside, f"{run.path.name}, ") for inside in judged_directories(run)]
    return [_write(folder, **log) for of_one in logs for log in of_one if log["samples"]]


def _training_logs(run: RunDirectory) -> Iterator[Json]:
    for step in run.steps():
        rollouts = [each for of_task in step_trajectories(run, step).values() for each in of_task]
        scores = {key: {TRAINED: score} for key, score in _rewards(run, step).items()}
        calls = run.table("judge_calls", step, ["started_at"]).column("started_at").to_pylist()
        yield {
            "name": run.path.name,
            "part": f"step{step:06d}",
            "title": f"{run.path.name}, step {step}",
            "model": str(run.setting("model.path")),
            "scorer": TRAINED,
            "metadata": {"training_step": step, "setting": run.setting("setting")},
            "samples": [
                _sample(each.task_id, each.rollout, each, scores.get((each.task_id, each.rollout), {}))
                for each in rollouts
            ],
            # Imported traces have no start time.
            "created": min(calls, default=0.0),
        }


def _measurement_logs(run: RunDirectory) -> Iterator[Json]:
    """Evaluations made during training, one log per step and split."""
    for (step, split), evaluations in read_evaluations(run).items():
        played = _played(run.table(name, step).to_pylist() for name in TABLES)
        samples = [_evaluated_sample(each, played.get((each.task_id, each.run)), None, {}) for each in evaluations]
        yield _of_step(run, step, split, "", EVALUATED, samples)


def _judged_logs(run: RunDirectory, belongs_to: str) -> Iterator[Json]:
    """Held-out rollouts that the judge scored, one log per step and split."""
    measurements = grouped(run.table("heldout_verdicts").to_pylist(), "training_step", "split")
    for (step, split), found in sorted(measurements.items()):
        played = _played(run.table(name, step).to_pylist() for name in TABLES)
        samples = [_judged_sample(row, played.get((row["task_id"], row["run"]))) for row in found]
        yield _of_step(run, step, split, belongs_to, JUDGED, samples)


def _of_step(run: RunDirectory, step: int, split: str, belongs_to: str, scorer: str, samples: Sequence[Json]) -> Json:
    moment = f"{split} {f'after step {step}' if step else 'before training'}"
    return {
        "name": run.path.name,
        "part": f"{split}_step{step:06d}",
        "title": f"{belongs_to}{run.path.name}, {moment}{', judged' * (scorer == JUDGED)}",
        "model": str(run.setting("model.path")),
        "scorer": scorer,
        "metadata": {"training_step": step, "split": split, "setting": run.setting("setting")},
        "samples": samples,
    }


def _evaluation_logs(directory: EvaluationDirectory, belongs_to: str) -> Iterator[Json]:
    """The finished rollouts of an evaluation directory, one log per measurement."""
    plan = directory.plan
    about = {"benchmark": plan.benchmark, "split": plan.split, "label": plan.label, "settings": plan.settings}
    for measurement in plan.measurements:
        played = _played(directory.trajectories(measurement, name).to_pylist() for name in TABLES)
        samples = []
        for result in directory.results(measurement):
            evaluation = result.evaluation
            took = {"usage": asdict(result.usage), "seconds": result.seconds, "attempts": result.attempts}
            rollout = played.get((evaluation.task_id, evaluation.run))
            samples.append(_evaluated_sample(evaluation, rollout, result.error, took))
        yield {
            "name": directory.path.resolve().name,
            "part": measurement,
            "title": f"{belongs_to}{plan.label}, {plan.benchmark} {plan.split}, {measurement}",
            "model": plan.policy,
            "scorer": EVALUATED,
            "metadata": {**about, "measurement": measurement, "generated_world": plan.generated},
            "samples": samples,
        }


def _played(tables: Iterable[list[Row]]) -> Played:
    rollouts = trajectories_from(*tables)
    return {(each.task_id, each.rollout): each for of_task in rollouts.values() for each in of_task}


def _write(
    folder: Path,
    *,
    name: str,
    part: str,
    title: str,
    model: str,
    scorer: str,
    metadata: Json,
    samples: Sequence[Json],
    created: float = 0.0,
) -> Path:
    """Write a log that only its owner can read; replaces an existing log of the same part.

    Args:
        name: name of the run or the evaluation.
        part: name of the log within it, for the file name.
        title: title in the viewer's list.
        scorer: name of the score.
        samples: at least one.
        created: start of the log if no sample has a start, Unix seconds.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    samples = sorted(samples, key=lambda sample: (str(sample["id"]), int(sample["epoch"])))
    tasks = sorted({sample["id"] for sample in samples})
    timed = [sample for sample in samples if "started_at" in sample]
    began = min((sample["started_at"] for sample in timed), default=_time(created))
    ended = max((sample["completed_at"] for sample in timed), default=began)
    log = {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": _digest("eval", f"{name}/{part}"),
            "run_id": _digest("run", name),
            "created": began,
            "task": title,
            "task_id": _digest("task", f"{name}/{part}"),
            "dataset": {"name": name, "samples": len(tasks), "sample_ids": tasks},
            "model": model,
            "config": {"epochs": max(sample["epoch"] for sample in samples)},
            "metadata": metadata,
        },
        "results": _results(scorer, samples),
        "stats": {"started_at": began, "completed_at": ended},
        "samples": samples,
    }
    path = folder / f"{began[:19].replace(':', '-')}_{validate_file_name(name)}_{validate_file_name(part)}.json"
    with atomic_output_file(path) as temporary, open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
        json.dump(log, file, ensure_ascii=False)
    return path


def _results(scorer: str, samples: Sequence[Json]) -> Json:
    found = [sample["scores"][scorer]["value"] for sample in samples if sample["scores"]]
    metric = "mean" if scorer == TRAINED else "accuracy"
    metrics = {metric: {"name": metric, "value": math.fsum(found) / len(found)}} if found else {}
    scored = {"scored_samples": len(found), "unscored_samples": len(samples) - len(found)}
    return {
        "total_samples": len(samples),
        "completed_samples": sum("error" not in sample for sample in samples),
        "scores": [{"name": scorer, "scorer": scorer, **scored, "metrics": metrics}],
    }


def _evaluated_sample(evaluation: Evaluation, played: Trajectory | None, error: str | None, took: Json) -> Json:
    passed = f"{evaluation.passed_tests} of {evaluation.total_tests} tests pass"
    score = {
        "value": float(evaluation.success),
        "explanation": "\n".join([passed, *evaluation.failures]),
        "metadata": {**asdict(evaluation), "lost": evaluation.lost, **took},
    }
    if evaluation.lost:
        error = error or "every attempt was lost"
    return _sample(evaluation.task_id, evaluation.run, played, {EVALUATED: score}, error)


def _judged_sample(row: Row, played: Trajectory | None) -> Json:
    share = passed_share(row["verdicts"] or ())
    # List the criteria even if the rollout has no score.
    verdicts = [
        {"title": title, "verdict": Verdict(verdict).name}
        for title, verdict in zip(row["criteria"] or (), row["verdicts"] or (), strict=False)
    ]
    scores: Json = {}
    if share is not None:
        explanation = "\n".join(f"{each['verdict']}: {each['title']}" for each in verdicts)
        about = {"verdicts": verdicts, "again": [Verdict(each).name for each in row["again"] or ()]}
        scores[JUDGED] = {"value": share, "explanation": explanation, "metadata": about}
    return _sample(row["task_id"], row["run"], played, scores, row["error"])


def _sample(task: str, rollout: int, played: Trajectory | None, scores: Json, error: str | None = None) -> Json:
    """A rollout as a sample, whose steps are numbered as in the judge's citations.

    Args:
        played: None if the rollout's trajectory was not kept.
        scores: name -> score.
        error: why the rollout was lost or has no score; None: the rollout's own error, if any.
    """
    sample: Json = {"id": task, "epoch": rollout + 1, "input": task, "target": "", "messages": [], "metadata": {}}
    output: Json = {"model": "policy", "choices": [], "completion": ""}
    if played is not None:
        messages = [*_prompt(played), *_turns(played)]
        said = next((each["content"] for each in reversed(messages) if each["role"] == "assistant"), "")
        output["choices"] = [{"message": {"role": "assistant", "content": said}, "stop_reason": "stop"}]
        output["completion"] = said
        sample["input"] = next((each.content for each in reversed(played.prompt) if each.role == "user"), task)
        sample["messages"] = [{"id": f"m{number}"} | each for number, each in enumerate(messages)]
        sample["metadata"] = {"ended": played.ended.value, "policy_version": played.policy_version}
        error = error or played.error
        if played.started_at:
            sample |= {"started_at": _time(played.started_at), "completed_at": _time(played.ended_at)}
            sample["total_time"] = max(played.ended_at - played.started_at, 0.0)
    if error:
        sample["error"] = {"message": error, "traceback": "", "traceback_ansi": ""}
    return sample | {"output": output, "scores": scores}


def _prompt(trajectory: Trajectory) -> Iterator[Json]:
    for message in trajectory.prompt:
        known = message.role in ("system", "user", "assistant")
        content = message.content if known else f"[{message.role}]\n{message.content}"
        yield {"role": message.role if known else "system", "content": content}


def _turns(trajectory: Trajectory) -> Iterator[Json]:
    number = 0
    for turn in trajectory.turns:
        if turn.role != "assistant":
            yield {"role": "user", "content": turn.text if turn.role == "user" else f"[{turn.role}]\n{turn.text}"}
            continue
        number += turn.is_step
        if turn.action is None:
            yield {"role": "assistant", "content": turn.text, "metadata": {"step": number if turn.message else None}}
        else:
            yield from _step(turn, number)


def _step(turn: Turn, number: int) -> Iterator[Json]:
    call = {"id": f"step-{number}", "function": "step", "arguments": {"number": number, "action": turn.action}}
    yield {"role": "assistant", "content": turn.text, "tool_calls": [call | {"type": "function"}]}
    if turn.observation is not None:
        yield {"role": "tool", "content": turn.observation, "tool_call_id": f"step-{number}", "function": "step"}


def _rewards(run: RunDirectory, step: int) -> dict[tuple[str, int], Json]:
    """The score of each rollout that has a reward."""
    titles = {(row["task_id"], row["criterion"]): row["title"] for row in run.table("criteria", step).to_pylist()}
    verdicts = grouped(run.table("verdicts", step).to_pylist(), "task_id", "rollout")
    citations = grouped(run.table("citations", step).to_pylist(), "task_id", "rollout", "criterion")
    found = {}
    for row in run.table("advantages", step).to_pylist():
        key = (row["task_id"], row["rollout"])
        mine = [
            {
                "title": titles.get((row["task_id"], verdict["criterion"]), ""),
                "verdict": Verdict(verdict["verdict"]).name,
                "evidence": verdict["evidence"],
                "justification": verdict["justification"],
                "steps": sorted({each["step"] for each in citations[(*key, verdict["criterion"])]} - {None}),
            }
            for verdict in sorted(verdicts[key], key=lambda verdict: int(verdict["criterion"]))
        ]
        found[key] = {
            "value": row["reward"],
            "explanation": "\n".join(f"{v['verdict']}: {v['title']}: {v['justification']}" for v in mine),
            "metadata": {
                "verdicts": mine,
                "advantage": row["advantage"],
                "step_quality": [finite_or_none(value) for value in row["quality"] or ()],
                "step_advantage": [finite_or_none(value) for value in row["step_advantage"] or ()],
            },
        }
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"{kind} {text}".encode()).hexdigest()[:22]

"""A run as logs of Inspect, which its viewer (`inspect view`) and its readers open; see also `inspect_evaluations`.

One log a training step: a sample is a task, an epoch one of its rollouts. The score ``draco`` is the reward; verdicts
with evidence and cited steps, step qualities and advantages are its metadata. Each step of the agent is a message with
the call ``step``, whose number is the one that the judge cites, and what came back is that call's result. The logs are
JSON after inspect_ai 0.3.285, which need not be installed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draco_ray.config.file_names import file_name
from draco_ray.config.origin import private
from draco_ray.errors import ConfigError
from draco_ray.records import Trajectory, Turn, Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import step_trajectories

SCORER = "draco"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectLog:
    """One log: what is in its head, and its samples."""

    name: str
    """Of the run or the evaluation."""
    part: str
    """Of the run or the evaluation, for the file's name."""
    title: str
    """What the viewer lists it as."""
    model: str
    scorer: str
    metric: str
    """What the mean of the scores is called."""
    began: float
    """Seconds since the epoch; so is ``ended``."""
    ended: float
    metadata: Json
    samples: Sequence[Json]

    def write(self, folder: Path) -> Path:
        """Write it for its owner's eyes; a log of the same part is replaced.

        Raises:
            ConfigError: ``folder`` cannot be written.
        """
        time = _time(self.began)[:19].replace(":", "-")
        path = folder / f"{time}_{file_name(self.name)}_{file_name(self.part)}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8", opener=private) as file:
                json.dump(self.as_json(), file, ensure_ascii=False)
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be written: {error.strerror or error}") from None
        return path

    def as_json(self) -> Json:
        """What Inspect reads."""
        named = f"{self.name}/{self.part}"
        tasks = sorted({sample["id"] for sample in self.samples})
        return {
            "version": 2,
            "status": "success",
            "eval": {
                "eval_id": _digest("eval", named),
                "run_id": _digest("run", self.name),
                "created": _time(self.began),
                "task": self.title,
                "task_id": _digest("task", named),
                "dataset": {"name": self.name, "samples": len(tasks), "sample_ids": tasks},
                "model": self.model,
                "config": {"epochs": max(sample["epoch"] for sample in self.samples)},
                "metadata": self.metadata,
            },
            "results": self._results(),
            "stats": {"started_at": _time(self.began), "completed_at": _time(self.ended)},
            "samples": list(self.samples),
        }

    def _results(self) -> Json:
        found = [sample["scores"][self.scorer]["value"] for sample in self.samples if sample["scores"]]
        mean = {"name": self.metric, "value": math.fsum(found) / len(found)} if found else None
        return {
            "total_samples": len(self.samples),
            "completed_samples": sum("error" not in sample for sample in self.samples),
            "scores": [
                {
                    "name": self.scorer,
                    "scorer": self.scorer,
                    "scored_samples": len(found),
                    "unscored_samples": len(self.samples) - len(found),
                    "metrics": {} if mean is None else {self.metric: mean},
                }
            ],
        }


def write_inspect_logs(run: RunDirectory, folder: Path) -> list[Path]:
    """Write a log for each training step that has rollouts; logs of the same steps are replaced.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """
    logs = (inspect_log(run, step) for step in run.steps())
    return [log.write(folder) for log in logs if log is not None]


def inspect_log(run: RunDirectory, step: int) -> InspectLog | None:
    """A step as a log; None where it has no rollouts."""
    played = [each for rollouts in step_trajectories(run, step).values() for each in rollouts]
    if not played:
        return None
    scores = _scores(run, step)
    # Traces of others do not say when they were played; then when they were judged counts.
    calls = run.table("judge_calls", step, ["started_at", "seconds"]).to_pylist()
    times = [(each.started_at, each.ended_at) for each in played if each.started_at] or [
        (call["started_at"], call["started_at"] + call["seconds"]) for call in calls
    ]
    return InspectLog(
        name=run.path.name,
        part=f"step{step:06d}",
        title=f"{run.path.name}, step {step}",
        model=str(run.setting("model.path")),
        scorer=SCORER,
        metric="mean",
        began=min((begin for begin, _ in times), default=0.0),
        ended=max((end for _, end in times), default=0.0),
        metadata={"training_step": step, "setting": run.setting("setting")},
        samples=[trajectory_sample(each, SCORER, scores.get((each.task_id, each.rollout))) for each in played],
    )


def trajectory_sample(trajectory: Trajectory, scorer: str, score: Json | None) -> Json:
    """A rollout as a sample: its steps are calls, whose numbers are those that verdicts cite."""
    asked = next((each.content for each in reversed(trajectory.prompt) if each.role == "user"), trajectory.task_id)
    messages = [*_prompt(trajectory), *_turns(trajectory)]
    said = next((each["content"] for each in reversed(messages) if each["role"] == "assistant"), "")
    choice = {"message": {"role": "assistant", "content": said}, "stop_reason": "stop"}
    sample = {
        "id": trajectory.task_id,
        "epoch": trajectory.rollout + 1,
        "input": asked,
        "target": "",
        "messages": [{"id": f"m{number}"} | each for number, each in enumerate(messages)],
        "output": {"model": "policy", "choices": [choice], "completion": said},
        "scores": {} if score is None else {scorer: score},
        "metadata": {"ended": trajectory.ended.value, "policy_version": trajectory.policy_version},
    }
    if trajectory.started_at:
        sample |= {"started_at": _time(trajectory.started_at), "completed_at": _time(trajectory.ended_at)}
        sample["total_time"] = max(trajectory.ended_at - trajectory.started_at, 0.0)
    if trajectory.error:
        sample["error"] = {"message": trajectory.error, "traceback": "", "traceback_ansi": ""}
    return sample


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
            yield {"role": "assistant", "content": turn.text}
        else:
            yield from _step(turn, number)


def _step(turn: Turn, number: int) -> Iterator[Json]:
    call = {"id": f"step-{number}", "function": "step", "arguments": {"number": number, "action": turn.action}}
    yield {"role": "assistant", "content": turn.text, "tool_calls": [call | {"type": "function"}]}
    if turn.observation is not None:
        yield {"role": "tool", "content": turn.observation, "tool_call_id": f"step-{number}", "function": "step"}


def _scores(run: RunDirectory, step: int) -> dict[tuple[str, int], Json]:
    """The score of each rollout that has a reward, and everything about it."""
    titles = {(row["task_id"], row["criterion"]): row["title"] for row in run.table("criteria", step).to_pylist()}
    cited: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for row in run.table("citations", step).to_pylist():
        if row["step"] is not None:
            cited[row["task_id"], row["rollout"], row["criterion"]].add(row["step"])
    verdicts: dict[tuple[str, int], list[Json]] = defaultdict(list)
    for row in sorted(run.table("verdicts", step).to_pylist(), key=lambda row: int(row["criterion"])):
        key = (row["task_id"], row["rollout"])
        verdicts[key].append(
            {
                "title": titles.get((row["task_id"], row["criterion"]), ""),
                "verdict": Verdict(row["verdict"]).name,
                "evidence": row["evidence"],
                "justification": row["justification"],
                "steps": sorted(cited[(*key, row["criterion"])]),
            }
        )
    found = {}
    for row in run.table("advantages", step).to_pylist():
        key = (row["task_id"], row["rollout"])
        found[key] = {
            "value": row["reward"],
            "explanation": "\n".join(f"{v['verdict']}: {v['title']}: {v['justification']}" for v in verdicts[key]),
            "metadata": {
                "verdicts": verdicts[key],
                "advantage": row["advantage"],
                "step_quality": [_finite(value) for value in row["quality"] or ()],
                "step_advantage": [_finite(value) for value in row["step_advantage"] or ()],
            },
        }
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"{kind} {text}".encode()).hexdigest()[:22]

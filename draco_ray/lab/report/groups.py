"""Data of the page's groups, packed so that a page with thousands of groups opens at once.

A group is one compressed string, which the browser unpacks when the group is opened. Judge prompts repeat the
trajectory, so a group stores every line of text once, and a text is a list of line numbers.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from draco_ray.lab.analysis.credit import push_shares
from draco_ray.lab.analysis.pass_share import read_run_jsonl
from draco_ray.lab.rows import grouped
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.traces.files import TRACES_FILE

_TRAJECTORY = [
    *("task_id", "rollout", "attempt", "policy_version", "prompt", "prompt_length", "ended", "error", "engine"),
    *("started_at", "ended_at"),
]
_TOKENS = ("token_ids", "sampled", "logprob")
_NUMBERS = [
    *("model", "finish_reason", "input_tokens", "cached_tokens", "output_tokens", "dollars", "seconds", "requests"),
    "error",
]

_SHARE = ("reward", "advantage", "inert", "fallback")
_KEPT = ("steps", "criteria", "proposals", "verdicts", "citations", "advantages", "judge_calls", "groups")
GROUP_TABLES = ("trajectories", *_KEPT)
"""Tables from which a group's data is built."""


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group in the page."""

    summary: Row
    """Values for the columns and filters of the list of groups."""
    data: str
    """Everything that the page shows when the group is opened, compressed by `pack`."""


def packed_groups(run: RunDirectory, *, tokens: bool = False) -> Iterator[PackedGroup]:
    """The groups of a run, by training step and task; one step's rows are in memory at a time.

    Args:
        run: the run to read.
        tokens: whether to include each turn's sampled tokens with their log-probabilities.
    """
    columns = [*_TRAJECTORY, *(_TOKENS if tokens else ())]
    text_of = _token_texts(run) if tokens else str
    traces = {
        (line["task_id"], line["rollout"]): _picked(line, "trace_id", "source")
        for line in read_run_jsonl(run, TRACES_FILE)
    }
    for step in run.steps():
        rows = {
            "trajectories": grouped(run.table("trajectories", step, columns).to_pylist(), "task_id"),
            **{name: grouped(run.table(name, step).to_pylist(), "task_id") for name in _KEPT},
        }
        for row in itertools.chain.from_iterable(rows["trajectories"].values() if traces else ()):
            row["trace"] = traces.get((row["task_id"], row["rollout"]))
        for turn in itertools.chain.from_iterable(rows["steps"].values() if tokens else ()):
            (whole,) = (each for each in rows["trajectories"][turn["task_id"]] if each["rollout"] == turn["rollout"])
            turn["sampled"] = [
                [text_of(whole["token_ids"][at]), _short(whole["logprob"][at])]
                for at in range(turn["first_token"], turn["last_token"])
                if whole["sampled"][at]
            ]
        tasks = sorted({task for table in rows.values() for task in table})
        for task in tasks:
            data, summary = group_content(step, task, {name: table.get(task, []) for name, table in rows.items()})
            yield PackedGroup(summary, pack(data))


def _token_texts(run: RunDirectory) -> Callable[[int], str]:
    """Function from token id to text, or to ``#<id>`` if the model's tokenizer is not on this machine."""
    file = Path(str(run.setting("model.path"))) / "tokenizer.json"
    if not file.is_file():
        return lambda token: f"#{token} "
    tokenizer = Tokenizer.from_file(str(file))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))


def pack(value: object) -> str:
    """Compressed JSON as base64, which has no special characters of HTML."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")


def unpack(text: str) -> Any:
    """What `pack` packed.

    >>> unpack(pack({"a": [1, None]}))
    {'a': [1, None]}
    """
    return json.loads(zlib.decompress(base64.b64decode(text)))


class _Lines:
    """Lines of text, each stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, text: str | None) -> list[int] | None:
        if text is None:
            return None
        return [self._numbers.setdefault(line, len(self._numbers)) for line in text.split("\n")]

    def all(self) -> list[str]:
        return list(self._numbers)


def group_content(step: int | None, task: str, rows: dict[str, list[Row]]) -> tuple[Row, Row]:
    """Collect what the page shows of a group.

    Args:
        step: training step of the policy; None if it is not a checkpoint of the run.
        task: the group's task id.
        rows: table (`GROUP_TABLES`) -> the group's rows.
    Returns: the group's data, which `pack` compresses, and its summary for the list of groups.
    """
    lines = _Lines()
    shares = {row["rollout"]: row for row in rows["advantages"]}
    trajectories = sorted(rows["trajectories"], key=lambda row: row["rollout"])
    turns, verdicts, citations, calls = (
        grouped(rows[name], "rollout") for name in ("steps", "verdicts", "citations", "judge_calls")
    )
    criteria = sorted(rows["criteria"], key=lambda row: row["criterion"])
    state = rows["groups"][0] if rows["groups"] else {}
    prompt = trajectories[0]["prompt"] if trajectories else []
    data = {
        "prompt": [{"role": message["role"], "text": lines.add(message["content"])} for message in prompt],
        "state": state,
        "criteria": [
            _picked(row, "title", "description", "evaluator_instruction", "source", "survived") for row in criteria
        ],
        "proposals": [_picked(row, "title", "description", "source") for row in rows["proposals"]],
        "calls": [_call(row, lines) for row in _ordered(calls[None])],
        "rollouts": [
            {
                **_picked(row, "rollout", "attempt", "policy_version", "prompt_length", "ended", "error", "engine"),
                "seconds": _short(row["ended_at"] - row["started_at"]),
                "trace": row.get("trace"),
                "share": _share(shares.get(row["rollout"])),
                "turns": _turns(turns[row["rollout"]], shares.get(row["rollout"]), lines),
                "verdicts": {
                    verdict["criterion"]: [verdict["verdict"], verdict["evidence"], verdict["justification"]]
                    for verdict in verdicts[row["rollout"]]
                },
                "credit": _credit(citations[row["rollout"]]),
                "calls": [_call(call, lines) for call in _ordered(calls[row["rollout"]])],
            }
            for row in trajectories
        ],
    }
    data["lines"] = lines.all()
    return data, _summary(step, task, rows, data)


def _summary(step: int | None, task: str, rows: dict[str, list[Row]], data: Row) -> Row:
    messages = rows["trajectories"][0]["prompt"] if rows["trajectories"] else []
    rewards = {rollout["share"]["reward"] for rollout in data["rollouts"] if rollout["share"]}
    return {
        "step": step,
        "task": task,
        "asked": next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")[-400:],
        "state": data["state"].get("state", "in progress"),
        "titles": [criterion["title"] for criterion in data["criteria"]],
        "dropped": [index for index, criterion in enumerate(data["criteria"]) if criterion["survived"] is False],
        "signal": len(rewards) > 1,
        "lost": data["state"].get("lost") or 0,
        "failed_calls": sum(call["error"] is not None for call in rows["judge_calls"]),
        "dollars": _short(sum(call["dollars"] for call in rows["judge_calls"])),
        "rollouts": [
            [each["rollout"], each["ended"], *(each["share"] and each["share"][name] for name in _SHARE)]
            for each in data["rollouts"]
        ],
    }


def _turns(rows: list[Row], share: Row | None, lines: _Lines) -> list[Row]:
    pushes = push_shares(share["step_advantage"], share["step_tokens"]).tolist() if share else []
    found = []
    for row in sorted(rows, key=lambda row: row["turn"]):
        before, after = _around(row["text"], row["action"])
        turn: Row = {
            "step": row["step"],
            "role": row["role"] or "assistant",
            "before": lines.add(before),
            "action": lines.add(row["action"]),
            "after": lines.add(after),
            "observation": lines.add(row["observation"]),
            "tokens": row["last_token"] - row["first_token"],
            "generating": _short(row["seconds_generating"]),
            "executing": _short(row["seconds_executing"]),
        }
        if row.get("sampled"):
            turn["sampled"] = row["sampled"]
        if share and row["step"] is not None and row["step"] <= len(pushes):
            index = row["step"] - 1
            turn |= {
                "push": _short(pushes[index]),
                "quality": _short(share["quality"][index]),
                "advantage": _short(share["step_advantage"][index]),
                "cited": share["cited"][index],
            }
        found.append(turn)
    return found


def _around(text: str, code: str | None) -> tuple[str, str]:
    """The text of a turn before and after the executed code block."""
    place = text.find(code) if code else -1
    if code is None or place < 0:
        return text.strip(), ""
    before, after = text[:place], text[place + len(code) :]
    return before.rstrip().removesuffix("<code>").strip(), after.lstrip().removeprefix("</code>").strip()


def _share(row: Row | None) -> Row | None:
    if row is None:
        return None
    numbers = {"reward": _short(row["reward"]), "advantage": _short(row["advantage"])}
    return numbers | _picked(row, "fallback", "inert")


def _credit(rows: list[Row]) -> dict[int, Row]:
    """Criterion -> verdict, cited steps and explanation of the credit call."""
    found: dict[int, Row] = {}
    for row in rows:
        entry = found.setdefault(
            row["criterion"], {"verdict": row["verdict"], "steps": [], "explanation": row["explanation"]}
        )
        if row["step"] is not None:
            entry["steps"].append(row["step"])
    return found


def _call(row: Row, lines: _Lines) -> Row:
    about = {"id": row["call_id"], "phase": row["phase"], **_picked(row, *_NUMBERS)}
    about |= {"dollars": _short(row["dollars"]), "seconds": _short(row["seconds"])}
    return about | {"prompt": lines.add(row["prompt"]), "reply": lines.add(row["reply"])}


def _ordered(calls: list[Row]) -> list[Row]:
    return sorted(calls, key=lambda row: row["started_at"])


def _picked(row: Row, *names: str) -> Row:
    return {name: row[name] for name in names}


def _short(value: float | None) -> float | None:
    """The value rounded to five digits; NaN, which JSON does not have, becomes None."""
    return None if value is None or value != value else float(f"{value:.5g}")

"""tau2's result files as episodes, over everything that was planned: what is not there failed.

tau2 leaves episodes that ended in an infrastructure error out of its averages; the paper counts unsolved tasks over the
full split, so the denominator here is tasks times trials.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draco_ray.errors import TauBenchError

INFRASTRUCTURE = "infrastructure_error"
MISSING = "missing"
ENDED_WELL = ("user_stop", "agent_stop")
"""Only these are graded; any other ending is a failure by itself."""
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one role's calls."""

    input: int = 0
    output: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.input + other.input, self.output + other.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One task, tried once."""

    task_id: str
    trial: int
    success: bool
    ended: str
    """tau2's termination reason, or ``missing``."""
    failure: str | None
    """Kind: the failed parts of the reward (``DB``, ``ACTION``, ``NL_ASSERTION``), or how it ended. None: success."""
    turns: int = 0
    """Agent calls; 0 where no messages were kept."""
    agent: Tokens = Tokens()
    user: Tokens = Tokens()
    seconds: float = 0.0


class _Lenient(BaseModel):
    """What we read of tau2's records; they hold much more."""

    model_config = ConfigDict(extra="ignore")


class _Usage(_Lenient):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(_Lenient):
    role: str
    usage: _Usage | None = None


class _Reward(_Lenient):
    reward: float
    reward_breakdown: dict[str, float] | None = None


class _Simulation(_Lenient):
    id: str
    task_id: str
    trial: int
    timestamp: str
    duration: float = 0.0
    termination_reason: str
    reward_info: _Reward | None = None
    messages: list[_Message] | None = None
    info: dict[str, Any] | None = None


def read_episodes(folder: Path, tasks: Sequence[str], trials: int) -> list[Episode]:
    """Every planned episode, task by task; one that tau2 has no record of is a failure of the kind ``missing``.

    Args:
        folder: holds ``results.json``, and ``simulations/`` in tau2's directory format.

    Raises:
        TauBenchError: a file cannot be read, or holds episodes that were not planned.
    """
    found: dict[tuple[str, int], _Simulation] = {}
    for simulation in _simulations(folder):
        place = simulation.task_id, simulation.trial
        if simulation.task_id not in tasks or not 0 <= simulation.trial < trials:
            raise TauBenchError(
                f"{folder}: holds {simulation.task_id}, trial {simulation.trial}, which was not asked for; expected "
                f"{len(tasks)} tasks with {trials} trials; give other runs a folder of their own"
            )
        other = found.get(place)
        # Run again after an infrastructure error, or twice by a process that was killed: the first that ran counts.
        if other is None or _precedence(simulation) < _precedence(other):
            found[place] = simulation
    return [
        _episode(found[task, trial]) if (task, trial) in found else _missing(task, trial)
        for task in tasks
        for trial in range(trials)
    ]


def count_episodes(folder: Path) -> int:
    """Episodes that tau2 has written so far."""
    return len(_simulation_files(folder))


def read_judge_tokens(folder: Path) -> Tokens:
    """Tokens of all judge calls, those of episodes that were run again included."""
    file = folder / "judge_calls.jsonl"
    if not file.is_file():
        return Tokens()
    # What follows the last line break was being written when its process was killed.
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    usages = [_Usage.model_validate(json.loads(line)["usage"] or {}) for line in lines]
    return _sum(Tokens(usage.prompt_tokens, usage.completion_tokens) for usage in usages)


def _simulation_files(folder: Path) -> list[Path]:
    # tau2 writes to a hidden file first.
    return sorted(path for path in (folder / "simulations").glob("*.json") if not path.name.startswith("."))


def _simulations(folder: Path) -> list[_Simulation]:
    files = _simulation_files(folder)
    single = folder / "results.json"
    try:
        if files or not single.is_file():
            return [_Simulation.model_validate_json(path.read_bytes()) for path in files]
        content = json.loads(single.read_text(encoding="utf-8"))
        return [_Simulation.model_validate(each) for each in content.get("simulations") or []]
    except (OSError, ValueError, AttributeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise TauBenchError(
            f"{folder}: not result files of tau2-bench 1.0.1 ({' '.join(reason.split())}); expected results.json, and "
            "simulations/<id>.json in directory format"
        ) from None


def _precedence(simulation: _Simulation) -> tuple[bool, str]:
    return simulation.termination_reason == INFRASTRUCTURE, simulation.timestamp


def _episode(simulation: _Simulation) -> Episode:
    messages = simulation.messages or []
    reward = simulation.reward_info
    success = reward is not None and abs(reward.reward - 1.0) <= TOLERANCE
    return Episode(
        task_id=simulation.task_id,
        trial=simulation.trial,
        success=success,
        ended=simulation.termination_reason,
        failure=None if success else _failure(simulation),
        # The greeting that tau2 opens with is no call: it has no usage.
        turns=sum(message.role == "assistant" and message.usage is not None for message in messages),
        agent=_tokens(messages, "assistant"),
        user=_tokens(messages, "user"),
        seconds=simulation.duration,
    )


def _failure(simulation: _Simulation) -> str:
    if simulation.termination_reason == INFRASTRUCTURE:
        kind = (simulation.info or {}).get("error_type")
        return f"{INFRASTRUCTURE} ({kind})" if kind else INFRASTRUCTURE
    if simulation.termination_reason not in ENDED_WELL:
        return simulation.termination_reason
    parts = (simulation.reward_info.reward_breakdown or {}) if simulation.reward_info else {}
    return "+".join(sorted(part for part, value in parts.items() if value < 1 - TOLERANCE)) or "ungraded"


def _missing(task: str, trial: int) -> Episode:
    return Episode(task_id=task, trial=trial, success=False, ended=MISSING, failure=MISSING)


def _tokens(messages: Iterable[_Message], role: str) -> Tokens:
    return _sum(
        Tokens(message.usage.prompt_tokens, message.usage.completion_tokens)
        for message in messages
        if message.role == role and message.usage is not None
    )


def _sum(parts: Iterable[Tokens]) -> Tokens:
    return sum(parts, start=Tokens())

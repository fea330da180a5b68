"""A domain of tau2-bench as a training ground: its tasks and splits, read from the checkout's own files."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.errors import ConfigError

FILES = {
    "retail": ("db.json", "policy.md", "tasks.json", "split_tasks.json"),
    "airline": ("db.json", "policy.md", "tasks.json", "split_tasks.json"),
    "telecom": (
        "db.toml",
        "user_db.toml",
        "main_policy.md",
        "tech_support_manual.md",
        "tasks.json",
        "split_tasks.json",
    ),
}
"""What tau2 reads of each domain."""
_LONGEST_ID = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainTask:
    """One task as far as its customer and its agent know it: what it is evaluated by is left out."""

    task_id: str
    """A name that files can have."""
    tau2_id: str
    scenario: str
    """What the customer is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Tasks by id, and the ids of each split, in tau2's order."""

    tasks: Mapping[str, DomainTask]
    splits: Mapping[str, tuple[str, ...]]


def domain_folder(domain: str) -> Path:
    """Where a checkout has a domain."""
    return Path("data/tau2/domains") / domain


@functools.cache
def read_domain(home: Path, domain: str) -> Domain:
    """The domain as the checkout at ``home`` has it. Raises: ConfigError, one line: a file is missing, or no such."""
    folder = home / domain_folder(domain)
    if missing := [name for name in FILES[domain] if not (folder / name).is_file()]:
        raise ConfigError(
            f"tau2_home {home}: {domain_folder(domain)} has no {', '.join(missing)}: {domain} cannot be played; "
            "expected a whole checkout of tau2-bench"
        )
    found: dict[str, DomainTask] = {}
    try:
        for row in json.loads((folder / "tasks.json").read_text(encoding="utf-8")):
            task = DomainTask(task_id=short_id(row["id"]), tau2_id=row["id"], scenario=_scenario(row["user_scenario"]))
            found[task.task_id] = task
        listed = json.loads((folder / "split_tasks.json").read_text(encoding="utf-8"))
        splits = {name: tuple(map(short_id, ids)) for name, ids in listed.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: not the task files of tau2-bench 1.0.1 ({type(error).__name__}: {error})"
        ) from None
    for name, ids in splits.items():
        if absent := [task_id for task_id in ids if task_id not in found]:
            raise ConfigError(
                f"{folder}: split {name!r} lists {len(absent)} tasks that tasks.json has not: {absent[0]}"
            )
    return Domain(tasks=found, splits=splits)


def short_id(tau2_id: str) -> str:
    """A task's id where it can be a file's name, else one that is made of it: telecom's are long, and say much.

    >>> short_id("17")
    '17'
    >>> short_id("[mms_issue]bad_wifi_calling|data_mode_off[PERSONA:Hard]")
    'mms_issue_bad_wifi_calling_data_mode_off_PERSONA_Hard-6c9dbe7d'
    """
    if re.fullmatch(r"\w[\w.-]*", tau2_id, re.ASCII) and len(tau2_id) <= _LONGEST_ID:
        return tau2_id
    words = re.sub(r"\W+", "_", tau2_id, flags=re.ASCII).strip("_")
    return f"{words[:_LONGEST_ID]}-{hashlib.sha256(tau2_id.encode()).hexdigest()[:8]}"


def _scenario(scenario: Mapping[str, Any]) -> str:
    told = scenario["instructions"]
    lines = [f"Persona: {scenario['persona']}"] if scenario.get("persona") else []
    if isinstance(told, str):
        return "\n".join([*lines, told])
    names = {
        "reason_for_call": "Reason for the call",
        "known_info": "Knows",
        "unknown_info": "Does not know",
        "task_instructions": "Is to behave so",
    }
    return "\n".join([*lines, *(f"{said}: {told[name].strip()}" for name, said in names.items() if told.get(name))])

"""A fake tau2-bench checkout, and an interpreter that imports the stand-in package for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("tau2_stand_in")
TASKS = tuple(f"task_{number:03d}" for number in range(1, 98))


def write_home(folder: Path, script: dict[str, Any] | None = None) -> Path:
    """A checkout with the 97 tasks' names, and the stand-in's script."""
    tasks = folder / "data" / "tau2" / "domains" / "banking_knowledge" / "tasks"
    tasks.mkdir(parents=True)
    for task in TASKS:
        (tasks / f"{task}.json").write_text("{}")
    (folder / "data" / "script.json").write_text(json.dumps(script or {}))
    return folder


def write_retail(folder: Path, **changed: Any) -> Path:
    """A checkout with a retail domain of three tasks, one held out; ``changed`` are files with their content."""
    told = {"domain": "retail", "reason_for_call": "You want a refund.", "known_info": "You are Yusuf Rossi."}
    row = {"user_scenario": {"persona": None, "instructions": told}, "evaluation_criteria": {"nl_assertions": None}}
    files: dict[str, Any] = {
        "db.json": {},
        "policy.md": "# Policy",
        "tasks.json": [{**row, "id": str(number)} for number in range(3)],
        "split_tasks.json": {"train": ["0", "2"], "test": ["1"]},
        **changed,
    }
    domain = folder / "data" / "tau2" / "domains" / "retail"
    domain.mkdir(parents=True)
    for name, content in files.items():
        if content is not None:
            (domain / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def write_python(folder: Path, version: str | None = "1.0.1", package: Path = STAND_IN) -> Path:
    """An interpreter that finds ``package``, installed as tau2 of that version (None: not installed)."""
    folder.mkdir(parents=True, exist_ok=True)
    if version is not None:
        information = folder / "site" / f"tau2-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tau2\nVersion: {version}\n")
    python = folder / "stand_in_python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{package}:{folder / "site"}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def write_shell_programs(folder: Path) -> Path:
    """Programs under the names tau2's shell tool needs; ``srt`` runs the command, with no sandbox around it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("srt", "rg", "bwrap", "socat"):
        program = folder / name
        program.write_text('#!/bin/sh\nexec sh -c "$3"\n')
        program.chmod(0o755)
    return folder

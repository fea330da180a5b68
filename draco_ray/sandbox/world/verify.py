"""Checks a sandbox by running its tasks in AppWorld's own engine and evaluator.

The reference solution of every task must pass, also with each harmless fault; doing nothing, and every fatal fault of
the task's family, must fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from draco_ray.errors import WorldError
from draco_ray.sandbox.scripted import ScriptResult, try_scripts
from draco_ray.sandbox.world.build import MANIFEST, read_manifest
from draco_ray.sandbox.world.scripts import FATAL, Family, families

TASKS_AT_ONCE = 40
"""Tasks between two lines of progress; AppWorld's processes start anew for each such batch."""


def verify(root: Path, jobs: int = 2, progress: Callable[[str], None] = print) -> list[str]:
    """Check every task of a sandbox; returns one line for each task that is wrong.

    Args:
        root: a folder made by ``build``. Nothing in it is changed.
        jobs: AppWorld processes.
    Raises: WorldError if ``root`` holds no sandbox, or AppWorld fails.
    """
    manifest = read_manifest(root)
    if manifest is None:
        raise WorldError(f"{root} has no {MANIFEST}; expected a folder made by `draco sandbox build`")
    tasks = [(task_id, entry["family"]) for task_id, entry in manifest["tasks"].items()]
    if strange := {name for _, name in tasks} - set(families()):
        raise WorldError(f"{root} has tasks of unknown families ({', '.join(sorted(strange))}); build it again")
    started = time.monotonic()
    problems: list[str] = []
    for begin in range(0, len(tasks), TASKS_AT_ONCE):
        batch = tasks[begin : begin + TASKS_AT_ONCE]
        ways = [(task_id, name, way) for task_id, name in batch for way in _ways(families()[name])]
        done = try_scripts([(task_id, cells) for task_id, _, (_, cells, _) in ways], root, jobs, evaluate=True)
        found: dict[str, dict[str, None]] = {}
        for (task_id, name, (what, _, passes)), executed in zip(ways, done, strict=True):
            if problem := _problem(what, passes, executed):
                found.setdefault(f"verify: {task_id} ({name})", {})[problem] = None
        for task, several in found.items():
            problems.append(f"{task}: {'; '.join(several)}")
            progress(problems[-1])
        progress(f"verify: {begin + len(batch)}/{len(tasks)} tasks [{time.monotonic() - started:.0f} s]")
    return problems


def _ways(family: Family) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """How a task is played: description, cells, and whether the task must pass."""
    yield "doing nothing", (), False
    yield "the reference", tuple(family.script()), True
    for fault in sorted(family.faults):
        yield f"the fault {fault}", tuple(family.script(frozenset({fault}))), fault not in FATAL


def _problem(what: str, passes: bool, executed: ScriptResult) -> str | None:
    if executed.error is not None:
        return f"cannot be run: {executed.error}"
    if executed.success == passes:
        return None
    return f"{what} fails: {executed.unmet[0]}" if executed.unmet else f"{what} passes"

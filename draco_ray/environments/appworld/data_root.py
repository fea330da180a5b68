"""Reads an AppWorld data root: which tasks there are and what the policy may know of them.

    <root>/data/datasets/<split>.txt     task ids, one per line
    <root>/data/tasks/<id>/specs.json    instruction, supervisor, date
    <root>/data/tasks/<id>/dbs/          what differs from base_dbs
    <root>/data/tasks/<id>/ground_truth/ never opened here; training works without it

AppWorld itself is not imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from draco_ray.errors import ConfigError, WorldError
from draco_ray.records import Task

_SUPERVISOR = ("first_name", "last_name", "email", "phone_number")
_HINT = "set data.root to AppWorld's data or to a folder made by `draco sandbox build`"


def check_data_root(root: Path) -> None:
    """Check that ``root`` contains a world with tasks.

    Raises: WorldError: a folder is missing or there are no tasks.
    """
    if not root.is_dir():
        raise WorldError(f"data root {str(root)!r} does not exist; {_HINT}")
    for name in ("tasks", "base_dbs", "api_docs", "datasets"):
        if not (root / "data" / name).is_dir():
            raise WorldError(f"data root {str(root)!r} has no folder data/{name}; {_HINT}")
    if next((root / "data" / "tasks").glob("*/specs.json"), None) is None:
        raise WorldError(f"data root {str(root)!r} has no tasks (data/tasks/*/specs.json); {_HINT}")


def check_readable(root: Path, task_ids: Sequence[str]) -> None:
    """Check that other users than root can read the data, because root runs each task as another user.

    If this process does not run as root, nothing is checked.

    Raises: WorldError: other users cannot read a folder of the data root, or the specs of one of the tasks.
    """
    if os.geteuid():
        return
    data = root / "data"
    seen = [data, *(data / name for name in ("tasks", "base_dbs", "api_docs"))]
    for task_id in task_ids:
        seen += [_specs(root, task_id).parent, _specs(root, task_id)]
    for path in seen:
        needed = 0o005 if path.is_dir() else 0o004
        if path.exists() and path.stat().st_mode & needed != needed:
            raise WorldError(
                f"{path}: other users cannot read it, but each task runs as a user of its own; run chmod -R a+rX {data}"
            )


def load_split(root: Path, split: str) -> list[str]:
    """Task ids of a split in file order.

    Raises: WorldError: the split is unknown (the message lists the known ones), empty, or lists a missing task.
    """
    check_data_root(root)
    path = root / "data" / "datasets" / f"{split}.txt"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in path.parent.glob("*.txt"))) or "none"
        raise WorldError(f"data root {str(root)!r} has no split {split!r}; expected one of {known}")
    # A line may have a tag: `<task id>:<tag>`.
    task_ids = [line.split(":")[0].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not task_ids:
        raise WorldError(f"split {split!r} of data root {str(root)!r} has no tasks")
    missing = [task_id for task_id in task_ids if not _specs(root, task_id).is_file()]
    if missing:
        raise WorldError(
            f"split {split!r} of data root {str(root)!r} lists {len(missing)} tasks that do not exist, first "
            f"{missing[0]!r}"
        )
    return task_ids


def load_task(root: Path, task_id: str) -> Task:
    """A task as the policy may see it, from its ``specs.json`` alone.

    Raises: WorldError: the task is missing or its specs cannot be read.
    """
    path = _specs(root, task_id)
    try:
        specs = json.loads(path.read_text(encoding="utf-8"))
        supervisor = specs["supervisor"]
        return Task(
            task_id=task_id,
            # Ids are ``<scenario>_<1..3>``.
            group=task_id.rsplit("_", 1)[0],
            instruction=specs["instruction"],
            fields={f"supervisor_{name}": supervisor[name] for name in _SUPERVISOR},
        )
    except FileNotFoundError:
        raise WorldError(f"data root {str(root)!r} has no task {task_id!r}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorldError(
            f"task {task_id!r}: {path} is not a valid specs.json ({type(error).__name__}: {error})"
        ) from error


def load_difficulty(root: Path, task_id: str) -> int | None:
    """AppWorld's difficulty of a task, from its ground truth.

    Raises: ConfigError: the data have no ground truth.
    """
    folder = _specs(root, task_id).parent / "ground_truth"
    if not folder.is_dir():
        raise ConfigError(
            f"data root {root}: task {task_id} has no ground truth, which evaluation needs; use AppWorld's original "
            "data, or a sandbox made by `draco sandbox build`"
        )
    try:
        level = json.loads((folder / "metadata.json").read_text(encoding="utf-8")).get("difficulty")
    except (OSError, ValueError, AttributeError):
        return None
    return level if isinstance(level, int) else None


def tasks_digest(root: Path, tasks: Sequence[str]) -> str:
    """A digest of the tasks' specs, to distinguish worlds with the same task ids."""
    digest = hashlib.sha256()
    for task_id in tasks:
        digest.update(_specs(root, task_id).read_bytes())
    return digest.hexdigest()[:16]


def _specs(root: Path, task_id: str) -> Path:
    if not task_id or "/" in task_id or task_id.startswith("."):
        raise WorldError(f"{task_id!r} is not a task id")
    return root / "data" / "tasks" / task_id / "specs.json"

"""Stand-in for tau2.runner.helpers."""

from __future__ import annotations

import os
from pathlib import Path


def get_tasks(task_set_name: str, task_ids: list[str] | None = None) -> list[str]:
    """Ids of the tasks in the data folder."""
    folder = Path(os.environ["TAU2_DATA_DIR"]) / "tau2" / "domains" / task_set_name / "tasks"
    found = sorted(path.stem for path in folder.glob("task_*.json"))
    return [task for task in found if task_ids is None or task in task_ids]

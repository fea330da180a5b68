"""Stand-in for tau2.runner.helpers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tau2.data_model.simulation import Task, TextRunConfig


def get_tasks(task_set_name: str, task_ids: list[str] | None = None) -> list[Any]:
    """The tasks of a domain in one file, or the ids of a domain with one file per task."""
    folder = Path(os.environ["TAU2_DATA_DIR"]) / "tau2" / "domains" / task_set_name
    if (file := folder / "tasks.json").is_file():
        tasks = [Task.model_validate(row) for row in json.loads(file.read_text())]
        return [task for task in tasks if task_ids is None or task.id in task_ids]
    found = sorted(path.stem for path in (folder / "tasks").glob("task_*.json"))
    return [task for task in found if task_ids is None or task in task_ids]


def get_info(config: TextRunConfig) -> dict[str, Any]:
    return {"agent": config.values["llm_agent"], "user": config.values["llm_user"]}

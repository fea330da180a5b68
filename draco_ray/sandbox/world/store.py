"""Writes a world in the form AppWorld reads: API docs, base databases, task folders. Needs AppWorld's own Python."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from appworld.apps import get_all_apps
from appworld.apps.api_lib import set_local_date_and_time, unset_local_date_and_time
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import DB_VERSION
from appworld.common.datetime import DateTime
from appworld.common.path_store import path_store
from sqlmodel import Session

from draco_ray.sandbox.world.evaluation import evaluation_code, evaluation_data, test_data
from draco_ray.sandbox.world.population import APPS, NOW, World
from draco_ray.sandbox.world.scenarios import PlannedTask


def write_api_docs(root: Path) -> None:
    """Write the documentation of all APIs, generated from the apps themselves, into an AppWorld root."""
    path_store.update_root(str(root))
    random.seed(0)  # AppWorld draws the docs' example values from the global generator
    # Skip the validation of FastAPI's output: it takes half of the time, and the output is the same for every world.
    checker: Any = importlib.import_module("openapi_spec_validator")
    checker.validate_spec = lambda spec: None
    docs = ApiDocCollection.build(tuple(get_all_apps(skip_admin=True)))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every file it writes
        docs.save()


class Store:
    """Writes into one AppWorld root. AppWorld's root is a variable of the process: one store at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        path_store.update_root(str(root))

    def write_base_dbs(self, world: World) -> int:
        """Fill every app's database through its own models. Returns the number of rows."""
        freezer = set_local_date_and_time(DateTime.from_datetime(NOW))
        apps = list(get_all_apps())
        home = ":memory:sandbox-base"
        models = ModelCollection.load(to_db_home_path=home, load_apps=apps, create_db=True)
        for table, rows in world.tables.items():
            app, name = table.split(".")
            _insert(models[app][name], rows)
        models.save(db_home_path=str(self.data / "base_dbs"), format="full", app_names=apps)
        models.close()
        unset_local_date_and_time(freezer)
        return sum(len(rows) for rows in world.tables.values())

    def write_task(self, task: PlannedTask) -> None:
        """Write one task folder: specs, database changes (the supervisor's rows), ground truth."""
        folder = self.data / "tasks" / task.task_id
        (folder / "ground_truth").mkdir(parents=True)
        person = task.person
        specs = {
            "instruction": task.instruction,
            "supervisor": person.card,
            "datetime": NOW.isoformat(),
            "db_version": DB_VERSION,
        }
        _write_json(folder / "specs.json", specs)
        self._write_task_dbs(task, folder / "dbs")
        cells = task.family.script()
        code = "\n\n".join(cells) + "\n"
        apis = re.findall(r"apis\.(\w+\.\w+)", code)
        truth = {
            "metadata.json": {
                "difficulty": task.family.difficulty,
                "mode": "minimal",
                "num_apps": len(task.family.apps),
                "num_apis": len(set(apis)),
                "num_api_calls": len(apis),
                "num_solution_code_lines": sum(not line.startswith("#") for line in code.splitlines() if line),
            },
            "public_data.json": dict(task.draft.params),
            "private_data.json": evaluation_data(task.draft),
            "answer.json": task.draft.answer,
            "test_data.json": test_data(task.draft),
            "required_apps.json": list(task.family.apps),
        }
        for name, value in truth.items():
            _write_json(folder / "ground_truth" / name, value)
        (folder / "ground_truth" / "evaluation.py").write_text(evaluation_code(task.draft))
        (folder / "ground_truth" / "solution.py").write_text(code)

    def _write_task_dbs(self, task: PlannedTask, folder: Path) -> None:
        person = task.person
        models = ModelCollection.load(
            to_db_home_path=f":memory:sandbox-{task.task_id}",
            from_db_home_path=str(self.data / "base_dbs"),
            load_apps=["supervisor"],
            skip_mandatory_apps=True,
        ).supervisor
        models.SQLModel.restart_db_tracker()
        models.Supervisor.create(**person.card, birthday=person.birthday, sex=person.sex).save()
        models.Task.create(supervisor_id=1, instruction=task.instruction).save()
        models.AccountPassword.save_all(
            [
                models.AccountPassword.create(supervisor_id=1, account_name=app, password=person.passwords[app])
                for app in APPS
            ],
        )
        folder.mkdir()
        models.SQLModel.db.save("changes", str(folder / "supervisor.jsonl"))
        # An app without changes needs its file too, or the engine starts it from an empty database.
        for app in get_all_apps():
            if app != "supervisor":
                (folder / f"{app}.jsonl").touch()

    def write_datasets(self, tasks: Iterable[PlannedTask], splits: Iterable[str]) -> None:
        """Write one file of task ids per split."""
        folder = self.data / "datasets"
        folder.mkdir()
        tasks = list(tasks)
        for split in splits:
            ids = [task.task_id for task in tasks if task.split == split]
            (folder / f"{split}.txt").write_text("".join(f"{task_id}\n" for task_id in ids))

    def write_version(self) -> None:
        """Write the version file of AppWorld's data folder."""
        (self.data / "version.txt").write_text(DB_VERSION + "\n")


def _insert(model: Any, rows: list[dict[str, Any]]) -> None:
    """Fill an empty table as ``create`` and ``save_all`` of AppWorld's models would, in a third of the time.

    Those validate every row twice, read it back twice, and look up each row that it refers to. Their hooks would also
    update values after a change (likes, search texts of other rows), which the rows already contain.
    """
    records = [model.validate(row) for row in rows]
    with Session(model.db.engine, autoflush=False, expire_on_commit=False) as session:
        for record in records:
            record.set_record_hash()
            record._pre_change("create", None)
        session.add_all(records)
        model.commit_session(session)
    for record in records:
        record.set_search_text()
    model.increment_model_hash()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")

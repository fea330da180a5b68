"""Tasks as rows of a JSONL file, of a function, or of Harbor's task folders."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.config.file_names import validate_file_name
from draco_ray.errors import ConfigError, WorldError
from draco_ray.records import Task
from draco_ray.registry import find_component

TRAIN = "train"
"""Split of a row without ``split``."""
LONGEST_ID = 128
"""Maximum length of a task id in bytes; file names of the task's rollouts are longer than the id."""
_OURS = ("id", "instruction", "split", "group", "expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task."""

    task_id: str
    split: str
    row: Mapping[str, Any]

    def task(self, tools: str) -> Task:
        """The task as the policy may see it; its short extra fields may be used in the prompt."""
        # JSON can encode lone surrogates, which cannot be tokenized; `_whole` replaces them.
        fields = {
            _whole(name): _whole(str(value))
            for name, value in self.row.items()
            if name not in _OURS and isinstance(value, str | int | float)
        }
        return Task(
            task_id=self.task_id,
            group="" if self.row.get("group") is None else str(self.row["group"]),
            instruction=_whole(self.row["instruction"]),
            fields=fields,
            tools=tools,
        )

    @property
    def expected(self) -> str:
        """``expected`` as JSON; empty if there is none."""
        return json.dumps(self.row["expected"], sort_keys=True) if "expected" in self.row else ""

    def told(self, *, ground_truth: bool) -> dict[str, Any]:
        """The row for ``reset``; with ``ground_truth`` the row for ``evaluate``, which includes ``expected``."""
        return {name: value for name, value in self.row.items() if ground_truth or name != "expected"}


class Rows(dict[str, Row]):
    """Rows by task id, in the order of their source."""

    def __init__(self, source: str) -> None:
        """``source`` is named in errors."""
        super().__init__()
        self._source = source

    def of_split(self, split: str) -> list[str]:
        """Task ids of a split. Raises: WorldError: there is no such split."""
        found = [row.task_id for row in self.values() if row.split == split]
        if not found:
            splits = ", ".join(sorted({row.split for row in self.values()}))
            raise WorldError(f"{self._source}: no task has split {split!r}; expected one of {splits}")
        return found

    def row(self, task_id: str) -> Row:
        """The row of a task. Raises: WorldError: there is no such task."""
        if task_id not in self:
            raise WorldError(f"{self._source}: no task {task_id!r}")
        return self[task_id]


def read_rows(source: str) -> Rows:
    """The tasks of a JSONL file, of ``folder/file.py:function``, or of a folder of Harbor's task folders.

    Raises: ConfigError: one line that names the place.
    """
    is_file = ":" not in source.rpartition("/")[2]
    found = Rows(source)
    places: dict[str, str] = {}
    rows = (
        _returned(source) if not is_file else _folders(Path(source)) if Path(source).is_dir() else _lines(Path(source))
    )
    for place, row in rows:
        task_id, instruction = row.get("id"), row.get("instruction")
        if task_id is None or task_id == "":
            raise ConfigError(f"{source}: {place}: the task has no id; add one that is unique in the file")
        if not isinstance(task_id, str | int) or isinstance(task_id, bool):
            kind = type(task_id).__name__
            raise ConfigError(f"{source}: {place}: id: expected a text or a whole number, found {kind}")
        task_id = str(task_id)
        check_id(task_id, f"{source}: {place}")
        if not isinstance(instruction, str) or not instruction.strip():
            raise ConfigError(
                f"{source}: {place}: task {task_id!r} has no instruction; describe what the agent has to do"
            )
        for name in ("split", "group"):
            if not isinstance(row.get(name), str | int | None):
                found_there = type(row[name]).__name__
                raise ConfigError(f"{source}: {place}: task {task_id!r}: {name}: expected a text, found {found_there}")
        if task_id in found:
            raise ConfigError(
                f"{source}: two tasks have the id {task_id!r} ({places[task_id]} and {place}); rename one"
            )
        found[task_id] = Row(task_id=task_id, split=TRAIN if row.get("split") is None else str(row["split"]), row=row)
        places[task_id] = place
    if not found:
        raise ConfigError(f"{source}: contains no tasks")
    return found


def check_id(task_id: str, where: str) -> None:
    """Check that files can be named after a task. Raises: ConfigError that names the place."""
    try:
        validate_file_name(task_id)
        if len(task_id.encode("utf-8", "surrogatepass")) > LONGEST_ID:
            raise ValueError(f"expected at most {LONGEST_ID} bytes")
    except ValueError as error:
        raise ConfigError(
            f"{where}: task {task_id[:60]!r}: id: {error}, because files are named after the id"
        ) from None


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _lines(path: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    try:
        # utf-8-sig: some editors begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: tasks cannot be read: {' '.join(str(error).split())}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: line {number}: not JSON: {' '.join(str(error).split())}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: line {number}: expected an object, found {type(row).__name__}")
        yield f"line {number}", row


def _folders(path: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Harbor's tasks, ``path`` itself or below: ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/``.

    Only the evaluator gets the path of the tests; nothing reads the solution.
    """
    for told in sorted(path.rglob("task.toml")):
        folder = told.parent.resolve()
        try:
            settings = tomllib.loads(told.read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{told}: not a Harbor task: {' '.join(str(error).split())}") from None
        environment, metadata = settings.get("environment", {}), settings.get("metadata", {})
        yield (
            str(told),
            {
                "id": folder.name,
                "instruction": instruction,
                "split": metadata.get("split"),
                "repository": str(folder / "environment"),
                "image": environment.get("docker_image", ""),
                "expected": {"harbor": str(folder / "tests")},
            },
        )


def _returned(source: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    function = find_component("environment.options.tasks", source, {})
    try:
        rows = list(function())
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"environment.options.tasks={source}: {said}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{source}: row {number}: expected a mapping, found {type(row).__name__}")
        try:
            # Tools and agents get the row as JSON in other processes.
            row = json.loads(json.dumps(dict(row)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{source}: row {number}: cannot be written as JSON: {' '.join(str(error).split())}"
            ) from None
        yield f"row {number}", row

"""Tasks in JSONL without a world, for agents with a world of their own (``agent.use: command``)."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from draco_ray.config.schema import ConfigSection, DataConfig, EnvironmentConfig
from draco_ray.environments.base import Environment, WorldVerdict, checked_options, list_items
from draco_ray.environments.program import Command, run_program
from draco_ray.environments.tools.rows import Rows, read_rows
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError
from draco_ray.records import Task
from draco_ray.temp_dirs import PrivateTempDir

WORKSPACE_FIELD = "workspace"
"""Field of an open task: path of the rollout's own folder, whose files an evaluator can read."""
KEPT_FOLDER = "kept"
"""Folder in the workspace whose files are kept with the run."""
_HOW_AGENTS_ACT = """\
- The agent is a program with a loop and tools of its own. A step is a turn of the policy that it received: calls of \
tools, whose answers stand as its output, or a message, the last one included.
- Turns of sub-agents, and those after a rewritten history, stand in branches of their own, in the order of time.
- What stands under USER, SYSTEM or CONTEXT was said to the policy, by the program or by whom it speaks for.
- The episode ends with the program. What it printed stands at the end, under PROGRAM."""


class TasksOptions(ConfigSection):
    """``environment.options`` of ``environment.use: tasks``."""

    tasks: str = ""
    """A JSONL file, or ``folder/file.py:function`` that returns such rows. A row has ``id``, ``instruction`` and, if
    needed, ``split`` (default: train), ``group``, ``expected`` (only the evaluator sees it) and further fields. With
    environment.use=workspace also a folder of Harbor's task folders. Empty: ``tasks.jsonl`` in data.root."""
    evaluator: str = ""
    """A command, run in data.root, that checks whether a task was done: it reads a JSON object (``task`` with
    ``expected``, ``output``: what the agent's program printed, ``workspace``: its folder) and ends with exit code 0 for
    yes or 1 for no. It may print a JSON object that maps each requirement to true or false."""
    evaluator_seconds: float = Field(120.0, gt=0)
    facts: str = ""
    """Further facts for the judge, as a list with one item per line: house rules, or behaviour that no criterion may
    punish."""


class TasksEnvironment(Environment):
    """Lists tasks, gives each rollout a folder, and runs the evaluator, if there is one."""

    options_type: ClassVar[type[TasksOptions]] = TasksOptions

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        self.options = checked_options(self.options_type, config.options)
        self.facts = "\n".join([_HOW_AGENTS_ACT, *list_items(self.options.facts)])
        if self.options.evaluator:
            _words(self.options.evaluator)

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        """Whether there is an evaluator."""
        return bool(self.options.evaluator)

    def tasks(self, split: str) -> list[str]:
        """See `Environment`."""
        return self.rows.of_split(split)

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        return self.rows.row(task_id).task("")

    def expected(self, task_id: str) -> str:
        """See `Environment`."""
        return self.rows.row(task_id).expected

    async def open(self, task_id: str) -> FolderWorld:
        """See `Environment`."""
        return FolderWorld(self, self.task(task_id))

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows of ``environment.options.tasks``, each of which defines a task."""
        return read_rows(self.options.tasks or str(self.data.root / "tasks.jsonl"))


class FolderWorld:
    """One open task: a folder, and the output of the agent's program, which is the only action."""

    def __init__(self, environment: TasksEnvironment, task: Task) -> None:
        self._environment = environment
        self._held = PrivateTempDir()
        self._folder = self._held.path
        self._output: str | None = None
        self.task = replace(task, fields={**task.fields, WORKSPACE_FIELD: str(self._folder)})

    async def act(self, action: str) -> str:
        """Store the output of the agent's program for `evaluate`."""
        self._output = action
        return ""

    async def evaluate(self) -> WorldVerdict:
        """Run the evaluator. Raises: see `World`."""
        environment, task_id = self._environment, self.task.task_id
        if not (environment.ground_truth and environment.options.evaluator):
            raise WorldError(f"task {task_id}: the environment was opened without ground truth, or has no evaluator")
        task = environment.rows.row(task_id).told(ground_truth=True)
        told = {"task": task, "output": self._output or "", "workspace": str(self._folder)}
        words = _words(environment.options.evaluator)
        try:
            ran = await run_program(
                Command(words=words, environment=dict(os.environ), folder=environment.data.root),
                told=json.dumps(told, ensure_ascii=False),
                seconds=environment.options.evaluator_seconds,
                most_bytes=100_000,
            )
        except OSError as error:
            raise EnvironmentCrashed(f"task {task_id}: the evaluator cannot be started: {error}") from error
        if ran.exit_code not in (0, 1):
            how = "did not end in time" if ran.exit_code is None else f"ended with exit code {ran.exit_code}"
            last = " ".join((ran.errors or ran.output).split())[-300:]
            raise EnvironmentCrashed(f"task {task_id}: the evaluator {how}, expected 0 or 1; its last output: {last}")
        return _verdict(task_id, ran.exit_code == 0, ran.output)

    async def keep(self, folder: Path) -> None:
        """See `draco_ray.environments.base.GuardedWorld.keep`."""
        if (kept := self._folder / KEPT_FOLDER).is_dir():
            await asyncio.to_thread(shutil.copytree, kept, folder, symlinks=True)

    async def close(self) -> None:
        """Remove the folder."""
        await asyncio.to_thread(self._held.remove)


def _verdict(task_id: str, success: bool, printed: str) -> WorldVerdict:
    asked: Any = {"evaluator": success}
    if printed.strip():
        try:
            asked = json.loads(printed)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict) or not asked or not all(isinstance(met, bool) for met in asked.values()):
            raise EnvironmentCrashed(
                f"task {task_id}: the evaluator printed {printed.strip()[:100]!r}; expected no output, or a JSON "
                "object with a boolean per name"
            )
    failures = tuple(name for name, met in asked.items() if not met)
    return WorldVerdict(
        success=success, passed_tests=len(asked) - len(failures), total_tests=len(asked), failures=failures
    )


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"environment.options.evaluator={command!r}: {error}") from None
    if words and words[0] == "python":
        words[0] = sys.executable
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"environment.options.evaluator={command!r}: no such program")
    return words

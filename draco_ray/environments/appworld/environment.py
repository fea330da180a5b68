"""AppWorld as an `Environment`, and the facts about it for the judge."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.appworld.data_root import (
    check_readable,
    load_difficulty,
    load_split,
    load_task,
    tasks_digest,
)
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.environments.base import Environment, World, termination_if_stopped
from draco_ray.records import EpisodeEnd, Task, Termination, Trajectory

FAILED_PREFIX = "Execution failed."
"""Beginning of the output of a cell that raised, did not parse or timed out."""


def termination(ended: EpisodeEnd, steps: Iterable[tuple[str | None, str | None]]) -> Termination:
    """How a rollout ended, from its last successful ``complete_task`` call or else from ``ended``.

    A call is found in the cell's code and counts as successful if the cell did not fail, even in a branch that may not
    have been executed. A rollout that submitted and was stopped by a limit afterwards counts as submitted.

    Args:
        ended: why the agent loop stopped.
        steps: (code, output) of the turns that emitted code, in order.
    """
    stopped = termination_if_stopped(ended)
    if stopped in (Termination.SERVER_ERROR, Termination.CRASHED):
        return stopped
    cells = list(steps)
    for code, output in reversed(cells):
        status = _completion(code or "")
        if status is not None and not (output or "").lstrip().startswith(FAILED_PREFIX):
            return Termination.GAVE_UP if status == "fail" else Termination.SUBMITTED
    return stopped or (Termination.GAVE_UP if cells else Termination.NO_ACTION)


def _completion(code: str) -> str | None:
    """The status of the last ``complete_task`` call in a cell, "success" by default; None: no call.

    >>> _completion("apis.supervisor.complete_task(answer=None, status='fail')")
    'fail'
    """
    if "complete_task" not in code:
        return None
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "complete_task"
    ]
    if not calls:
        return None
    last = max(calls, key=lambda call: (call.lineno, call.col_offset))
    given = [keyword.value for keyword in last.keywords if keyword.arg == "status"]
    fails = bool(given) and isinstance(given[0], ast.Constant) and given[0].value == "fail"
    return "fail" if fails else "success"


APPWORLD_FACTS = """\
- An action is Python code, which the agent must put between `<code>` and `</code>`; what the code prints comes back. \
No criterion may punish that wrapping.
- Calling `complete_task` leaves the episode open. The episode is over once the agent sends a turn that has no \
`<code>...</code>` block. One short closing turn after `complete_task` is therefore expected, and nobody may hold it \
against the agent."""


class AppWorldEnvironment(Environment):
    """Tasks of an AppWorld data root. An action is a cell of Python code, run in a jail."""

    facts = APPWORLD_FACTS
    agent_prompt: ClassVar[Path] = Path("prompts/agent_think.txt")
    static_rubric: ClassVar[Path] = Path("prompts/static_rubric.yaml")
    evaluates = True

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        # Created with the first task, because the driver only lists tasks and needs no AppWorld.
        self._slot: AppWorldSlot | None = None

    def tasks(self, split: str) -> list[str]:
        """See `Environment`."""
        tasks = load_split(self.data.root, split)
        if self.config.isolation != "rlimits":
            check_readable(self.data.root, tasks[:1])
        return tasks

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        return load_task(self.data.root, task_id)

    async def open(self, task_id: str) -> World:
        """See `Environment`."""
        if self._slot is None:
            self._slot = AppWorldSlot(self.config, self.data.root, load_ground_truth=self.ground_truth, name=self.name)
        return await self._slot.open(task_id)

    async def stop(self) -> None:
        """See `Environment`."""
        if self._slot is not None:
            await self._slot.close()

    def termination(self, trajectory: Trajectory) -> Termination:
        """See `Environment`."""
        return termination(
            trajectory.ended, ((turn.action, turn.observation) for turn in trajectory.turns if turn.action is not None)
        )

    def difficulty(self, task_id: str) -> int | None:
        """See `Environment`."""
        return load_difficulty(self.data.root, task_id)

    def digest(self, tasks: Sequence[str]) -> str:
        """See `Environment`."""
        return tasks_digest(self.data.root, tasks)

"""AppWorld as an `Environment`, and the facts about it for the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from draco_ray.environments.appworld.termination import termination_of
from draco_ray.environments.base import Environment, WorldVerdict
from draco_ray.records import Task, Termination, Trajectory

FACTS = """\
- An action is Python code, which the agent must put between `<code>` and `</code>`; what the code prints comes back. \
No criterion may punish that wrapping.
- Calling `complete_task` leaves the episode open. The episode is over once the agent sends a turn that has no \
`<code>...</code>` block. One short closing turn after `complete_task` is therefore expected, and nobody may hold it \
against the agent."""


class AppWorldEnvironment(Environment):
    """Tasks of an AppWorld data root. An action is a cell of Python code, run in a jail."""

    facts = FACTS
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

    async def open(self, task_id: str) -> AppWorld:
        """See `Environment`."""
        if self._slot is None:
            self._slot = AppWorldSlot(self.config, self.data.root, load_ground_truth=self.ground_truth, name=self.name)
        return AppWorld(slot=self._slot, task=await self._slot.open(task_id))

    async def stop(self) -> None:
        """See `Environment`."""
        if self._slot is not None:
            await self._slot.stop()

    def termination(self, trajectory: Trajectory) -> Termination:
        """See `Environment`."""
        return termination_of(trajectory)

    def difficulty(self, task_id: str) -> int | None:
        """See `Environment`."""
        return load_difficulty(self.data.root, task_id)

    def digest(self, tasks: Sequence[str]) -> str:
        """See `Environment`."""
        return tasks_digest(self.data.root, tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppWorld:
    """The open task of a slot; see `World`."""

    slot: AppWorldSlot
    task: Task

    async def act(self, action: str) -> str:
        """Run a code cell and return its output."""
        return await self.slot.execute(action)

    async def evaluate(self) -> WorldVerdict:
        """AppWorld's own tests."""
        return await self.slot.evaluate()

    async def close(self) -> None:
        """End the task's process."""
        await self.slot.close_task()

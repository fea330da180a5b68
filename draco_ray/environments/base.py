"""The seam to an environment: where tasks come from, where they are done, and what the judge is told of it.

A class of your own in one file is enough (docs/extending/environment.md); ``environment.use`` names it.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError
from draco_ray.records import EpisodeEnd, Task, Termination, Trajectory
from draco_ray.registry import find

ENVIRONMENTS = {
    "appworld": "draco_ray.environments.appworld.environment:AppWorldEnvironment",
    "appworld_functions": "draco_ray.environments.appworld.functions:AppWorldFunctions",
    "tasks": "draco_ray.environments.tasks:TasksEnvironment",
    "tau": "draco_ray.benchmarks.tau.environment:TauEnvironment",
    "tools": "draco_ray.environments.tools.environment:ToolsEnvironment",
    "verifiers": "draco_ray.verifiers.environment:VerifiersEnvironment",
    "workspace": "draco_ray.environments.workspace:WorkspaceEnvironment",
}
"""The environments that ship, by the name that ``environment.use`` may give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVerdict:
    """An environment's own evaluation of a finished world: ground truth, which no outcome-blind setting asks for."""

    success: bool
    reward: float | None = None
    """What an environment gives that has more to say than yes or no: the reward of the ``outcome`` setting."""
    passed_tests: int = 0
    total_tests: int = 0
    difficulty: int | None = None
    failures: tuple[str, ...] = ()
    """Requirements that are not met."""
    saved: Mapping[str, str] = field(default_factory=dict)
    """Files by which the verdict can be checked later: name -> content."""


class World(Protocol):
    """One open task."""

    @property
    def task(self) -> Task:
        """The task to be done."""
        ...

    async def act(self, action: str) -> str:
        """Do what the agent asks for and return what it is to see.

        Raises: EnvironmentCrashed when the world is lost; WorldBroken where that was the action's doing.
        """
        ...

    async def evaluate(self) -> WorldVerdict:
        """Say whether the task is done. Nothing more can be done in the world.

        Raises: WorldError where the environment was made without ground truth, or has none; WorldBroken when the agent
            left a world that cannot be evaluated; EnvironmentCrashed when that was no doing of the agent's.
        """
        ...

    async def close(self) -> None:
        """End the task. Raises nothing."""
        ...


class Environment(ABC):
    """A place to do tasks, one at a time: each slot has an object of its own, and so has the driver, to list tasks.

    Making one must be cheap: whatever a task needs is started by `open`.
    """

    facts: str = ""
    """What a judge has to know of it, as lines of a list: how actions look, what ends an episode, what an agent must do
    that no criterion may punish."""
    agent_prompt: ClassVar[Path | str] = "{task_description}"
    """The agent's prompt unless ``agent.prompt`` names another: a template file, or the template itself
    (`draco_ray.rollout.agent`)."""
    static_rubric: ClassVar[Path | None] = None
    """Criteria of ``algorithm.rubric=static`` unless ``algorithm.static_rubric`` names others; None: it has none."""
    evaluates: bool = False
    """Whether its worlds can be evaluated."""
    agent_variables: Sequence[str] = ()
    """Environment variables without which the agent's program cannot play here: ``agent.pass_environment`` names
    them."""

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """Prepare a slot.

        Args:
            config: limits, and ``environment.options`` for what is an environment's own.
            data: where the tasks are.
            ground_truth: whether its worlds may be evaluated. Training is outcome-blind because its workers' are not.
            name: for messages.
        Raises: WorldError or ConfigError when it cannot be used.
        """
        self.config = config
        self.data = data
        self.ground_truth = ground_truth
        self.name = name

    @abstractmethod
    def tasks(self, split: str) -> list[str]:
        """The ids of a split's tasks, in order. Raises: WorldError, one line, for one that is not there."""

    @abstractmethod
    def task(self, task_id: str) -> Task:
        """A task as the policy may know it, without ground truth. Raises: WorldError for one that is not there."""

    def check_model(self, path: str) -> None:  # noqa: B027
        """See that a model, a folder or a hub name, can play here, before anything is started for it.

        Raises: ConfigError, one line, where it cannot.
        """

    @abstractmethod
    async def open(self, task_id: str) -> World:
        """Begin a task anew; a task that is open is closed first.

        Raises: WorldError for a task that is not there; EnvironmentCrashed when it cannot be begun.
        """

    async def stop(self) -> None:
        """End what `open` has started. The object may be used again."""
        return

    def termination(self, trajectory: Trajectory) -> Termination:
        """How a rollout ended; override it where an agent may also submit or give up."""
        return ended_by(trajectory) or (Termination.FINISHED if trajectory.steps else Termination.NO_ACTION)

    def difficulty(self, task_id: str) -> int | None:
        """The benchmark's label, 1 easy .. 3 hard, for tables; it may come from ground truth, so only for evaluation.

        Raises: ConfigError where the task cannot be evaluated.
        """
        if not self.evaluates:
            raise WorldError(f"environment {self.name}: it has no evaluator: task {task_id} cannot be evaluated")
        return None

    def digest(self, tasks: Sequence[str]) -> str:
        """A digest of the tasks, by which others under the same ids are told apart."""
        texts = "\0".join(repr(self.task(task_id)) for task_id in tasks)
        return hashlib.sha256(texts.encode("utf-8", "replace")).hexdigest()[:16]


def ended_by(trajectory: Trajectory) -> Termination | None:
    """The mode of a rollout that something stopped; None where the agent stopped by itself."""
    return {
        EpisodeEnd.SERVER_ERROR: Termination.SERVER_ERROR,
        EpisodeEnd.CRASHED: Termination.CRASHED,
        EpisodeEnd.RESPONSE_LIMIT: Termination.RESPONSE_LIMIT,
        EpisodeEnd.TURN_LIMIT: Termination.TURN_LIMIT,
    }.get(trajectory.ended)


def make_environment(
    config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool = False, name: str = "environment"
) -> Environment:
    """The environment that ``environment.use`` names; the arguments are `Environment`'s.

    Raises: ConfigError where there is none of that name, or it is no `Environment`; and what its constructor raises.
    """
    kind = find_environment(config.use)
    return kind(config, data, ground_truth=ground_truth, name=name)


def find_environment(use: str) -> type[Environment]:
    """The class behind a name of ``environment.use``. Raises: as `make_environment`."""
    kind = find("environment.use", use, ENVIRONMENTS)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"environment.use={use!r}: not a subclass of draco_ray.environments.base.Environment")
    return kind


PATIENCE = 1.5
"""Times ``environment.cell_timeout_seconds`` after which an action is given up on: an environment that keeps the limit
itself, and can say more, is first."""


class GuardedWorld:
    """A world whose unforeseen errors and hangs are crashes of the environment: they lose a rollout and never a run."""

    def __init__(self, world: World, name: str, timeout_seconds: float) -> None:
        self._world = world
        self._name = name
        self._timeout_seconds = timeout_seconds

    @property
    def task(self) -> Task:
        """See `World`."""
        return self._world.task

    @property
    def workspace(self) -> Any:
        """The world if it confines agents' programs to a folder (`draco_ray.environments.workspace`), else None."""
        return getattr(self._world, "workspace", None)

    async def act(self, action: str) -> str:
        """See `World`. Raises: EnvironmentCrashed, WorldBroken."""
        try:
            async with asyncio.timeout(PATIENCE * self._timeout_seconds):
                seen = await self._world.act(action)
        except Exception as error:
            raise crash(self._name, self._world.task.task_id, error) from error
        if not isinstance(seen, str):
            raise EnvironmentCrashed(
                f"environment {self._name}: task {self._world.task.task_id}: act returned {type(seen).__name__}, "
                "expected text"
            )
        return seen

    async def evaluate(self) -> WorldVerdict:
        """See `World`. Raises: EnvironmentCrashed, WorldBroken, WorldError."""
        try:
            return await self._world.evaluate()
        except WorldError:
            raise
        except Exception as error:
            raise crash(self._name, self._world.task.task_id, error) from error

    async def keep(self, folder: Path) -> None:
        """Copy what the world wants kept of the episode to ``folder``, which is not there yet; most keep nothing.

        A world says so by a method of this name. Raises: OSError.
        """
        if (keep := getattr(self._world, "keep", None)) is not None:
            await keep(folder)

    async def close(self) -> None:
        """See `World`. Raises: EnvironmentCrashed."""
        try:
            await self._world.close()
        except Exception as error:
            raise crash(self._name, self._world.task.task_id, error) from error


def crash(name: str, task_id: str, error: Exception) -> EnvironmentCrashed:
    """``error`` as a crash of the environment, itself if it is one."""
    if isinstance(error, EnvironmentCrashed):
        return error
    said = " ".join(str(error).split())[:500]
    return EnvironmentCrashed(f"environment {name}: task {task_id}: {type(error).__name__}: {said}")

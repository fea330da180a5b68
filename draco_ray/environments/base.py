"""The interface of environments: they list tasks, run actions, and tell the judge facts about their world.

To add one, write a subclass in one file and name it in ``environment.use`` (docs/extending/environment.md).
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import ValidationError

from draco_ray.config.schema import AgentConfig, ConfigSection, DataConfig, EnvironmentConfig, ModelConfig
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError
from draco_ray.records import EpisodeEnd, Task, Termination, Trajectory
from draco_ray.registry import find_component

ENVIRONMENTS = {
    "appworld": "draco_ray.environments.appworld.environment:AppWorldEnvironment",
    "appworld_functions": "draco_ray.environments.appworld.functions:AppWorldFunctions",
    "tasks": "draco_ray.environments.tasks:TasksEnvironment",
    "tau": "draco_ray.benchmarks.tau.environment:TauEnvironment",
    "tools": "draco_ray.environments.tools.environment:ToolsEnvironment",
    "verifiers": "draco_ray.verifiers.environment:VerifiersEnvironment",
    "workspace": "draco_ray.environments.workspace:WorkspaceEnvironment",
}
"""Built-in environments by their name in ``environment.use``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVerdict:
    """An environment's evaluation of a finished world: ground truth, which outcome-blind settings never use."""

    success: bool
    reward: float | None = None
    """A graded result instead of success or failure: the reward of the ``outcome`` setting."""
    passed_tests: int = 0
    total_tests: int = 0
    difficulty: int | None = None
    failures: tuple[str, ...] = ()
    """Unmet requirements."""
    saved: Mapping[str, str] = field(default_factory=dict)
    """Files with which the verdict can be checked later: name -> content."""


class World(Protocol):
    """One open task."""

    @property
    def task(self) -> Task:
        """The task that is open in this world."""
        ...

    async def act(self, action: str) -> str:
        """Carry out an action and return the observation.

        Raises: EnvironmentCrashed: the world is lost; WorldBroken: it is lost because of the action.
        """
        ...

    async def evaluate(self) -> WorldVerdict:
        """Evaluate the task. The world accepts no actions afterwards.

        Raises: WorldError: the environment was created without ground truth, or has no evaluator; WorldBroken: the
            agent left a world that cannot be evaluated; EnvironmentCrashed: evaluation failed for another reason.
        """
        ...

    async def close(self) -> None:
        """End the task; never raises."""
        ...


class Environment(ABC):
    """Plays one task at a time. Each slot has its own object; the driver also has one, to list tasks.

    The constructor must be cheap; `open` starts what a task needs.
    """

    facts: str = ""
    """Facts for the judge, as list items: what actions look like, what ends an episode, and required behaviour that no
    criterion may punish."""
    agent_prompt: ClassVar[Path | str] = "{task_description}"
    """The agent's prompt if ``agent.prompt`` is null: a template file, or the template itself
    (`draco_ray.rollout.agent`)."""
    static_rubric: ClassVar[Path | None] = None
    """File with the criteria of ``algorithm.rubric=static`` if ``algorithm.static_rubric`` is null; None: no file."""
    evaluates: bool = False
    """Whether the environment has an evaluator of finished worlds."""
    agent_variables: Sequence[str] = ()
    """Environment variables that an agent program needs here; they must be listed in ``agent.pass_environment``."""
    container: str | None = None
    """The value of ``agent.container``, set before the first task is opened."""

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """Prepare a slot.

        Args:
            config: limits, and ``environment.options``, which each environment defines.
            data: where the tasks are.
            ground_truth: whether its worlds may be evaluated; false in workers of outcome-blind training.
            name: for messages.
        Raises: WorldError, ConfigError: the environment cannot be used.
        """
        self.config = config
        self.data = data
        self.ground_truth = ground_truth
        self.name = name

    @abstractmethod
    def tasks(self, split: str) -> list[str]:
        """The ids of a split's tasks, in a fixed order. Raises: WorldError: there is no such split."""

    @abstractmethod
    def task(self, task_id: str) -> Task:
        """A task as the policy may see it, without ground truth. Raises: WorldError: there is no such task."""

    def check_model(self, model: ModelConfig, agent: AgentConfig) -> None:  # noqa: B027
        """Check, before anything is started, that a model fits this environment.

        Raises: ConfigError: the model does not fit.
        """

    @abstractmethod
    async def open(self, task_id: str) -> World:
        """Begin a task in a new world; an open task is closed first.

        Raises: WorldError: there is no such task; EnvironmentCrashed: it cannot be started.
        """

    async def stop(self) -> None:
        """Stop what `open` started. The object can be used again."""
        return

    def termination(self, trajectory: Trajectory) -> Termination:
        """How a rollout ended; override it if agents can also submit or give up."""
        return termination_if_stopped(trajectory.ended) or (
            Termination.FINISHED if trajectory.steps else Termination.NO_ACTION
        )

    def difficulty(self, task_id: str) -> int | None:
        """The benchmark's difficulty from 1 (easy) to 3 (hard), for tables. It may come from ground truth, so only
        evaluation may use it.

        Raises: WorldError, ConfigError: the task cannot be evaluated.
        """
        if not self.evaluates:
            raise WorldError(f"environment {self.name} has no evaluator, so task {task_id} cannot be evaluated")
        return None

    def expected(self, task_id: str) -> str:
        """Ground truth of a task as text, for `digest`; empty if the environment has none."""
        return ""

    def digest(self, tasks: Sequence[str]) -> str:
        """A digest of the tasks and of `expected`, to detect different tasks with the same ids."""
        texts = "\0".join(f"{self.task(task_id)!r}{self.expected(task_id)}" for task_id in tasks)
        return hashlib.sha256(texts.encode("utf-8", "replace")).hexdigest()[:16]


OptionsT = TypeVar("OptionsT", bound=ConfigSection)


def checked_options(kind: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    """Validate ``environment.options`` as an object of class ``kind``.

    Raises: ConfigError: an option is unknown or missing, or has an invalid value.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"environment.options: {'; '.join(problems)}") from None


def list_items(facts: str) -> list[str]:
    """The lines of ``environment.options.facts`` as list items; an indented line continues the one before.

    >>> list_items("- One, which is\\n  long.\\nTwo.")
    ['- One, which is', '  long.', '- Two.']
    """
    return [line if line.startswith(("- ", " ")) else f"- {line}" for line in facts.splitlines() if line]


def termination_if_stopped(ended: EpisodeEnd) -> Termination | None:
    """How a rollout was stopped; None if the agent ended it."""
    return {
        EpisodeEnd.SERVER_ERROR: Termination.SERVER_ERROR,
        EpisodeEnd.CRASHED: Termination.CRASHED,
        EpisodeEnd.RESPONSE_LIMIT: Termination.RESPONSE_LIMIT,
        EpisodeEnd.TURN_LIMIT: Termination.TURN_LIMIT,
    }.get(ended)


def make_environment(
    config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool = False, name: str = "environment"
) -> Environment:
    """The environment that ``environment.use`` names, made with the arguments of `Environment`.

    Raises: ConfigError: there is no such class, or it is not an `Environment`; and what its constructor raises.
    """
    kind = find_environment(config.use)
    return kind(config, data, ground_truth=ground_truth, name=name)


def find_environment(use: str) -> type[Environment]:
    """The class that ``environment.use`` names. Raises: as `make_environment`."""
    kind = find_component("environment.use", use, ENVIRONMENTS)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"environment.use={use!r}: not a subclass of draco_ray.environments.base.Environment")
    return kind


TIMEOUT_FACTOR = 1.5
"""Multiple of ``environment.cell_timeout_seconds`` after which an action is abandoned. Above 1, so that an environment
that enforces the limit itself can stop the action first, with a better message."""


class GuardedWorld:
    """A world whose unexpected errors and hangs become crashes, so that they cost a rollout and never the run."""

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
            async with asyncio.timeout(TIMEOUT_FACTOR * self._timeout_seconds):
                seen = await self._world.act(action)
        except Exception as error:
            raise to_environment_crash(self._name, self._world.task.task_id, error) from error
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
            raise to_environment_crash(self._name, self._world.task.task_id, error) from error

    async def keep(self, folder: Path) -> None:
        """Let the world store files of the episode in ``folder``, which does not exist yet.

        Does nothing if the world has no method ``keep``. Raises: OSError.
        """
        if (keep := getattr(self._world, "keep", None)) is not None:
            await keep(folder)

    async def close(self) -> None:
        """See `World`. Raises: EnvironmentCrashed."""
        try:
            await self._world.close()
        except Exception as error:
            raise to_environment_crash(self._name, self._world.task.task_id, error) from error


def to_environment_crash(name: str, task_id: str, error: Exception) -> EnvironmentCrashed:
    """``error`` as an `EnvironmentCrashed`; unchanged if it already is one."""
    if isinstance(error, EnvironmentCrashed):
        return error
    said = " ".join(str(error).split())[:500]
    return EnvironmentCrashed(f"environment {name}: task {task_id}: {type(error).__name__}: {said}")

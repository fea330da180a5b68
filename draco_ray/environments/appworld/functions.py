"""AppWorld with function calling instead of code, like its other published agents: each API is a tool.

The schemas, named ``app__api``, are from AppWorld's data (``api_docs/function_calling``). A call is run as a line of
code in AppWorld's session, so worlds, jail and evaluator are those of the code agent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from draco_ray.config.schema import ConfigSection, DataConfig, EnvironmentConfig
from draco_ray.environments.appworld.environment import FAILED_PREFIX, AppWorldEnvironment
from draco_ray.environments.base import World, WorldVerdict, checked_options, termination_if_stopped
from draco_ray.environments.tools.environment import described
from draco_ray.errors import ConfigError, WorldError
from draco_ray.records import Task, Termination, Trajectory

MAX_DESCRIBED_TOOLS = 40
"""Maximum number of tools whose schemas the judge sees; if there are more, it only sees their names."""
_HOW_AGENTS_ACT = """\
- The agent acts by calling the APIs of apps as functions, named app__api. Several calls of a turn are \
one step, and its last message is one. How the calls are spelled is the model's own form, and no criterion may \
punish it.
- A call that fails is answered with `error: ...`, which the agent sees and may mend.
- Calling supervisor__complete_task leaves the episode open; it is over once the agent sends a turn without a call. \
Nobody may hold against it that there is such a turn."""


class FunctionsOptions(ConfigSection):
    """``environment.options`` of ``environment.use: appworld_functions``."""

    apps: tuple[str, ...] = ()
    """Apps whose APIs are offered besides the supervisor's; empty: all except ``api_docs``, which the schemas
    replace."""


class AppWorldFunctions(AppWorldEnvironment):
    """``environment.use: appworld_functions``. An action is one call, ``{"name": ..., "arguments": {...}}`` in JSON."""

    agent_prompt: ClassVar[Path] = Path("prompts/agent_functions.txt")
    static_rubric = None  # type: ignore[assignment]

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        self._options = checked_options(FunctionsOptions, config.options)
        super().__init__(config, data, ground_truth=ground_truth, name=name)

    @property
    def facts(self) -> str:  # type: ignore[override]
        """Facts for the judge: how agents act, and which functions they can call."""
        schemas = self._functions.values()
        told = [f"- Functions: {', '.join(self._functions)}"]
        if len(schemas) <= MAX_DESCRIBED_TOOLS:
            told = [described(each) for each in schemas]
        return "\n".join([_HOW_AGENTS_ACT, *told])

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        return replace(super().task(task_id), tools=json.dumps(list(self._functions.values())))

    async def open(self, task_id: str) -> World:
        """See `Environment`."""
        world = await super().open(task_id)
        return FunctionWorld(world, replace(world.task, tools=self.task(task_id).tools), self._functions)

    def termination(self, trajectory: Trajectory) -> Termination:
        """See `Environment`."""
        stopped = termination_if_stopped(trajectory.ended)
        if stopped in (Termination.SERVER_ERROR, Termination.CRASHED):
            return stopped
        for step in reversed(trajectory.steps):
            action = step.action or ""
            if "supervisor__complete_task" in action and "error: " not in (step.observation or ""):
                gave_up = '"status": "fail"' in action
                return Termination.GAVE_UP if gave_up else Termination.SUBMITTED
        return stopped or (Termination.GAVE_UP if trajectory.acted else Termination.NO_ACTION)

    @functools.cached_property
    def _functions(self) -> Mapping[str, dict[str, Any]]:
        """Schemas by name."""
        folder = self.data.root / "data" / "api_docs" / "function_calling"
        known = sorted(path.stem for path in folder.glob("*.json"))
        if not known:
            raise WorldError(f"{folder}: no API documents for function calling; expected AppWorld's data")
        if unknown := [app for app in self._options.apps if app not in known]:
            raise ConfigError(
                f"environment.options.apps: unknown app {unknown[0]!r}; expected one of {', '.join(known)}"
            )
        apps = dict.fromkeys(["supervisor", *self._options.apps] if self._options.apps else known)
        found = {}
        for app in apps:
            if app == "api_docs" and app not in self._options.apps:
                continue
            for schema in _schemas(folder / f"{app}.json"):
                found[schema["function"]["name"]] = schema
        return found


class FunctionWorld:
    """An open task whose actions are calls."""

    def __init__(self, world: World, task: Task, functions: Mapping[str, Any]) -> None:
        self._world, self.task, self._functions = world, task, functions

    async def act(self, action: str) -> str:
        """Make a call. Returns: the API's result as JSON, or ``error: ...``."""
        call = json.loads(action)
        name, arguments = call["name"], call["arguments"]
        if name not in self._functions:
            return f"error: {name}: no such function"
        app, _, api = name.partition("__")
        # Safe as code: the name is a known one, and the arguments are a Python literal.
        code = f"import json\nprint(json.dumps(apis.{app}.{api}(**{arguments!r}), ensure_ascii=False))"
        output = await self._world.act(code)
        if not output.lstrip().startswith(FAILED_PREFIX):
            return output.rstrip("\n")
        last = [line.strip() for line in output.strip().splitlines() if line.strip()][-1]
        return f"error: {name}: {last.removeprefix('Exception: ')}"

    async def evaluate(self) -> WorldVerdict:
        """See `World`."""
        return await self._world.evaluate()

    async def close(self) -> None:
        """See `World`."""
        await self._world.close()


def _schemas(file: Path) -> list[dict[str, Any]]:
    """A file's function schemas, without other fields of its entries."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return [{"type": "function", "function": entry["function"]} for entry in entries if entry["function"]["name"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorldError(f"{file}: cannot be read as API documents for function calling ({error!r})") from None

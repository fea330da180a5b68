"""The environment ``tools``: JSONL tasks, and tools that run in the jail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import Environment, WorldVerdict, list_items
from draco_ray.environments.tools.functions import LONGEST_ERROR
from draco_ray.environments.tools.mcp_servers import McpSession, merge_tool_schemas
from draco_ray.environments.tools.options import ToolsOptions, read_options
from draco_ray.environments.tools.process import HARD_STOP, CommandProcess, FunctionProcess
from draco_ray.environments.tools.rows import Rows, read_rows
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldBroken, WorldError
from draco_ray.records import Task

SHORTEST_SECRET = 4
"""Minimum length of a secret in characters; hiding a shorter one would hide parts of words."""

MAX_DEPTH = 100
"""Maximum nesting of a call's arguments, since checking and encoding them recurses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of an environment."""

    tools: str
    """The tools' schemas as a JSON array."""
    evaluates: bool


class ToolsEnvironment(Environment):
    """``environment.use: tools``; see `ToolsOptions` for its options, and docs/own-agent.md.

    An action is one call as JSON: ``{"name": ..., "arguments": {...}}`` (`draco_ray.rollout.tool_agent`).
    """

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        self._options = read_options(config.options)
        self._process: FunctionProcess | None = None
        self._open: ToolWorld | None = None
        self._mcp_processes: dict[str, CommandProcess] = {}

    @property
    def facts(self) -> str:  # type: ignore[override]
        """Facts for the judge: how agents act, the tools, and ``environment.options.facts``."""
        return "\n".join(
            [*_HOW_AGENTS_ACT, *map(described, json.loads(self._offer.tools)), *list_items(self._options.facts)]
        )

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        """Whether a tools file defines ``evaluate``."""
        return self._offer.evaluates

    def tasks(self, split: str) -> list[str]:
        """See `Environment`."""
        return self._rows.of_split(split)

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        return self._rows.row(task_id).task(self._offer.tools)

    def expected(self, task_id: str) -> str:
        """See `Environment`."""
        return self._rows.row(task_id).expected

    async def open(self, task_id: str) -> ToolWorld:
        """See `Environment`."""
        task = self.task(task_id)
        if self._open is not None:
            await self._open.close()
        process = await self.begin(task_id)
        sessions = _sessions(self._options, self.config, self._secrets, self._mcp_processes)
        try:
            owners = {
                schema["function"]["name"]: session
                for session, schemas in zip(sessions, await _started(sessions), strict=True)
                for schema in schemas
            }
        except EnvironmentCrashed as error:
            await self.stop()
            raise self.without_secrets_in(error) from error
        self._open = ToolWorld(self, process, task, owners, sessions)
        return self._open

    async def begin(self, task_id: str) -> FunctionProcess:
        """Fork a process for a task and run ``reset`` in it. Raises: EnvironmentCrashed."""
        if self._process is None or not self._process.alive:
            await self.stop()
            self._process = await FunctionProcess.start(self._options, self.config, self._secrets)
        process, order = self._process, {"do": "reset", "task": self._rows.row(task_id).told(ground_truth=False)}
        try:
            await process.fork()
            # Twice the time, so that the process itself reports a slow `reset` first.
            answer = await process.ask(order, "reset", 2 * self.config.start_timeout_seconds)
        except EnvironmentCrashed as error:
            answer = {"failed": str(error)}
        if "failed" in answer:
            await self.stop()
            failed = self.without_secrets(answer["failed"])
            raise EnvironmentCrashed(f"environment {self.name}: task {task_id}: cannot be started: {failed}")
        return process

    async def evaluate(self, task_id: str, process: FunctionProcess) -> WorldVerdict:
        """The verdict of ``evaluate`` on the world of the last forked process; that process is ended.

        Raises: EnvironmentCrashed; WorldError: ``evaluate`` returned neither a bool nor a mapping to bools.
        """
        # Twice the time, so that the process itself reports a slow hook first.
        seconds = 2 * self.config.start_timeout_seconds
        # Only the evaluating process parses the end state, which the policy may have influenced.
        end_state = await process.ask_unread({"do": "end_state"}, "end_state", seconds)
        await process.fork()
        task = self._rows.row(task_id).told(ground_truth=True)
        order = {"do": "evaluate", "task": task, "end_state": end_state.decode("utf-8", "replace")}
        answer = await process.ask(order, "evaluate", seconds)
        if "evaluated" not in answer:
            raise EnvironmentCrashed(
                str(answer.get("failed", "the reply of evaluate cannot be parsed"))[:LONGEST_ERROR]
            )
        return _verdict(task_id, answer["evaluated"])

    async def end_task(self) -> None:
        """End the process of a task; also the server if anything went wrong."""
        self._open, process = None, self._process
        if process is None:
            return
        with contextlib.suppress(EnvironmentCrashed):
            await process.end()
        if not process.alive:
            self._process = None
            await process.kill()

    async def stop(self) -> None:
        """See `Environment`."""
        process, world, self._process, self._open = self._process, self._open, None, None
        if world is not None:
            await world.end_sessions()
        for each in (process, *self._mcp_processes.values()):
            if each is not None:
                await each.kill()
        self._mcp_processes.clear()

    def without_secrets(self, text: str) -> str:
        """``text`` with the values of secrets hidden, also as escaped in JSON and URLs."""
        for name, spelled in self._spellings:
            text = text.replace(spelled, f"[secret {name}]")
        return text

    def without_half_a_secret(self, text: str) -> str:
        """Remove from the end of a truncated text what may be the beginning of a secret."""
        for _, spelled in self._spellings:
            lengths = range(len(spelled) - 1, SHORTEST_SECRET - 1, -1)
            begun = (length for length in lengths if text.endswith(spelled[:length]))
            text = text[: len(text) - next(begun, 0)]
        return text

    def without_secrets_in(self, error: EnvironmentCrashed) -> EnvironmentCrashed:
        """The error with secrets hidden; its message may quote output of an MCP server."""
        return type(error)(self.without_secrets(str(error)))

    @functools.cached_property
    def _rows(self) -> Rows:
        return read_rows(self._options.tasks or str(self.data.root / "tasks.jsonl"))

    @functools.cached_property
    def _offer(self) -> OfferedTools:
        try:
            offer = _offers(self._options, self.config, self._secrets)
        except EnvironmentCrashed as error:
            raise self.without_secrets_in(error) from error
        # A parameter's default may be a secret.
        return replace(offer, tools=self.without_secrets(offer.tools))

    @functools.cached_property
    def _spellings(self) -> list[tuple[str, str]]:
        """(name, escaped or plain value) of each secret."""
        quoted = (urllib.parse.quote, urllib.parse.quote_plus)
        return [
            (name, spelled)
            for name, value in self._secrets.items()
            for spelled in dict.fromkeys((value, json.dumps(value)[1:-1], *(quote(value) for quote in quoted)))
        ]

    @functools.cached_property
    def _secrets(self) -> dict[str, str]:
        missing = [name for name in self._options.secrets if len(os.environ.get(name, "")) < SHORTEST_SECRET]
        if missing:
            raise ConfigError(
                f"environment.options.secrets: set {', '.join(missing)} in the environment, to at least "
                f"{SHORTEST_SECRET} characters"
            )
        return {name: os.environ[name] for name in self._options.secrets}


class ToolWorld:
    """One open task."""

    def __init__(
        self,
        environment: ToolsEnvironment,
        process: FunctionProcess,
        task: Task,
        owners: Mapping[str, McpSession],
        sessions: Sequence[McpSession],
    ) -> None:
        """``owners``: MCP session of each tool name; other tools are functions."""
        self.task = task
        self._environment = environment
        self._process = process
        self._owners = owners
        self._sessions = sessions
        self._names = {each["function"]["name"] for each in process.tools} | set(owners)
        self._where = f"environment {environment.name}: task {task.task_id}"
        self._over = False

    async def act(self, action: str) -> str:
        """Make one call. Raises: WorldBroken: the tool ended or blocked its process, or its server is lost."""
        try:
            call = json.loads(action)
        except RecursionError:
            return "error: the arguments are nested too deeply"
        name, limit = call["name"], HARD_STOP * self._environment.config.cell_timeout_seconds
        if name not in self._names:
            return f"error: there is no tool {name!r}; there are {', '.join(sorted(self._names))}"
        if _deeper(call["arguments"], MAX_DEPTH):
            return f"error: {name}: the arguments are nested too deeply"
        if self._over:
            raise WorldBroken(f"{self._where}: the episode has ended")
        over_at = asyncio.get_running_loop().time() + limit
        try:
            if name in self._owners:
                async with asyncio.timeout(limit):
                    return self._told(await self._owners[name].call(name, call["arguments"]))
            order = {"do": "call", "name": name, "arguments": call["arguments"]}
            match await self._process.ask(order, f"tool {name}", limit):
                case {"text": str(text), "length": int(length)} if length >= len(text):
                    return self._told(text, length)
            raise EnvironmentCrashed(f"the reply of tool {name} cannot be parsed")
        except (TimeoutError, asyncio.CancelledError) as error:
            # If this event loop was blocked, the caller's timeout may fire together with this call's timeout.
            if isinstance(error, asyncio.CancelledError) and asyncio.get_running_loop().time() < over_at:
                raise
            raise self._broken(f"tool {name} could not be stopped after its time limit of {limit:g} s") from None
        except EnvironmentCrashed as error:
            raise self._broken(error) from error

    def _broken(self, reason: object) -> WorldBroken:
        """The error for a lost world. The policy is always held responsible; otherwise it could get a second try by
        crashing its world."""
        self._over = self._process.irregular = True
        return WorldBroken(f"{self._where}: {self._environment.without_secrets(str(reason))}")

    def _told(self, text: str, length: int | None = None) -> str:
        """A result without secrets, truncated; ``length``: its full length if it has already been truncated."""
        length = len(text) if length is None else length
        text = text[: self._environment.config.max_output_bytes]
        # The text of an error may already have been truncated by the code that made it.
        if length > len(text) or text.startswith("error: "):
            text = self._environment.without_half_a_secret(text)
        more, text = length - len(text), self._environment.without_secrets(text)
        return f"{text}\n[output cut: {more} more characters]" if more > 0 else text

    async def end_sessions(self) -> None:
        """End the MCP sessions."""
        await asyncio.gather(*(session.stop() for session in self._sessions))

    async def evaluate(self) -> WorldVerdict:
        """Evaluate the task with the function ``evaluate`` of a tools file. Raises: see `World.evaluate`."""
        environment, task_id = self._environment, self.task.task_id
        if not environment.ground_truth or "evaluate" not in self._process.hooks:
            raise WorldError(f"task {task_id}: the environment was opened without ground truth, or has no evaluate()")
        if self._over:
            raise WorldBroken(f"{self._where}: the episode has ended")
        self._over = True
        try:
            return await environment.evaluate(task_id, self._process)
        except (EnvironmentCrashed, WorldError) as error:
            broken = self._broken(error)
        # Evaluate an untouched world too: if that fails as well, the policy is not responsible.
        try:
            process = await environment.begin(task_id)
        except EnvironmentCrashed:
            raise broken from None
        try:
            await environment.evaluate(task_id, process)
        except EnvironmentCrashed as error:
            said = environment.without_secrets(str(error))
            raise EnvironmentCrashed(
                f"{self._where}: the evaluator also fails on an untouched task, before any tool call: {said}"
            ) from None
        raise broken

    async def close(self) -> None:
        """End the task's process and the MCP sessions."""
        self._over = True
        await self.end_sessions()
        await self._environment.end_task()


def _verdict(task_id: str, said: Any) -> WorldVerdict:
    """The verdict of ``evaluate``: a bool, or a mapping of requirements to bools."""
    if isinstance(said, bool):
        said = {"evaluate": said}
    if not isinstance(said, dict) or not said or not all(isinstance(met, bool) for met in said.values()):
        raise WorldError(
            f"task {task_id}: evaluate returned {str(said)[:100]!r}, expected True, False, or a mapping of names to "
            "True or False"
        )
    failures = tuple(name for name, met in said.items() if not met)
    return WorldVerdict(
        success=not failures, passed_tests=len(said) - len(failures), total_tests=len(said), failures=failures
    )


def _deeper(value: object, limit: int) -> bool:
    """Whether lists and mappings are nested in more than ``limit`` levels."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            part
            for each in level
            if isinstance(each, list | dict)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


_HOW_AGENTS_ACT = (
    "- The agent acts by calling tools. Several calls of a turn are one step, made in the order in which they are "
    "written, and what each returned follows. How the calls are spelled is the model's own form, and no criterion may "
    "punish it.",
    "- A call that fails or cannot be read is answered with `error: ...`, which the agent sees and may mend.",
    "- The episode is over once the agent sends a turn without a call. That is what it says to whom it serves, and a "
    "step too.",
)


def described(tool: Mapping[str, Any]) -> str:
    """A tool as a fact for the judge: name, parameters with types, description.

    >>> described({"function": {"name": "add", "description": "Adds.", "parameters": {
    ...     "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "description": "second"}},
    ...     "required": ["a"]}}})
    '- Tool `add(a: integer, b?: integer)`: Adds. b: second'
    """
    function = tool["function"]
    # Schemas of MCP servers may be malformed.
    schema = _mapping(function.get("parameters"))
    parameters, kinds = _mapping(schema.get("properties")), _mapping(schema.get("$defs"))
    required = _list(schema.get("required"))
    listed = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type(each, kinds)}" for name, each in parameters.items()
    )
    said = [
        f"{name}: {' '.join(str(each['description']).split())}"
        for name, each in parameters.items()
        if isinstance(each, Mapping) and each.get("description")
    ]
    description = " ".join(str(function.get("description") or "").split())
    return f"- Tool `{function['name']}({listed})`: {' '.join([description, '; '.join(said)]).strip()}"


def _type(schema: Any, kinds: Mapping[str, Any]) -> str:
    """A type in words; ``kinds``: the schema's definitions. Enums among them are expanded, objects are only named."""
    if not isinstance(schema, Mapping):
        return "any"
    name = str(schema.get("$ref", "any")).rpartition("/")[2]
    named = kinds.get(name)
    if isinstance(named, Mapping) and "enum" in named:
        schema = named
    if values := _list(schema.get("enum")):
        return " | ".join(map(json.dumps, values))
    if several := _list(schema.get("anyOf")):
        return " | ".join(_type(each, kinds) for each in several)
    return str(schema.get("type", name))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_known: dict[str, OfferedTools] = {}


def _offers(options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str]) -> OfferedTools:
    """The offered tools; starts tools files and MCP servers once to list them. Raises: as `FunctionProcess.start`."""
    files = [(str(path), path.stat().st_mtime_ns) for path in options.tools]
    key = json.dumps([options.model_dump(mode="json"), files, config.isolation, sorted(secrets)])
    if key not in _known:
        # In a new thread, because this one may already run an event loop.
        with ThreadPoolExecutor(1) as elsewhere:
            _known[key] = elsewhere.submit(asyncio.run, _ask_offer(options, config, secrets)).result()
    return _known[key]


async def _ask_offer(options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str]) -> OfferedTools:
    process = await FunctionProcess.start(options, config, secrets)
    mcp_processes: dict[str, CommandProcess] = {}
    sessions = _sessions(options, config, secrets, mcp_processes)
    try:
        schemas = await _started(sessions)
        tools = merge_tool_schemas(
            process.tools, {each.name: found for each, found in zip(sessions, schemas, strict=True)}
        )
        if not tools:
            raise ConfigError("environment.options: the files in tools and the servers in mcp have no tool")
        return OfferedTools(tools=json.dumps(tools), evaluates="evaluate" in process.hooks)
    finally:
        await asyncio.gather(*(session.stop() for session in sessions))
        await asyncio.gather(*(each.kill() for each in (process, *mcp_processes.values())))


def _sessions(
    options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str], processes: dict[str, CommandProcess]
) -> list[McpSession]:
    return [McpSession(name, options, config, secrets, processes) for name in options.mcp]


async def _started(sessions: Sequence[McpSession]) -> list[list[dict[str, Any]]]:
    """Start every session and return its tools; if one fails, stop all. Raises: EnvironmentCrashed."""
    found = await asyncio.gather(*(session.start() for session in sessions), return_exceptions=True)
    schemas = []
    for each in found:
        if isinstance(each, BaseException):
            await asyncio.gather(*(session.stop() for session in sessions))
            raise each
        schemas.append(each)
    return schemas

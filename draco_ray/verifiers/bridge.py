"""Bridge between this package and verifiers; run as a file by the Python of verifiers' virtual environment.

    python bridge.py tasks            # list the tasks
    python bridge.py serve FOLDER     # play episodes, one per connection to the socket FOLDER/episodes

Standard input contains the options, a line of JSON; standard output gets one JSON object (from ``serve`` as soon as it
is ready), whose ``error`` is one line for the user. ``serve`` ends when standard input is closed.

Of a task's data the bridge sends only the prompt to the host. Without ``truth``, no reward function runs, and any
rewards that verifiers computes nevertheless are dropped here.

Imports only the standard library until verifiers is known to be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SUPPORTED_VERSION = "0.4"
"""Prefix of the supported versions of verifiers."""
MOST_TASKS = 10_000
"""Maximum number of tasks of a split."""
HELD_OUT = 50
"""Maximum number of tasks of the default split ``dev``, which is a fifth of a small taskset."""
UNBOUNDED = 1000
"""Number of tasks of the default split ``train`` of an infinite taskset."""
_END_SECONDS = 10.0
"""Maximum time, in seconds, for ending episodes and the processes that verifiers has started."""


class UnusableTaskset(Exception):
    """The taskset or environment cannot be used; the message is one line for the user."""


# --------------------------------------------------------------------------------------------- tasks and environment


class LoadedEnvironment:
    """The configured environment with its taskset, and the tasks by id."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Load taskset and environment. Raises: UnusableTaskset."""
        self.options = options
        path = list(options["path"])
        taskset = str(options["taskset"].get("id", ""))
        if taskset.endswith(".py"):
            path.append(str(Path(taskset).resolve().parent))
        sys.path[:0] = path
        # verifiers starts tool servers as modules, which need this path.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")]))
        _check_version()
        self.config = _environment(options)
        from verifiers.v1.utils.loaders import load_environment

        with _said(f"taskset {self.config.taskset.id!r}"):
            self.env = load_environment(self.config)
            self.splits = dict(_splits(self.env.taskset, options["splits"]))
        self.ids = _ids({task.data.idx: task for tasks in self.splits.values() for task in tasks}.values())
        self.tasks = {self.ids[task.data.idx]: task for tasks in self.splits.values() for task in tasks}

    def told(self) -> dict[str, Any]:
        """The listing for the host, with only the prompt of each task."""
        from verifiers.v1.envs.single_agent import SingleAgentEnv

        first = next(iter(self.tasks.values()), None)
        scored = first is not None and bool(first.hooks("reward") or first.plugged_judges())
        return {
            "splits": {name: [self.ids[task.data.idx] for task in tasks] for name, tasks in self.splits.items()},
            "tasks": {name: _instruction(task.data) for name, task in self.tasks.items()},
            "rewarded": scored or not isinstance(self.env, SingleAgentEnv),
            "tools": self._tools_from(),
        }

    def _tools_from(self) -> str | None:
        """The taskset or harness that offers tools to the policy; None if that is unknown before playing."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import harness_class

        config, taskset = self.config, f"taskset {self.config.taskset.id!r}"
        with _said(taskset):
            kind = type(self.env.taskset)
            served = kind.toolsets(config.taskset) or kind.task_type().toolsets(config.taskset.task)
        harnesses = config.agent_harnesses()
        for role, spec in agent_config_fields(config).items():
            harness = harness_class(harnesses[role].id)
            # A harness that ignores the taskset's tools may parse actions from text.
            if spec.model is None and spec.client is None and harness.SUPPORTS_MCP:
                if served:
                    return taskset
                if harness.EXECUTES_CODE:
                    return f"harness {harnesses[role].id!r}"
        return None


def _check_version() -> None:
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise UnusableTaskset(f"verifiers is not installed for {sys.executable}; run `make setup-verifiers`") from None
    if not re.match(re.escape(SUPPORTED_VERSION) + r"(\.|$)", version):
        raise UnusableTaskset(f"verifiers {version} is installed for {sys.executable}; expected {SUPPORTED_VERSION}.*")


def _environment(options: dict[str, Any]) -> Any:
    """The environment's configuration. Raises: UnusableTaskset."""
    from verifiers.v1.utils.loaders import resolve_env_config, taskset_class

    taskset = options["taskset"]
    name = taskset.get("id")
    if not isinstance(name, str) or not name:
        raise UnusableTaskset("environment.options.taskset.id: expected the name of an installed taskset, or ./file.py")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UnusableTaskset(f"taskset {name}: no such file")
        name = Path(name).stem
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    try:
        taskset_class(name)
    except ModuleNotFoundError as error:
        # verifiers raises the same error for a missing taskset and for one that lacks a module; the cause differs.
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        if missing.name in (None, module, f"verifiers.v1.tasksets.{module}"):
            raise UnusableTaskset(
                f"taskset {name!r} is not installed; install its package with {sys.executable} -m pip, or give a "
                "file, ./my_taskset.py"
            ) from None
        raise UnusableTaskset(_lacking(name, missing)) from None
    except ImportError as error:
        raise UnusableTaskset(_lacking(name, error)) from None
    except Exception as error:
        raise UnusableTaskset(f"taskset {name!r}: {_line(error)}") from None
    for role in options["env"].values():
        # YAML's null stands for verifiers' harness called "null".
        if isinstance(role, dict) and isinstance(role.get("harness"), dict) and role["harness"].get("id", "") is None:
            role["harness"]["id"] = "null"
    with _said(f"taskset {name!r}: its configuration"):
        data = {**options["env"], "taskset": {**taskset, "id": name}}
        config = resolve_env_config(data)
        return _with_runtimes(config, data)


def _with_runtimes(config: Any, data: dict[str, Any]) -> Any:
    """Set a local runtime for harnesses that never run programs of the policy.

    Raises: UnusableTaskset: a harness lets the policy run programs, and no runtime is configured.
    """
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class, task_type

    unset = AgentConfig().runtime
    harnesses = config.agent_harnesses()
    for role, spec in agent_config_fields(config).items():
        told = data.get(role)
        if spec.runtime != unset or (isinstance(told, dict) and told.get("runtime")):
            continue
        harness = harnesses[role].id
        if harness_class(harness).EXECUTES_CODE or task_type(config.taskset.id).NEEDS_CONTAINER:
            key = f"environment.options.env.{role}"
            raise UnusableTaskset(
                f"taskset {config.taskset.id!r}: harness {harness!r} lets the policy run programs, or the tasks need "
                f"a container; set {key}.runtime.type=docker (or prime, modal, ...; subprocess runs on this machine "
                f"without isolation), or {key}.harness.id=null, which runs no programs"
            )
        spec.runtime = SubprocessConfig()
    return config


def _splits(taskset: Any, named: dict[str, dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """(name, tasks) of each split: the configured ones, or by default ``dev`` and ``train``."""
    from verifiers.v1.configs.select import SelectConfig

    for name, selected in named.items():
        yield name, list(itertools.islice(taskset.select(SelectConfig.model_validate(selected)), MOST_TASKS))
    if named:
        return
    most = MOST_TASKS if taskset.bounded else HELD_OUT + UNBOUNDED
    tasks = list(itertools.islice(taskset, most))
    held_out = min(HELD_OUT, len(tasks) // 5)
    yield "train", tasks[held_out:]
    yield "dev", tasks[:held_out]


def _ids(tasks: Any) -> dict[int, str]:
    """Position of a task -> its id: its own id or name, followed by the position if it is not unique."""
    names: dict[int, str] = {}
    for task in tasks:
        own = str(task.data.id or task.data.name or task.data.idx)
        names[task.data.idx] = re.sub(r"[^A-Za-z0-9._#-]+", "-", own)[:80] or str(task.data.idx)
    seen: dict[str, int] = {}
    for name in names.values():
        seen[name] = seen.get(name, 0) + 1
    return {idx: name if seen[name] == 1 else f"{name}-{idx}" for idx, name in names.items()}


def _instruction(data: Any) -> str:
    """The task's prompt as text, if it has one."""
    untold = f"Task {data.name or data.idx}: the environment says what is to be done as it begins."
    told = [data.system_prompt or "", data.prompt_text or data.description or untold]
    return "\n\n".join(filter(None, told))


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Turn errors of user code into one line about ``what``."""
    try:
        yield
    except UnusableTaskset:
        raise
    except ImportError as error:
        raise UnusableTaskset(_lacking(what, error)) from None
    except Exception as error:
        raise UnusableTaskset(f"{what}: {_line(error)}") from None


def _lacking(what: str, error: ImportError) -> str:
    what = what if what.startswith("taskset") else f"taskset {what!r}"
    return f"{what}: required packages are missing: {_line(error)}; install them with {sys.executable} -m pip"


def _line(error: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


# --------------------------------------------------------------------------------------------------------- scripts


def _run_scripts_here(folder: Path) -> None:
    """Run scripts in local processes with this Python if their requirements are installed.

    verifiers would let uv download the requirements when the first rollout begins. This uses the locked versions and
    needs no network.
    """
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    fetched = SubprocessRuntime.prepare_uv_script

    async def prepare(
        self: Any, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        data = script.encode() if isinstance(script, str) else script
        if not _installed(data.decode("utf-8", "replace")):
            return list(await fetched(self, script, env, activate=activate))
        file = folder / f"{hashlib.sha256(data).hexdigest()}.py"
        if not file.exists():
            file.write_bytes(data)
        return [sys.executable, str(file)]

    SubprocessRuntime.prepare_uv_script = prepare


def _installed(script: str) -> bool:
    """Whether this Python meets all requirements in a script's header (PEP 723)."""
    import tomllib

    from packaging.requirements import InvalidRequirement, Requirement

    block = re.search(r"(?m)^# /// script\n((?:#(?: .*)?\n)+?)# ///$", script)
    if block is None:
        return True
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in block[1].splitlines())
    try:
        for each in tomllib.loads("\n".join(lines)).get("dependencies", []):
            requirement = Requirement(each)
            if not requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True):
                return False
    except (tomllib.TOMLDecodeError, InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False
    return True


# --------------------------------------------------------------------------------------------------------- episodes


class Player:
    """Plays episodes in verifiers' environment."""

    def __init__(self, found: LoadedEnvironment) -> None:
        """``found``: the environment; it must be serving while episodes are played."""
        from verifiers.v1.task import Task

        self._found, self._truth = found, bool(found.options["truth"])
        if not self._truth:
            # Set on the class, so that it also holds for tasks that an environment makes while it plays.
            Task.scoring_deferred = True
        self.running: set[asyncio.Task[Any]] = set()
        """Episodes that are running or being ended."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Play the episode that a connection requests, until it ends or the connection is closed."""
        answering = asyncio.create_task(self._answer(json.loads(await reader.readline())))
        hung_up = asyncio.create_task(reader.read())
        await asyncio.wait({answering, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done() and not answering.cancelled():
            writer.write(json.dumps(answering.result()).encode())
        answering.cancel()
        writer.close()

    async def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._play(order)
        except UnusableTaskset as error:
            return {"unusable": str(error)}
        except Exception as error:
            return {"lost": _line(error)}

    async def _play(self, order: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        task = self._found.tasks.get(order["task"])
        if task is None:
            raise LookupError(f"no task {order['task']!r}")
        # Episodes differ only in the model, so verifiers uses the same connections for all of them.
        client = EvalClientConfig(base_url=order["base_url"], api_key_var="DRACO_NO_KEY")
        sampling = SamplingConfig.model_validate(self._found.options["sampling"])
        (slot,) = self._found.env.slots(task)
        context = ModelContext(model=order["model"], client=client, sampling=sampling)
        playing = asyncio.create_task(self._found.env.run_slot(slot, context))
        self.running.add(playing)
        playing.add_done_callback(self.running.discard)
        try:
            await asyncio.wait({playing}, timeout=order["seconds"])
            if not playing.done():
                return self._record(slot.traces, [], timeout=True)
        finally:
            playing.cancel()
        episode = playing.result()
        self._check_usable(episode)
        return self._record(episode.traces, episode.errors, timeout=episode.is_timeout)

    def _check_usable(self, episode: Any) -> None:
        """Raises: UnusableTaskset: the episode failed before its first message, and would fail so in every retry."""
        if any(node.sampled for trace in episode.traces for node in trace.nodes):
            return
        taskset = self._found.options["taskset"]["id"]
        for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            # The package verifiers formats errors of its own process like this; the output of programs looks different.
            if missing := re.search(r": ModuleNotFoundError: (No module named [^\n]*)$", error.message):
                raise UnusableTaskset(_lacking(f"taskset {taskset!r}", ModuleNotFoundError(missing[1])))
            # This is how the endpoint reports a chat template without tools.
            if refused := re.search(r"the chat template of [^\n]* does not support tools [^\n\"]*", error.message):
                raise UnusableTaskset(f"taskset {taskset!r} gives tools to the policy, but {refused[0]}")

    def _record(self, traces: list[Any], errors: list[Any], *, timeout: bool) -> dict[str, Any]:
        """The record of an episode; with rewards only if requested."""
        ours = [trace for trace in traces if trace.agent.trainable]
        told: dict[str, Any] = {
            "timeout": timeout,
            "errors": [_error(error) for error in errors],
            "traces": [_trace(trace) for trace in traces],
        }
        if self._truth:
            given = [trace.reward for trace in ours if any(each is not None for each in trace.rewards.values())]
            told["reward"] = sum(given) / len(given) if given else None
        return told


def _error(error: Any) -> dict[str, str]:
    return {"type": error.type, "message": " ".join(error.message.split())[-500:]}


def _trace(trace: Any) -> dict[str, Any]:
    return {
        "id": trace.id,
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "stop": trace.stop_condition,
        "errors": [_error(error) for error in trace.errors],
        "said": [_message(node) for node in trace.nodes if node.sampled],
    }


def _message(node: Any) -> dict[str, Any]:
    """When a sampled message was received, and the message in the form of chat completions."""
    from verifiers.v1.types import content_text

    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in node.message.tool_calls or ()]
    return {"at": node.timestamp, "message": {"content": content_text(node.message.content), "tool_calls": calls}}


# ------------------------------------------------------------------------------------------------------------- main


async def serve(found: LoadedEnvironment, folder: Path, ready: Callable[[], None]) -> None:
    """Play the episodes that are requested at the socket ``folder/episodes``, until cancelled."""
    _run_scripts_here(folder)
    player = Player(found)
    async with found.env.serving():
        # Many slots may connect while a task's code keeps this process busy.
        await asyncio.start_unix_server(player.connected, folder / "episodes", backlog=socket.SOMAXCONN)
        ready()
        try:
            await asyncio.Event().wait()
        finally:
            for episode in player.running:
                episode.cancel()
            await asyncio.gather(*player.running, return_exceptions=True)


def _end_with(control: int) -> None:
    """Interrupt this process when the host closes ``control`` or dies; exit after 10 s if a task's code blocks it."""
    os.read(control, 1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_END_SECONDS)
    os._exit(1)


def main() -> None:
    """Run the command in the arguments; see the module's docstring."""
    options = json.loads(sys.stdin.readline())
    control, out = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # A task's code must not read this stdin, and what it prints must not be mistaken for an answer on stdout.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # While modules are imported, little becomes garbage, and collecting it would take 20 % of the time.
    gc.disable()

    def answer(told: dict[str, Any]) -> None:
        out.write(json.dumps(told) + "\n")
        out.flush()

    try:
        if sys.argv[1] == "tasks":
            answer(LoadedEnvironment(options).told())
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=_end_with, args=[control], daemon=True).start()
            found = LoadedEnvironment(options)
            gc.freeze()
            gc.enable()
            asyncio.run(serve(found, Path(sys.argv[2]), lambda: answer({})))
    except UnusableTaskset as error:
        answer({"error": str(error)})
    except Exception as error:
        answer({"error": _line(error)})
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

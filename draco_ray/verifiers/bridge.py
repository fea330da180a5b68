"""Bridge between this package and verifiers; run as a file by the Python of verifiers' virtual environment.

    python bridge.py tasks            # list the tasks as JSON; options are read from standard input
    python bridge.py renderer         # fail if no renderer fits the model in the option ``tokenizer``
    python bridge.py serve FD         # play episodes ordered on the socket FD; one JSON object per line each way

The bridge starts verifiers' environment server in a separate process and uses it through verifiers' client. Of a task's
data it sends only the prompt to the host. Without ``truth``, no reward function runs, and any rewards that verifiers
computes nevertheless are dropped here.

Imports only the standard library until verifiers is known to be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draco_ray.verifiers.template_renderer import no_renderer, proven_renderer
else:
    # This file is run as a script, so its folder is on the path and this package is not.
    from template_renderer import no_renderer, proven_renderer

WANTED = "0.4"
"""Prefix of the supported versions of verifiers."""
MOST_TASKS = 10_000
"""Maximum number of tasks of a split."""
HELD_OUT = 50
"""Maximum tasks of the default split ``dev``, which is a fifth of a small taskset."""
UNBOUNDED = 1000
"""Tasks of the default split ``train`` of an infinite taskset."""
_LONGEST_LINE = 1 << 28
_END_SECONDS = 10.0


class Unusable(Exception):
    """The taskset, environment or renderer cannot be used; the message is one line for the user."""


# --------------------------------------------------------------------------------------------- tasks and environment


class Found:
    """The configured taskset and environment, and the tasks by id."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Load taskset and environment. Raises: Unusable."""
        self.options = options
        self.path = list(options["path"])
        """Folders with tasksets that are not installed."""
        taskset = str(options["taskset"].get("id", ""))
        if taskset.endswith(".py"):
            self.path.append(str(Path(taskset).resolve().parent))
        sys.path[:0] = self.path
        _check_version()
        self.config = _environment(options)
        from verifiers.v1.utils.loaders import load_taskset

        with _said(f"taskset {self.config.taskset.id!r}"):
            self.taskset = load_taskset(self.config.taskset)
            self.splits = dict(_splits(self.taskset, options["splits"]))
        self.ids = _ids({task.data.idx: task for tasks in self.splits.values() for task in tasks}.values())
        self.tasks = {self.ids[task.data.idx]: task for tasks in self.splits.values() for task in tasks}

    def told(self) -> dict[str, Any]:
        """The listing for the host, with only the prompt of each task."""
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.loaders import environment_class

        kind = environment_class(self.config.taskset.id, self.config.id)
        first = next(iter(self.tasks.values()), None)
        scored = first is not None and bool(first.hooks("reward") or first.plugged_judges())
        return {
            "splits": {name: [self.ids[task.data.idx] for task in tasks] for name, tasks in self.splits.items()},
            "tasks": {name: _instruction(task.data) for name, task in self.tasks.items()},
            "rewarded": scored or not issubclass(kind, SingleAgentEnv),
            "tools": self._tools_from(),
        }

    def _tools_from(self) -> str | None:
        """The taskset or harness that offers tools to the policy; None if that is unknown before playing."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import harness_class

        config, taskset = self.config, f"taskset {self.config.taskset.id!r}"
        with _said(taskset):
            kind = type(self.taskset)
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
        raise Unusable(f"verifiers is not installed for {sys.executable}; run `make setup-verifiers`") from None
    if not re.match(re.escape(WANTED) + r"(\.|$)", version):
        raise Unusable(f"verifiers {version} is installed for {sys.executable}; expected {WANTED}.*")


def _environment(options: dict[str, Any]) -> Any:
    """The environment's configuration. Raises: Unusable."""
    from verifiers.v1.utils.loaders import resolve_env_config, taskset_class

    taskset = options["taskset"]
    name = taskset.get("id")
    if not isinstance(name, str) or not name:
        raise Unusable("environment.options.taskset.id: expected the name of an installed taskset, or ./file.py")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise Unusable(f"taskset {name}: no such file")
        name = Path(name).stem
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    try:
        taskset_class(name)
    except ModuleNotFoundError as error:
        # verifiers raises the same error for a missing taskset and for one that lacks a module; the cause differs.
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        if missing.name in (None, module, f"verifiers.v1.tasksets.{module}"):
            raise Unusable(
                f"taskset {name!r} is not installed; install its package with {sys.executable} -m pip, or give a "
                "file, ./my_taskset.py"
            ) from None
        raise Unusable(_lacking(name, missing)) from None
    except ImportError as error:
        raise Unusable(_lacking(name, error)) from None
    except Exception as error:
        raise Unusable(f"taskset {name!r}: {_line(error)}") from None
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

    Raises: Unusable: a harness lets the policy run programs, and no runtime is configured.
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
            raise Unusable(
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
    """Position of a task -> its id: the taskset's id or name if unique, else the position."""
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
    except Unusable:
        raise
    except ImportError as error:
        raise Unusable(_lacking(what, error)) from None
    except Exception as error:
        raise Unusable(f"{what}: {_line(error)}") from None


def _lacking(what: str, error: ImportError) -> str:
    what = what if what.startswith("taskset") else f"taskset {what!r}"
    return f"{what}: required packages are missing: {_line(error)}; install them with {sys.executable} -m pip"


def _line(error: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


# -------------------------------------------------------------------------------------------------------- renderers


def check_renderer(options: dict[str, Any]) -> None:
    """Check that a renderer can express tools for the model. Raises: Unusable."""
    _check_version()
    from renderers.base import MODEL_RENDERER_MAP

    tokenizer = options["tokenizer"]
    try:
        name = proven_renderer(tokenizer, options["sampling"].get("chat_template_kwargs"))
    except Exception as error:
        raise Unusable(f"model {tokenizer}: its tokenizer cannot be loaded: {_line(error)}") from None
    if name is None and tokenizer not in MODEL_RENDERER_MAP:
        raise Unusable(no_renderer(options["taskset"]["id"], options["offers"], tokenizer))


# ---------------------------------------------------------------------------------------------- verifiers' server


def forked_server(folder: str, control: int, *, truth: bool) -> tuple[Any, Any]:
    """Fork verifiers' environment server, which waits for its configuration.

    The fork happens after importing verifiers, which takes seconds, and before importing any taskset.

    Args:
        folder: of the server's socket.
        control: a descriptor to close in the server process.
        truth: whether rewards are computed.

    Returns: the process, and the connection for its configuration; the process ends when the connection is closed.
    Raises: Unusable.
    """
    _check_version()
    import verifiers.v1.serve  # noqa: F401

    # Otherwise the garbage collectors of both processes would copy shared pages.
    gc.freeze()
    gc.enable()
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve_environment, args=(folder, truth, theirs, mine, control))
    server.start()
    theirs.close()
    return server, mine


def serve_environment(folder: str, truth: bool, parent: Any, parents: Any, control: int) -> None:
    """Main function of verifiers' environment server process, which ends with its ``parent``.

    ``parents`` and ``control`` belong to the parent and are closed.
    """
    parents.close()
    os.close(control)
    try:
        config, path = parent.recv()
    except EOFError:
        return
    sys.path[:0] = path
    # The environment server starts tool servers as modules, which need this path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")]))
    from verifiers.v1.serve import EnvServer
    from verifiers.v1.utils.loaders import resolve_env_config

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # verifiers does the same: its event loop then stops what it started.
        raise KeyboardInterrupt

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            parent.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, daemon=True).start()
    _run_scripts_here(Path(folder))
    server = EnvServer(config=resolve_env_config(config), address=_address(folder))
    if not truth:
        blind = {"scoring_deferred": True, "__module__": server.task_cls.__module__}
        server.task_cls = type(server.task_cls.__name__, (server.task_cls,), blind)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.run())


def _address(folder: str) -> str:
    return f"ipc://{folder}/server"


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


class Bridge:
    """Plays episodes on one environment server."""

    def __init__(self, found: Found, address: str, *, truth: bool) -> None:
        from verifiers.v1.serve import EnvClient

        self._found, self._truth = found, truth
        self.client = EnvClient(address)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._renderers: dict[str, dict[str, Any] | None] = {}
        self._choosing = asyncio.Lock()

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Execute orders until the socket is closed."""
        writer.write(b'{"ready": true}\n')
        while line := await reader.readline():
            order = json.loads(line)
            number = order["number"]
            if order["do"] == "cancel":
                if number in self._running:
                    self._running[number].cancel()
                continue
            task = asyncio.create_task(self._answer(order, writer))
            self._running[number] = task
            task.add_done_callback(functools.partial(self._forget, number))
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        self._running.pop(number, None)

    async def _answer(self, order: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._play(order)
        except Unusable as error:
            answer = {"unusable": str(error)}
        except Exception as error:
            answer = {"lost": _line(error)}
        writer.write(json.dumps({**answer, "number": order["number"]}).encode() + b"\n")
        await writer.drain()

    async def _play(self, order: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.serve import EpisodeAssembly
        from verifiers.v1.types import SamplingConfig

        task = self._found.tasks.get(order["task"])
        if task is None:
            raise LookupError(f"no task {order['task']!r}")
        assembly = EpisodeAssembly()
        client = TrainClientConfig.model_validate(
            {
                "type": "train",
                "base_url": order["base_url"],
                "api_key_var": "DRACO_NO_KEY",
                "renderer": await self._renderer(order["tokenizer"]),
                "renderer_model_name": order["tokenizer"],
            }
        )
        try:
            async with asyncio.timeout(order["seconds"]):
                episode = await self.client.run(
                    client,
                    order["model"],
                    SamplingConfig.model_validate(self._found.options["sampling"]),
                    task.data.model_dump(mode="json"),
                    on_delta=assembly.apply,
                )
        except TimeoutError:
            return self._record(_traces(assembly), [], timeout=True)
        self._check_usable(episode, order["tokenizer"])
        return self._record(episode.traces, episode.errors, timeout=episode.is_timeout)

    async def _renderer(self, tokenizer: str) -> dict[str, Any] | None:
        """The renderer's configuration, from the options or `proven_renderer` (cached)."""
        options = self._found.options
        if options["renderer"] is not None:
            return dict(options["renderer"])
        async with self._choosing:
            if tokenizer not in self._renderers:
                told = options["sampling"].get("chat_template_kwargs")
                name = await asyncio.to_thread(proven_renderer, tokenizer, told)
                print(f"renderer of {tokenizer}: {name or 'as the package renderers decides'}", flush=True)
                self._renderers[tokenizer] = None if name is None else {"name": name}
            return self._renderers[tokenizer]

    def _check_usable(self, episode: Any, tokenizer: str) -> None:
        """Raises: Unusable: an episode failed before its first message, in a way that every retry would repeat."""
        if any(node.sampled for trace in episode.traces for node in trace.nodes):
            return
        taskset = self._found.options["taskset"]["id"]
        for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            # The package verifiers formats errors of its own process like this; the output of programs looks different.
            if missing := re.search(r": ModuleNotFoundError: (No module named [^\n]*)$", error.message):
                raise Unusable(_lacking(f"taskset {taskset!r}", ModuleNotFoundError(missing[1])))
            if "DefaultRenderer does not support tools" in error.message and self._renderers.get(tokenizer) is None:
                raise Unusable(no_renderer(taskset, "it", tokenizer))

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


def _traces(assembly: Any) -> list[Any]:
    """The traces recorded so far in an unfinished episode."""
    from pydantic import ValidationError
    from verifiers.v1.episode import WireEpisode

    kind = WireEpisode.model_fields["traces"].annotation.__args__[0]
    found = []
    for record in assembly.traces.values():
        with contextlib.suppress(ValidationError):
            found.append(kind.model_validate({key: value for key, value in record.items() if key != "pending"}))
    return found


def _error(error: Any) -> dict[str, str]:
    return {"type": error.type, "message": " ".join(error.message.split())[-500:]}


def _trace(trace: Any) -> dict[str, Any]:
    trained = {id(node) for branch in trace.branches if branch.trainable for node in branch.nodes}
    return {
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "stop": trace.stop_condition,
        "errors": [_error(error) for error in trace.errors],
        "nodes": [_node(node, trained=id(node) in trained) for node in trace.nodes],
    }


def _node(node: Any, *, trained: bool) -> dict[str, Any]:
    from verifiers.v1.types import content_text

    message = node.message
    return {
        "parent": node.parent,
        "role": message.role,
        "name": getattr(message, "name", None),
        "text": content_text(message.content),
        "calls": [
            {"name": call.name, "arguments": call.arguments} for call in getattr(message, "tool_calls", None) or ()
        ],
        "sampled": node.sampled,
        "trained": trained,
        "tokens": node.token_ids,
        "at": node.timestamp,
        "tools": [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in node.tools
        ],
    }


# ------------------------------------------------------------------------------------------------------------- main


async def _serve(descriptor: int, options: dict[str, Any], folder: str, server: Any, told: Any) -> None:
    from verifiers.v1.serve import env_config_data

    control = socket.socket(fileno=descriptor)
    control.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=control, limit=_LONGEST_LINE)
    try:
        found = Found(options)
        told.send((env_config_data(found.config), found.path))
        bridge = Bridge(found, _address(folder), truth=options["truth"])
        until = time.monotonic() + options["start_seconds"]
        while not await bridge.client.health(timeout=1.0):
            if not server.is_alive():
                raise Unusable(f"verifiers' environment server ended with status {server.exitcode}")
            if time.monotonic() > until:
                raise Unusable(f"verifiers' environment server did not answer within {options['start_seconds']:g} s")
        listening = asyncio.create_task(bridge.listen(reader, writer))
        ended = asyncio.create_task(asyncio.to_thread(server.join))
        await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
        # Open orders are not answered; the host sees the end of this process.
        told.close()
    except Exception as error:
        said = str(error) if isinstance(error, Unusable) else _line(error)
        writer.write(json.dumps({"error": said}).encode() + b"\n")
        await writer.drain()
    finally:
        if server.is_alive():
            server.terminate()
            await asyncio.to_thread(server.join, _END_SECONDS)
            server.kill()
        # A thread may still be waiting for a server that cannot be ended.
        os._exit(0)


def main() -> int:
    """Run the command in the arguments; see the module's docstring."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Output of other code must not be mistaken for an answer.
    os.dup2(2, 1)
    options = json.loads(sys.stdin.read())
    # Imports stay in memory; collecting would take 20 % of the time.
    gc.disable()
    if sys.argv[1] == "serve":
        control, folder = int(sys.argv[2]), sys.argv[3]
        try:
            server, told = forked_server(folder, control, truth=options["truth"])
        except Unusable as error:
            os.write(control, json.dumps({"error": str(error)}).encode() + b"\n")
            return 0
        asyncio.run(_serve(control, options, folder, server, told))
        return 0
    try:
        if sys.argv[1] == "renderer":
            check_renderer(options)
            answer = {}
        else:
            answer = Found(options).told()
    except Unusable as error:
        answer = {"error": str(error)}
    out.write(json.dumps(answer))
    out.flush()
    gc.freeze()
    return 0


if __name__ == "__main__":
    sys.exit(main())

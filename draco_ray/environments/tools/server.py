"""The tool server in the jail: imports the tools once and forks a process for every task and every evaluation.

So no task sees what another task left in a module or in scratch, and no evaluation runs in a process that ran tools.
The server itself gets neither the policy's code nor any task. Tool processes are forked from it, so what only
``evaluate`` may know is not in their memory.

The host speaks with a forked process as `draco_ray.environments.jail.fork_server` describes; the first socket sent is
for the server itself. Orders and answers:

    host   {"files": [...], ...}                      see `Setup`
           {"do": "reset", "task": {...}}
           {"do": "call", "name": ..., "arguments": {...}}
           {"do": "end_state"}
           {"do": "evaluate", "task": {...}, "end_state": "..."}    the answer to "end_state", unparsed
    answer {"tools": [...], "hooks": [...]} or {"unusable": ...}
           {} or {"failed": ...}
           {"text": ..., "length": ...}               what a tool returned, truncated, and its full length
           {"state": ...} or {"failed": ...}
           {"evaluated": ...} or {"failed": ...}

The host ends a process at its first unexpected line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import re
import runpy
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SCRATCH_FOLDERS, JailSpec, landlock_readable
from draco_ray.environments.jail.fork_server import LONGEST_ORDER, Channel, ForkServer
from draco_ray.environments.jail.system_calls import refuse_system_calls
from draco_ray.environments.tools import functions
from draco_ray.environments.tools.functions import Functions, UnusableTools
from draco_ray.temp_dirs import remove_tree

_PROCESSES = 64
"""Maximum number of threads of a task's process and of processes it starts; commands may have four times as many."""
_FAREWELL_SECONDS = 2.0
"""Time for a command to end after its standard input has been closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message of the host."""

    files: list[str]
    secrets: dict[str, str]
    """Environment variables; sent here because a command line is visible to others."""
    memory_mib: int
    cpu_seconds: int
    timeout_seconds: float
    """Time limit of one call."""
    hook_seconds: float
    """Time limit of ``reset``, ``end_state`` and ``evaluate``."""
    programs: bool
    """Whether tools may start programs and open sockets; no system call is refused then."""
    command: list[str]
    """If not empty, each forked process runs this command, with the socket as standard input and output."""


class ToolServer(ForkServer):
    """Forks the processes of one slot."""

    def __init__(self, jail: JailSpec, setup: Setup, found: Functions, control: socket.socket) -> None:
        super().__init__(control, _FAREWELL_SECONDS if setup.command else 0.0)
        self._jail = jail
        self._setup = setup
        self._functions = found
        # Random, because servers do not know of each other.
        self._uid = random.SystemRandom().randint(*jail.task_uids) if jail.task_uids else None

    def begin(self, order: str, channel: Channel) -> None:
        """Run the MCP server's command if there is one; otherwise answer the host's orders with the tools."""
        if self._setup.command:
            self._run_command(channel)
        self._confine()
        own = os.getpid()
        while (asked := channel.receive()) is not None:
            answer = self._answer(asked)
            if os.getpid() != own:
                # The tool has forked, and this is the forked process. Only the original process answers the call.
                return
            channel.answer(answer)

    def _run_command(self, channel: Channel) -> NoReturn:
        """Run the command in this process, and end the process when the command ends.

        A Python script runs in the interpreter of this process. A new one would spend seconds on importing the package
        ``mcp``, which was imported here before the fork.
        """
        for standard in (0, 1):
            os.dup2(channel.connection.fileno(), standard)
        channel.close()
        # Standard error must contain only this process's output.
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        self._confine()
        program, *arguments = self._setup.command
        if _is_script(self._setup.command):
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
            sys.exit()
        try:
            os.execv(program, [program, *arguments])
        except OSError as error:
            sys.exit(f"{program}: {error.strerror}")

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        do, found, seconds = order["do"], self._functions, self._setup.hook_seconds
        if do == "call":
            text = functions.call(found, order["name"], order["arguments"], self._setup.timeout_seconds)
            # Lone surrogates cannot be sent.
            text = text.encode("utf-8", "replace").decode()
            return {"text": text[: self._jail.output_bytes], "length": len(text)}
        if do == "end_state":
            state, problem = functions.end_state(found, seconds)
            return {"state": state} if problem is None else {"failed": problem}
        given = [order["task"]]
        if do == "evaluate":
            end = json.loads(order["end_state"])
            if "state" not in end:
                return {"failed": str(end["failed"])}
            given.append(end["state"])
        value, problem = functions.run_hook(found, do, seconds, *given)
        if problem is not None:
            return {"failed": problem}
        return {"evaluated": functions.json_or_repr(value)} if do == "evaluate" else {}

    def _confine(self) -> None:
        """Drop all privileges but access to the visible files."""
        jail, setup, home = self._jail, self._setup, os.environ["HOME"]
        os.chdir(home)
        own = self._uid is not None or jail.mounts
        linux.limit(
            memory_mib=setup.memory_mib,
            # In the host's own user namespace the limit also counts all other processes of this user.
            processes=_PROCESSES * (4 if setup.command else 1) if own else _PROCESSES * 256,
            file_mib=jail.scratch_mib,
            cpu_seconds=setup.cpu_seconds,
        )
        linux.drop_privileges(self._uid)
        linux.set_undumpable()
        linux.die_with_parent()
        if not setup.programs:
            refuse_system_calls()
        if jail.level == "landlock":
            readable = landlock_readable(jail, [])
            linux.apply_landlock(readable=readable, writable=(home, os.devnull), network=jail.network)

    def clear(self) -> None:
        """Empty the scratch folders."""
        if self._jail.mounts:
            for folder in SCRATCH_FOLDERS:
                linux.unmount(folder)
                linux.mount_tmpfs(folder, self._jail.scratch_mib, 0o1777)
        elif os.listdir(home := os.environ["HOME"]) and not remove_tree(home, itself=False, uid=self._uid):
            raise OSError(f"{home} cannot be emptied")


def _prepare(command: list[str]) -> None:
    """Import the package ``mcp`` before processes are forked, if the command is a Python script that imports it."""
    if not _is_script(command):
        return
    with contextlib.suppress(OSError, ImportError), open(command[1], "rb") as script:
        if re.search(rb"^\s*(from|import)\s+(fast)?mcp\b", script.read(), re.MULTILINE):
            importlib.import_module("mcp.server")
            # Otherwise every process would copy these objects when it ends.
            gc.freeze()


def _is_script(command: list[str]) -> bool:
    """Whether a command runs a script with this process's own Python."""
    return command[:1] == [sys.executable] and len(command) > 1 and not command[1].startswith("-")


def main() -> None:
    """Run the server described by the first argument."""
    linux.set_undumpable()
    linux.adopt_orphans()
    jail = JailSpec.from_json(sys.argv[1])
    control = socket.socket(fileno=jail.control_fd)
    _, descriptors, _, _ = socket.recv_fds(control, LONGEST_ORDER, 1)
    if not descriptors:
        return
    channel = Channel(socket.socket(fileno=descriptors[0]))
    setup = Setup(**channel.receive() or {})
    os.environ.update(setup.secrets)
    _prepare(setup.command)
    try:
        found = functions.load(setup.files)
    except UnusableTools as error:
        channel.answer({"unusable": str(error)})
        return
    channel.answer({"tools": found.schemas, "hooks": sorted(found.hooks)})
    channel.close()
    ToolServer(jail, setup, found, control).run()


if __name__ == "__main__":
    main()

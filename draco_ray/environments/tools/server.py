"""The tool server in the jail: imports the tools once and forks a process for every task and every evaluation.

So no task sees what another task left in a module or in scratch, and no evaluation runs in a process that ran tools.
The server itself gets neither the policy's code nor any task. Tool processes are forked from it, so what only
``evaluate`` may know is not in their memory.

The host sends orders over a control socket, one packet each, and waits for the answer:

    host   b"fork", with a socket    end the current process and all that it started; fork one that serves the socket
           b"end"                    only end the current process
    server the exit status of the ended process (negative: its signal), 0 if there was none

The host communicates with a process over the socket sent with b"fork"; the first socket sent is for the server itself.
Orders and answers are lines: a number, a space, a JSON object. An answer has the number of its order:

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

The policy's code, if it runs in a tool, can write to that socket too: the host does not trust what it reads there, and
ends the process at the first unexpected line.
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
import select
import socket
import sys
import traceback
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any, NoReturn

from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SCRATCH_FOLDERS, JailSpec, readable_in_place
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


class ToolServer:
    """Serves one slot."""

    def __init__(self, jail: JailSpec, setup: Setup, found: Functions, control: socket.socket) -> None:
        self._jail = jail
        self._setup = setup
        self._functions = found
        self._control = control
        # Random, because servers do not know of each other.
        self._uid = random.SystemRandom().randint(*jail.task_uids) if jail.task_uids else None

    def run(self) -> None:
        """Serve until the host closes the socket."""
        child = 0
        # The jail's caretaker process, which must not be ended.
        caretaker = linux.children_of(os.getpid())
        while True:
            order, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
            if child and self._setup.command:
                _wait(child)
            status = linux.end_descendants(caretaker).get(child, 0)
            if not order:
                return
            self._clear_scratch()
            child = self._fork(descriptors[0]) if descriptors else 0
            self._control.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _fork(self, descriptor: int) -> int:
        if child := os.fork():
            os.close(descriptor)
            return child
        if self._setup.command:
            self._run_command(descriptor)
        status = 1
        try:
            self._control.close()
            self._confine()
            self._serve(socket.socket(fileno=descriptor).makefile("rwb"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _run_command(self, descriptor: int) -> NoReturn:
        """Run the command in this process, which ends with it.

        A Python script is not executed anew: importing the package ``mcp`` takes seconds, and was done before the fork.
        """
        for standard in (0, 1):
            os.dup2(descriptor, standard)
        os.close(descriptor)
        # Standard error tells of this process only.
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        self._control.close()
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

    def _serve(self, channel: BufferedRWPair) -> None:
        own = os.getpid()
        while line := channel.readline():
            number, _, order = line.partition(b" ")
            answer = self._answer(json.loads(order))
            if os.getpid() != own:
                # A process forked by a tool returned here; the original process answers the call.
                return
            _say(channel, number, answer)

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
        return {"evaluated": functions.with_json(value)} if do == "evaluate" else {}

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
        linux.close_to_inspection()
        linux.die_with_parent()
        if not setup.programs:
            refuse_system_calls()
        if jail.level == "landlock":
            readable = readable_in_place(jail, [])
            linux.reach_only(readable=readable, writable=(home, os.devnull), network=jail.network)

    def _clear_scratch(self) -> None:
        if self._jail.mounts:
            for folder in SCRATCH_FOLDERS:
                linux.unmount(folder)
                linux.mount_tmpfs(folder, self._jail.scratch_mib, 0o1777)
        elif os.listdir(home := os.environ["HOME"]) and not remove_tree(home, itself=False, uid=self._uid):
            raise OSError(f"{home} cannot be emptied")


def _wait(child: int) -> None:
    """Wait up to `_FAREWELL_SECONDS` for a child to end."""
    watched = os.pidfd_open(child)
    select.select([watched], [], [], _FAREWELL_SECONDS)
    os.close(watched)


def _say(channel: BufferedRWPair, number: bytes, answer: dict[str, Any]) -> None:
    channel.write(number + b" " + json.dumps(answer).encode() + b"\n")
    channel.flush()


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
    linux.close_to_inspection()
    linux.adopt_orphans()
    jail = JailSpec.from_json(sys.argv[1])
    control = socket.socket(fileno=jail.control_fd)
    _, descriptors, _, _ = socket.recv_fds(control, 16, 1)
    if not descriptors:
        return
    with socket.socket(fileno=descriptors[0]) as own, own.makefile("rwb") as channel:
        number, _, order = channel.readline().partition(b" ")
        setup = Setup(**json.loads(order))
        os.environ.update(setup.secrets)
        _prepare(setup.command)
        try:
            found = functions.load(setup.files)
        except UnusableTools as error:
            _say(channel, number, {"unusable": str(error)})
            return
        _say(channel, number, {"tools": found.schemas, "hooks": sorted(found.hooks)})
    ToolServer(jail, setup, found, control).run()


if __name__ == "__main__":
    main()

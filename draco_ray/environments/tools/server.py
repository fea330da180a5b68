"""The process that runs tools, in the jail: it imports them once and forks a process of its own for every task.

So no task sees what another has left in a module or in scratch. The host speaks to it over a socket, one JSON object a
line, and waits for each answer:

    host   {"files": [...], "secrets": {...}, ...}     first of all, see `Setup`
           {"do": "open", "task": {...}}               fork a process for a task, which runs ``reset``
           {"do": "call", "name": ..., "arguments": {...}}
           {"do": "evaluate"}
           {"do": "close"}
    server {"ready": {...}} or {"unusable": ...}
           {"opened": true} or {"failed": ...}
           {"text": ..., "length": ...}                what a tool returned, cut at the source, and its whole length
           {"evaluated": ...} or {"failed": ...}
           {"closed": true}
           {"died": status}                            instead of an answer: the task's process has ended by itself

End of file on the socket ends it.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SCRATCH_FOLDERS, JailSpec, readable_in_place
from draco_ray.environments.jail.system_calls import refuse_system_calls
from draco_ray.environments.tools import functions
from draco_ray.environments.tools.functions import Functions, UnusableTools
from draco_ray.temp_dirs import remove_tree

_PROCESSES = 64
"""Threads of a task's process, and what it starts where it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the host says first."""

    files: list[str]
    secrets: dict[str, str]
    """Environment variables; they come this way because a command line is no place for them."""
    memory_mib: int
    cpu_seconds: int
    timeout_seconds: float
    """Of one call."""
    hook_seconds: float
    """Of ``reset`` and ``evaluate``."""
    programs: bool
    """Whether tools may start programs and open sockets: no system call is refused then."""


class ToolServer:
    """Serves one slot."""

    def __init__(self, jail: JailSpec, setup: Setup, found: Functions, control: BufferedRWPair) -> None:
        self._jail = jail
        self._setup = setup
        self._functions = found
        self._control = control
        # Drawn at random: servers do not know of each other.
        self._uid = random.SystemRandom().randint(*jail.task_uids) if jail.task_uids else None

    def run(self) -> None:
        """Serve until the host has gone."""
        while line := self._control.readline():
            order = json.loads(line)
            self._clear_scratch()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    self._confine()
                    self._serve_task(order["task"])
                    status = 0
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            if status:
                _say(self._control, died=os.waitstatus_to_exitcode(status))

    def _serve_task(self, task: dict[str, Any]) -> None:
        own = os.getpid()
        _, problem = functions.run_hook(self._functions, "reset", task, self._setup.hook_seconds)
        _say(self._control, **({"opened": True} if problem is None else {"failed": problem}))
        while line := self._control.readline():
            order = json.loads(line)
            if order["do"] == "close":
                _say(self._control, closed=True)
                return
            if order["do"] == "evaluate":
                value, problem = functions.run_hook(self._functions, "evaluate", task, self._setup.hook_seconds)
                told = {"failed": problem} if problem else {"evaluated": functions.with_json(value)}
                _say(self._control, **told)
                continue
            text = functions.call(self._functions, order["name"], order["arguments"], self._setup.timeout_seconds)
            if os.getpid() != own:
                # A process that a tool has forked and that came back: the call is answered by the other one.
                return
            # A lone surrogate is no text that could be sent.
            text = text.encode("utf-8", "replace").decode()
            _say(self._control, text=text[: self._jail.output_bytes], length=len(text))

    def _confine(self) -> None:
        """Give up everything but what is in sight."""
        jail, setup, home = self._jail, self._setup, os.environ["HOME"]
        os.chdir(home)
        own = self._uid is not None or jail.mounts
        linux.limit(
            memory_mib=setup.memory_mib,
            # In the host's own user namespace the limit counts everything else this user runs.
            processes=_PROCESSES if own else _PROCESSES * 256,
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
            raise OSError(f"{home} cannot be cleared")


def _say(control: BufferedRWPair, **message: Any) -> None:
    control.write(json.dumps(message).encode() + b"\n")
    control.flush()


def main() -> None:
    """Run the server that the first argument describes."""
    linux.close_to_inspection()
    jail = JailSpec.from_json(sys.argv[1])
    control = socket.socket(fileno=jail.control_fd).makefile("rwb")
    setup = Setup(**json.loads(control.readline()))
    os.environ.update(setup.secrets)
    try:
        found = functions.load(setup.files)
    except UnusableTools as error:
        _say(control, unusable=str(error))
        return
    _say(control, ready={"tools": found.schemas, "hooks": sorted(found.hooks)})
    ToolServer(jail, setup, found, control).run()


if __name__ == "__main__":
    main()

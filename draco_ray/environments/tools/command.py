"""Starts the command of an MCP server in the jail, after dropping the last privileges.

Unlike tools that are functions, the command may make all system calls, because it has to start a program and run an
event loop. It sees only the files it is shown, has no capabilities, has resource limits, and runs as another user if
root starts it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass

from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import JailSpec, readable_in_place

_PROCESSES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command to start; read from a file that only the jail sees."""

    command: list[str]
    variables: dict[str, str]
    memory_mib: int
    cpu_seconds: int


def main() -> None:
    """Replace this process by the command that the first file visible in the jail describes."""
    jail = JailSpec.from_json(sys.argv[1])
    with open(jail.shown[0], encoding="utf-8") as file:
        launch = Launch(**json.load(file))
    home = os.environ["HOME"]
    os.chdir(home)
    uid = random.SystemRandom().randint(*jail.task_uids) if jail.task_uids else None
    own = uid is not None or jail.mounts
    linux.limit(
        memory_mib=launch.memory_mib,
        processes=_PROCESSES if own else _PROCESSES * 64,
        file_mib=jail.scratch_mib,
        cpu_seconds=launch.cpu_seconds,
    )
    linux.drop_privileges(uid)
    linux.die_with_parent()
    if jail.level == "landlock":
        linux.reach_only(readable=readable_in_place(jail, []), writable=(home, os.devnull), network=jail.network)
    try:
        os.execve(launch.command[0], launch.command, {**os.environ, **launch.variables})
    except OSError as error:
        sys.exit(f"{launch.command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()

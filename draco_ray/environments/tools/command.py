"""Starts the command of an MCP server in the jail: the last that is given up before somebody else's program begins.

The system calls that tools of functions are refused are not refused here: a program has to be started, and its own loop
of events needs some of them. It sees the files that are shown, has no capabilities, limits, and a user of its own where
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
    """What is started; read from a file that only the jail is shown."""

    command: list[str]
    variables: dict[str, str]
    memory_mib: int
    cpu_seconds: int


def main() -> None:
    """Become the command that the file shown first describes."""
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

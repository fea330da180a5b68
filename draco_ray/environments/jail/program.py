"""Process 1 in the jail or container of an agent's program: it starts the program, relays its connections to the
endpoint, and ends it if it exceeds a limit. When this process ends, everything in the jail or container ends.

Standard library only, like everything that runs in a jail.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SCRATCH_FOLDERS, UNAVAILABLE, WORKSPACE, JailSpec

LAUNCH_PATH, ENDPOINT_PATH = "/run/draco/launch.json", "/run/draco/endpoint"
"""Paths in the jail: the description of the program, and the endpoint's Unix socket."""
LIFELINE = "/run/draco/lifeline"
"""In a container, the Unix socket whose connection ends with the rollout."""
_INTERFACE_FLAGS, _UP = 0x8913, 1
"""The ioctl request for a network interface's flags, and the flag of an interface that is up."""
_OPEN_FILES = 4096
_MEASURE_SECONDS = 0.5
_DISK_SHARE = 20
"""Pause between two measurements of the disk, as a multiple of the time that one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLaunch:
    """The program to start, read from a file that is visible only in the jail."""

    command: list[str]
    variables: dict[str, str]
    port: int
    """The endpoint's port on loopback, the same in the jail and on the host; 0: not relayed."""
    memory_mib: int
    """Limit of the resident memory of all processes together, and of the writable memory of each."""
    disk_mib: int
    """Size limit of the workspace."""
    processes: int | None
    """Maximum number of processes and threads; None: the container's engine limits them."""
    cpu_seconds: int
    """CPU time limit of one process."""
    contained: bool = False
    """Whether the program runs in a container (``agent.container``), which isolates it, instead of a jail."""
    network: bool = False
    """Whether the container may have a network."""


def main() -> NoReturn:
    """Run the program that the launch file describes; exit with its status, or 128 plus the signal that ended it."""
    with open(LAUNCH_PATH, encoding="utf-8") as file:
        launch = ProgramLaunch(**json.load(file))
    lifeline = _lifeline(launch) if launch.contained else None
    os.chdir(WORKSPACE)
    linux.limit(
        memory_mib=launch.memory_mib,
        processes=launch.processes,
        file_mib=launch.disk_mib,
        cpu_seconds=launch.cpu_seconds,
        open_files=_OPEN_FILES,
        reserves=True,
    )
    if not launch.contained:
        uids = JailSpec.from_json(sys.argv[1]).task_uids
        linux.drop_privileges(random.SystemRandom().randint(*uids) if uids else None)
        linux.die_with_parent()
    linux.set_undumpable()
    listening = socket.create_server(("127.0.0.1", launch.port), backlog=128) if launch.port else None
    if child := os.fork():
        asyncio.run(_watch(child, launch, listening, lifeline))
    _become(launch)


def _lifeline(launch: ProgramLaunch) -> socket.socket:
    """Check a container and connect it to the host; the container ends when the host closes the connection."""
    networks = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    refused = ""
    if os.getpid() != 1:
        refused = "the program is not process 1; use a PID namespace and no --init (apptainer: --pid --no-init)"
    elif networks and not launch.network:
        refused = f"found network {networks[0]}; use --network none, or set environment.options.network=true"
    if refused:
        print(f"agent.container: {refused}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    lifeline = socket.socket(socket.AF_UNIX)
    lifeline.connect(LIFELINE)
    return lifeline


def _is_up(interface: str) -> bool:
    with socket.socket() as any_socket:
        asked = struct.pack("16s16x", interface.encode())
        (flags,) = struct.unpack_from("16xH", fcntl.ioctl(any_socket, _INTERFACE_FLAGS, asked))
    return bool(flags & _UP)


def _become(launch: ProgramLaunch) -> NoReturn:
    own = {"HOME": SCRATCH_FOLDERS[0], "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    # A container keeps the variables of its image.
    variables = {**(os.environ if launch.contained else own), **launch.variables}
    try:
        os.execvpe(launch.command[0], launch.command, variables)
    except OSError as error:
        print(f"{launch.command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


async def _watch(
    child: int, launch: ProgramLaunch, listening: socket.socket | None, lifeline: socket.socket | None
) -> NoReturn:
    """Relay connections and check memory and disk until the program ends or exceeds a limit; then end this process."""
    if lifeline is not None:
        asyncio.get_running_loop().add_reader(lifeline, _end_container)
    if listening is not None:
        await asyncio.start_server(_relay, sock=listening)
    ending = asyncio.create_task(asyncio.to_thread(_reap, child))
    measured, disk_at = 0.0, 0.0
    while not (await asyncio.wait({ending}, timeout=_MEASURE_SECONDS))[0]:
        excess = _excess("environment.max_memory_mib", sum(_resident()), launch.memory_mib)
        if not excess and (now := time.monotonic()) > disk_at:
            used = await asyncio.to_thread(lambda: sum(_disk(WORKSPACE)))
            excess = _excess("environment.options.disk_mib", used, launch.disk_mib)
            measured = time.monotonic() - now
            disk_at = now + _DISK_SHARE * measured
        if excess:
            print(excess, file=sys.stderr, flush=True)
            os._exit(137)
    # Exit at once, without an orderly close of open connections.
    os._exit(ending.result())


def _end_container() -> NoReturn:
    """End all other processes of the container, then this one, so that the host sees the connection end last."""
    linux.end_descendants()
    os._exit(137)


def _reap(child: int) -> int:
    """Wait for the program, and for orphans, which become children of process 1. Returns: the program's status."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _excess(name: str, used: int, most_mib: int) -> str:
    return f"stopped: {used >> 20} MiB used, more than {name}={most_mib}" if used > most_mib << 20 else ""


def _resident() -> Iterator[int]:
    """Resident bytes of each process, without shared memory; nothing if there is no ``/proc``."""
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/statm", encoding="ascii") as file:
                _, resident, shared, *_ = map(int, file.read().split())
                yield (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue


def _disk(folder: str) -> Iterator[int]:
    """Disk usage of each file in bytes."""
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect a client in the jail with the endpoint."""
    from_endpoint, to_endpoint = await asyncio.open_unix_connection(ENDPOINT_PATH)
    await asyncio.gather(_copy(reader, to_endpoint), _copy(from_endpoint, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    main()

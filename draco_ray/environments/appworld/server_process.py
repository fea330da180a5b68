"""The slot's side of a `world_server`: the process, its sockets and a private folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import psutil

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.template_process import TemplateProcess
from draco_ray.environments.appworld.world_server import MOST_PROCESSES, SlotSpec
from draco_ray.environments.jail.fork_client import ForkClient
from draco_ray.environments.jail.launch import SCRATCH_MIB, last_line
from draco_ray.errors import EnvironmentCrashed
from draco_ray.temp_dirs import remove_tree

_MOST_PROCESSES = 2 * MOST_PROCESSES
"""Maximum number of a server's processes, counted from outside the jail, because some hosts do not enforce
`MOST_PROCESSES` (for root in a container)."""
_MOST_FILES = 20_000
_CPU_CELLS = 60
"""Number of cells that may use their whole time limit before the process exceeds its CPU time."""
_WATCH_SECONDS = 0.25
_FAREWELL_SECONDS = 5.0
_GONE_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")


class TaskProcessEnded(Exception):
    """A task's process has ended, or broke the protocol."""

    def __init__(self, reason: str, *, own: bool) -> None:
        """``own``: whether the task's code caused the end; false if the server ended too, or the process was killed
        from outside."""
        super().__init__(reason)
        self.own = own


class ServerProcess(ForkClient):
    """A running world server."""

    def __init__(
        self, template: TemplateProcess, spec: SlotSpec, process: psutil.Process, control: socket.socket
    ) -> None:
        super().__init__(control)
        self.level = template.level
        self._tasks_can_fork = not template.system_calls_refused
        self._spec = spec
        self._process = process
        self.excess = ""
        """Error message with the limit that this server exceeded, for which it was ended; empty if it exceeded none."""
        self._cpu_seconds = 0
        self._what = ""
        self._watching = asyncio.ensure_future(self._watch())

    @classmethod
    async def start(cls, template: TemplateProcess, config: EnvironmentConfig, *, evaluate: bool) -> ServerProcess:
        """Fork a server.

        Raises: EnvironmentCrashed: the server did not start; the message quotes its last output.
        """
        spec = SlotSpec(
            directory=tempfile.mkdtemp(prefix="slot-", dir=template.directory),
            evaluate=evaluate,
            memory_mib=config.max_memory_mib,
            cpu_seconds=math.ceil(_CPU_CELLS * config.cell_timeout_seconds),
            # An evaluation usually takes a second or two; the slot waits twice as long as this limit.
            evaluate_cpu_seconds=math.ceil(config.start_timeout_seconds / 2),
        )
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # The first message carries the sender's process id in this namespace.
            control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            control.setblocking(False)
            with their_control:
                _fork(template, spec, their_control)
            pid = await _hello(control, config.start_timeout_seconds)
            return cls(template, spec, psutil.Process(pid), control)
        except (OSError, EOFError, psutil.Error, TimeoutError) as error:
            control.close()
            reason = f"{type(error).__name__}: {error}; {last_line(spec.directory)}"
            remove_tree(spec.directory)
            raise EnvironmentCrashed(f"the world server did not start: {reason}") from error
        except BaseException:
            control.close()
            remove_tree(spec.directory)
            raise

    @property
    def pid(self) -> int:
        """Id of the outermost process."""
        return self._process.pid

    async def begin(self, role: str, task_id: str, seconds: float) -> None:
        """End the previous process and start another (`world_server.ROLES`). Raises: TimeoutError, TaskProcessEnded."""
        self.hang_up()
        plays = role == "task"
        self._cpu_seconds = self._spec.cpu_seconds if plays else self._spec.evaluate_cpu_seconds
        self._what = f"the {'task' if plays else 'evaluator'}'s process"
        try:
            await self.order(f"{role} {task_id}", seconds, fork=True)
        except TimeoutError:
            raise
        except OSError:
            raise self._dead() from None

    async def ask(self, order: Mapping[str, Any], seconds: float, most_bytes: int) -> dict[str, Any]:
        """Send the process an order. Returns: its answer of at most ``most_bytes``.

        Raises: TimeoutError, TaskProcessEnded.
        """
        try:
            answer = json.loads(await self.exchange(order, seconds, most_bytes))
        except EOFError as error:
            raise await self._ended(f"{self._what} {error}") from None
        # The answer may come from hostile code, so parsing it can fail in many ways.
        except (ValueError, RecursionError) as error:
            raise TaskProcessEnded(f"the answer cannot be read: {error}", own=True) from None
        if not isinstance(answer, dict):
            raise TaskProcessEnded("the answer is not a JSON object", own=True)
        return answer

    async def _ended(self, reason: str) -> TaskProcessEnded:
        """The error that says how the process ended, or ``reason`` if it has not ended."""
        try:
            status, cpu_seconds = await self.order("end", _GONE_SECONDS, fork=False)
        except TimeoutError:
            # The server is alive but did not report the process's end in time.
            return TaskProcessEnded(self.excess or reason, own=True)
        except OSError:
            return self._dead()
        if status is None:
            return TaskProcessEnded(reason, own=True)
        # The task's code cannot send SIGKILL. The kernel sends it when the CPU time is used up; otherwise it comes from
        # outside: from an operator, or from the kernel when the machine runs out of memory.
        killed = status == -signal.SIGKILL and cpu_seconds < self._cpu_seconds
        return TaskProcessEnded(f"{self._what} died (status {status})", own=not killed)

    def _dead(self) -> TaskProcessEnded:
        if self.excess:
            return TaskProcessEnded(self.excess, own=True)
        return TaskProcessEnded(f"the server died: {last_line(self._spec.directory)}", own=False)

    async def _watch(self) -> None:
        """End the task's process if it exceeds its limits, also between cells."""
        most = self._spec.memory_mib
        while not self.excess:
            await asyncio.sleep(_WATCH_SECONDS)
            # Finding children is slow: it reads every process of the machine. The memory of a process that cannot
            # start others is limited by its own resource limit.
            memory, processes = self._usage() if self._tasks_can_fork else (0.0, 0)
            if memory > most:
                self.excess = f"its processes used {memory:.0f} MiB, more than environment.max_memory_mib={most}"
            elif processes > _MOST_PROCESSES:
                self.excess = f"it started {processes} processes, more than the {_MOST_PROCESSES} allowed"
            # If scratch is mounted, this folder stays empty and the mounts limit the size.
            elif not _small(self._spec.directory):
                self.excess = (
                    f"it wrote more than {SCRATCH_MIB} MiB or {_MOST_FILES} files, or files that cannot be counted"
                )
        self._kill_tree()

    def _usage(self) -> tuple[float, int]:
        """(resident MiB, number) of all processes below the outermost one, which only waits."""
        memory, count = 0, 0
        for process in self._tree()[1:]:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                count += 1
        return memory / (1 << 20), count

    async def kill(self) -> None:
        """End the server and all its descendants, and remove its folder."""
        self._watching.cancel()
        # When its sockets are closed, the server kills all processes that it started, and then ends.
        self.close()
        await asyncio.to_thread(self._clean_up)

    def _clean_up(self) -> None:
        try:
            self._process.wait(_FAREWELL_SECONDS)
        except psutil.TimeoutExpired:
            psutil.wait_procs(self._kill_tree(), timeout=_GONE_SECONDS)
        remove_tree(self._spec.directory)

    def _kill_tree(self) -> list[psutil.Process]:
        # Kill every process. One kill would be enough only in a process namespace, which not every level has.
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return tree

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.Error:
            return []


def _fork(template: TemplateProcess, spec: SlotSpec, control: socket.socket) -> None:
    with open(os.path.join(spec.directory, "stderr"), "wb") as stderr:
        template.fork(json.dumps(asdict(spec)), control, stderr.fileno())


async def _hello(control: socket.socket, timeout_seconds: float) -> int:
    """Wait for the server's first line. Returns: its sender's process id. Raises: EOFError, TimeoutError."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(control, wake)
    try:
        async with asyncio.timeout(timeout_seconds):
            await readable
    finally:
        loop.remove_reader(control)
    line, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    if not line:
        raise EOFError
    credentials = (data for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS)
    return int(_CREDENTIALS.unpack(next(credentials))[0])


def _small(directory: str) -> bool:
    """Whether a folder's contents are within a task's limits; stops counting when they are not.

    Tasks cannot remove or rename files here (`system_calls`), so everything that they write is counted. A folder that
    cannot be listed was not made by AppWorld and counts as too large.
    """
    blocks = files = 0
    folders = [directory]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    blocks += entry.stat(follow_symlinks=False).st_blocks
                    if files > _MOST_FILES or blocks * 512 > SCRATCH_MIB << 20:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            return False
    return True

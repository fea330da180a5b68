"""The slot's side of a `world_server`: the process, two sockets and a private folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.template_process import TemplateProcess
from draco_ray.environments.appworld.world_server import MAX_EVALUATION_BYTES, MOST_PROCESSES, SlotSpec
from draco_ray.environments.jail.launch import SCRATCH_MIB, last_line
from draco_ray.errors import EnvironmentCrashed
from draco_ray.temp_dirs import remove_tree

log = logging.getLogger(__name__)

_MOST_PROCESSES = 2 * MOST_PROCESSES
"""Maximum number counted from outside, for hosts that do not enforce the limit above (root in a container)."""
_MOST_FILES = 20_000
_CPU_CELLS = 60
"""Number of cells that may use their whole time limit before the process exceeds its CPU time."""
_WATCH_SECONDS = 0.25
_FAREWELL_SECONDS = 5.0
_GONE_SECONDS = 10.0
_LONGEST_ANSWER = MAX_EVALUATION_BYTES + (1 << 20)
"""Maximum bytes of a line on the control socket."""
_CREDENTIALS = struct.Struct("3i")


class _Directory:
    """A server's private folder, held open for a short socket path: Unix sockets allow at most 107 bytes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def socket_path(self) -> str:
        return f"/proc/self/fd/{self._descriptor}/http"

    def remove(self) -> None:
        os.close(self._descriptor)
        remove_tree(self.path)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a task's process ended."""

    reason: str
    own: bool
    """Whether the task's code caused it; false if the server ended too, or the process was killed from outside."""


class ServerProcess:
    """A running world server. Belongs to one event loop."""

    def __init__(
        self,
        template: TemplateProcess,
        directory: _Directory,
        process: psutil.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_memory_mib: float,
    ) -> None:
        self.level = template.level
        self._tasks_can_fork = not template.system_calls_refused
        self._directory = directory
        self._process = process
        self._reader = reader
        self._writer = writer
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._exited: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.ensure_future(self._listen())
        self.ending = asyncio.ensure_future(self._watch(max_memory_mib))
        """How the task's process has ended, once it has."""
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=directory.socket_path, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
            ),
            base_url="http://world",
            timeout=None,
            trust_env=False,
        )

    @classmethod
    async def start(cls, template: TemplateProcess, config: EnvironmentConfig, *, evaluate: bool) -> ServerProcess:
        """Fork a server.

        Raises: EnvironmentCrashed: it failed; quotes the process's message.
        """
        directory = _Directory(tempfile.mkdtemp(prefix="slot-", dir=template.directory))
        spec = SlotSpec(
            directory=directory.path,
            evaluate=evaluate,
            memory_mib=config.max_memory_mib,
            cpu_seconds=math.ceil(_CPU_CELLS * config.cell_timeout_seconds),
            # An evaluation usually takes a second or two; the slot waits twice as long as this limit.
            evaluate_cpu_seconds=math.ceil(config.start_timeout_seconds / 2),
        )
        control, their_control = socket.socketpair()
        try:
            # The first message carries the sender's process id in this namespace.
            control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            control.setblocking(False)
            with their_control:
                _fork(template, spec, their_control, directory.socket_path)
            pid = await _hello(control, config.start_timeout_seconds)
            streams = await asyncio.open_connection(sock=control, limit=_LONGEST_ANSWER)
            return cls(template, directory, psutil.Process(pid), *streams, config.max_memory_mib)
        except (OSError, EOFError, psutil.Error, TimeoutError) as error:
            control.close()
            reason = f"{type(error).__name__}: {error}; {last_line(directory.path)}"
            directory.remove()
            raise EnvironmentCrashed(f"the world server did not start: {reason}") from error
        except BaseException:
            control.close()
            directory.remove()
            raise

    @property
    def pid(self) -> int:
        """Id of the outermost process."""
        return self._process.pid

    async def order(self, do: str, task_id: str, files: Mapping[str, str]) -> dict[str, Any]:
        """Send the server an order; ``files``: a saved world's files. Raises: EOFError: the server ended."""
        self._writer.write(json.dumps({"do": do, "task_id": task_id, "files": dict(files)}).encode() + b"\n")
        await self._writer.drain()
        answer = await self._answers.get()
        if answer is None:
            raise EOFError
        return answer

    async def post(self, path: str, body: dict[str, object], max_bytes: int) -> tuple[int, dict[str, Any]]:
        """POST JSON to the task's process. Returns: status and answer.

        Raises: ValueError: the answer is larger than ``max_bytes``, where reading stops, or not a JSON object.
        """
        received = bytearray()
        async with self._http.stream("POST", path, json=body) as response:
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > max_bytes:
                    raise ValueError(f"the reply has more than {max_bytes} bytes")
        answer = json.loads(received)
        if not isinstance(answer, dict):
            raise ValueError("the reply is not a JSON object")
        return response.status_code, answer

    async def _watch(self, max_memory_mib: float) -> Ending:
        """Wait until the task's process ends, or end it if it exceeds its limits, also between cells."""
        while True:
            done, _ = await asyncio.wait({self._exited}, timeout=_WATCH_SECONDS)
            if done:
                return self._exited.result()
            # Finding children is slow: it reads every process of the machine. A process that cannot start others is
            # kept within its memory by its own limit.
            memory, processes = self._usage() if self._tasks_can_fork else (0.0, 0)
            reason = None
            if memory > max_memory_mib:
                reason = f"its processes used {memory:.0f} MiB, more than environment.max_memory_mib={max_memory_mib}"
            elif processes > _MOST_PROCESSES:
                reason = f"it started {processes} processes, more than the {_MOST_PROCESSES} allowed"
            # If scratch is mounted, this folder stays empty and the mounts limit the size.
            elif not _small(self._directory.path):
                reason = f"it wrote more than {SCRATCH_MIB} MiB or {_MOST_FILES} files, or files that cannot be counted"
            if reason is not None:
                self._kill_tree()
                return Ending(reason, own=True)

    def _usage(self) -> tuple[float, int]:
        """(resident MiB, number) of all processes below the outermost one, which only waits."""
        memory, count = 0, 0
        for process in self._tree()[1:]:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                count += 1
        return memory / (1 << 20), count

    def complaint(self) -> str:
        """The last line the server wrote to its log."""
        return last_line(self._directory.path)

    async def kill(self) -> None:
        """End the server and all its descendants, and remove its folder."""
        self._listening.cancel()
        self.ending.cancel()
        await asyncio.gather(self.ending, return_exceptions=True)
        # At the end of its orders the server kills all that it started, and then ends.
        self._writer.transport.abort()
        await self._http.aclose()
        await asyncio.to_thread(self._clean_up)

    def _clean_up(self) -> None:
        try:
            self._process.wait(_FAREWELL_SECONDS)
        except psutil.TimeoutExpired:
            psutil.wait_procs(self._kill_tree(), timeout=_GONE_SECONDS)
        self._directory.remove()

    def _kill_tree(self) -> list[psutil.Process]:
        # In a process namespace, killing the second process ends all others; elsewhere each must be killed.
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

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                self._hear(json.loads(line))
        # A server that dies with an unread order resets the connection.
        except (OSError, ValueError, RecursionError) as error:
            log.debug("world server %d: %s", self.pid, error)
        self._end(Ending("the server died", own=False))
        self._answers.put_nowait(None)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["event"] == "exited":
            self._end(Ending(f"the task's process died (status {message['status']})", own=not message["killed"]))
            return
        self._answers.put_nowait(message)

    def _end(self, ending: Ending) -> None:
        if not self._exited.done():
            self._exited.set_result(ending)


def _fork(template: TemplateProcess, spec: SlotSpec, control: socket.socket, socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, open(os.path.join(spec.directory, "stderr"), "wb") as stderr:
        listener.bind(socket_path)
        listener.listen(16)
        template.fork(json.dumps(asdict(spec)), control, listener, stderr.fileno())


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

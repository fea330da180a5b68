"""The slot's side of a `world_server`: its process, its two sockets and its private folder."""

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
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx
import psutil

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.template_process import TemplateProcess
from draco_ray.environments.appworld.world_server import MAX_EVALUATION_BYTES, SlotSpec
from draco_ray.environments.jail.launch import SCRATCH_MIB, last_line
from draco_ray.errors import EnvironmentCrashed
from draco_ray.temp_dirs import remove_tree

log = logging.getLogger(__name__)

_PROCESSES = 64
"""Processes and threads of one task; AppWorld itself needs a handful of threads."""
_MOST_PROCESSES = 2 * _PROCESSES
"""Seen from outside, where the host does not enforce the limit (a container's root)."""
_MOST_FILES = 20_000
_CPU_CELLS = 60
"""Cells that may use their whole time before the task's process has used up its processor time."""
_WATCH_SECONDS = 0.25
_GONE_SECONDS = 10.0
_LONGEST_ANSWER = MAX_EVALUATION_BYTES + (1 << 20)
"""Bytes of a line of the control socket."""
_CREDENTIALS = struct.Struct("3i")


class _Directory:
    """A slot's private folder, held open so that its socket has a short name: a Unix socket's is 107 bytes at most."""

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
    """How the task's process was lost."""

    reason: str
    own: bool
    """Whether it was the doing of the code that ran in it: not, where the server went too or somebody killed it."""


class ServerProcess:
    """A running world server. Belongs to one event loop."""

    def __init__(
        self,
        template: TemplateProcess,
        directory: _Directory,
        process: psutil.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.level = template.level
        self._tasks_can_fork = not template.system_calls_refused
        self._members: list[psutil.Process] | None = None
        """Everything below the outermost process, where that cannot have changed since it was looked for."""
        self._directory = directory
        self._process = process
        self._reader = reader
        self._writer = writer
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._exited: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.ensure_future(self._listen())
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=directory.socket_path, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
            ),
            base_url="http://world",
            # Not to be carried from one task's process to the next one's.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=None,
            trust_env=False,
        )

    @classmethod
    async def start(cls, template: TemplateProcess, config: EnvironmentConfig, *, evaluate: bool) -> ServerProcess:
        """Have a server forked.

        Raises: EnvironmentCrashed, the process's own words, when that fails.
        """
        directory = _Directory(tempfile.mkdtemp(prefix="slot-", dir=template.directory))
        spec = SlotSpec(
            directory=directory.path,
            evaluate=evaluate,
            memory_mib=config.max_memory_mib,
            processes=_PROCESSES,
            scratch_mib=SCRATCH_MIB,
            cpu_seconds=math.ceil(_CPU_CELLS * config.cell_timeout_seconds),
            # An honest one takes a second or two; the slot waits for twice this.
            evaluate_cpu_seconds=math.ceil(config.start_timeout_seconds / 2),
        )
        control, their_control = socket.socketpair()
        try:
            # With the first message comes the sender's process id as it is known here.
            control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            control.setblocking(False)
            with their_control:
                _fork(template, spec, their_control, directory.socket_path)
            pid = await _hello(control, config.start_timeout_seconds)
            streams = await asyncio.open_connection(sock=control, limit=_LONGEST_ANSWER)
            return cls(template, directory, psutil.Process(pid), *streams)
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
        """Process id of the outermost process."""
        return self._process.pid

    async def order(self, do: str, task_id: str, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Have the server do something; ``files`` are those of a saved world. Raises EOFError when it is gone."""
        self._members = None
        order = {"do": do, "task_id": task_id} | ({} if files is None else {"files": dict(files)})
        self._writer.write(json.dumps(order).encode() + b"\n")
        await self._writer.drain()
        answer = await self._answers.get()
        if answer is None:
            raise EOFError
        return answer

    async def post(self, path: str, body: dict[str, object], max_bytes: int) -> tuple[int, dict[str, Any]]:
        """POST JSON to the task's process. Returns status and answer.

        Raises: ValueError when the answer is larger than ``max_bytes`` (reading stops there) or is not a JSON object.
        """
        received = bytearray()
        async with self._http.stream("POST", path, json=body) as response:
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > max_bytes:
                    raise ValueError(f"an answer of more than {max_bytes} bytes")
        answer = json.loads(received)
        if not isinstance(answer, dict):
            raise ValueError("an answer that is not a JSON object")
        return response.status_code, answer

    async def watch(self, max_memory_mib: float) -> Ending:
        """Wait until the task's process has ended, or end it when it outgrows what it may use, a cell or none."""
        while True:
            done, _ = await asyncio.wait({self._exited}, timeout=_WATCH_SECONDS)
            if done:
                return self._exited.result()
            memory, processes = self.usage()
            reason = None
            if memory > max_memory_mib:
                reason = f"its processes held {memory:.0f} MiB of memory, more than the {max_memory_mib} MiB allowed"
            elif processes > _MOST_PROCESSES:
                reason = f"it ran {processes} processes"
            # Where scratch is mounted this folder stays empty, and the mounts have a size.
            elif not _small(self._directory.path):
                reason = f"it wrote more than {SCRATCH_MIB} MiB or {_MOST_FILES} files, or where nobody can count them"
            if reason is not None:
                self._kill_tree()
                return Ending(reason, own=True)

    def usage(self) -> tuple[float, int]:
        """(resident MiB, processes) of everything below the outermost process, which only waits."""
        if self._members is None or self._tasks_can_fork:
            # To find children is to look at every process of the machine.
            self._members = self._tree()[1:]
        memory, count = 0, 0
        for process in self._members:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                count += 1
        return memory / (1 << 20), count

    def complaint(self) -> str:
        """The last line the server wrote before it died."""
        return last_line(self._directory.path)

    async def kill(self) -> None:
        """End the server and all its descendants and remove its folder."""
        self._listening.cancel()
        tree = self._kill_tree()
        self._writer.close()
        await self._http.aclose()
        await asyncio.to_thread(self._clean_up, tree)

    def _kill_tree(self) -> list[psutil.Process]:
        # In a process namespace the second process takes all others with it; elsewhere each is ended by itself.
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return tree

    def _clean_up(self, tree: list[psutil.Process]) -> None:
        psutil.wait_procs(tree, timeout=_GONE_SECONDS)
        self._directory.remove()

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.Error:
            return []

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                self._hear(json.loads(line))
        # A server that dies with an order unread resets the connection instead of ending it.
        except (OSError, ValueError, RecursionError) as error:
            log.debug("world server %d: %s", self.pid, error)
        self._end(Ending("the server died", own=False))
        self._answers.put_nowait(None)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["event"] == "exited":
            self._end(Ending(f"the task's process died (status {message['status']})", own=not message["killed"]))
            return
        if self._exited.done():
            # The end that was reported belongs to the task before this answer.
            self._exited = asyncio.get_running_loop().create_future()
        self._answers.put_nowait(message)

    def _end(self, ending: Ending) -> None:
        if not self._exited.done():
            self._exited.set_result(ending)


def _fork(template: TemplateProcess, spec: SlotSpec, control: socket.socket, socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, open(os.path.join(spec.directory, "stderr"), "wb") as stderr:
        listener.bind(socket_path)
        listener.listen(16)
        template.fork(spec.to_json(), control, listener, stderr.fileno())


async def _hello(control: socket.socket, timeout_seconds: float) -> int:
    """Wait for the server's first line. Returns the process id of its sender. Raises EOFError or TimeoutError."""
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
    """Whether what lies in a folder is within what a task may write; counting stops where it is not.

    Where this counts, tasks remove and rename nothing (`system_calls`), so all that is written is there to be found; a
    folder that cannot be listed is not one of AppWorld's.
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
        except FileNotFoundError:
            # The server has cleared it meanwhile.
            continue
        except OSError:
            return False
    return True

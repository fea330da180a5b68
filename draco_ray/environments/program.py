"""Runs an agent's program and all that it starts, with a time limit, and keeps the end of its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from draco_ray.environments.jail import linux

PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "TZ",
    "LANG",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "SSL_CERT_FILE",
)
"""Variables that every program gets, besides those that begin with ``LC_``."""
EPISODE_VARIABLE = "DRACO_EPISODE"
"""Environment variable by which processes that left their process group are found."""
_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.02
"""Interval between two checks whether the program has ended."""
_GONE_SECONDS = 10.0
"""Maximum wait for killed processes; one that hangs in the kernel may take longer."""


def passed_env_vars(names: Iterable[str]) -> dict[str, str]:
    """The variables of this process that are passed to a program: `PASSED` and ``names``."""
    passed = {*PASSED, *names}
    return {name: value for name, value in os.environ.items() if name in passed or name.startswith("LC_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended."""

    exit_code: int | None
    """As in `subprocess`, negative for a signal; None if it was ended at its time limit, or by ``until``."""
    output: str
    """The last part of what the program wrote to standard output."""
    errors: str
    """The last part of what the program wrote to standard error."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a program is started."""

    words: list[str]
    environment: dict[str, str]
    """All of the program's environment variables."""
    folder: Path
    """The program's working directory."""
    lifeline: Path | None = None
    """Path for the Unix socket by which a container is ended, see `_Lifeline`."""


class _Tail:
    """Keeps the last bytes of a pipe and reads it continuously, so that no writer blocks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = bytearray()
        self._cut = 0
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    def _read(self) -> bool:
        try:
            read = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return False
        if not read:
            asyncio.get_running_loop().remove_reader(self._reading)
        self._kept += read
        if (excess := len(self._kept) - self._most) > 0:
            del self._kept[:excess]
            self._cut += excess
        return bool(read)

    def finish(self) -> str:
        """Stop reading. Returns: the kept bytes as text, after a note if earlier bytes were dropped."""
        while self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        mark = f"[output cut: {self._cut} bytes before]\n" if self._cut else ""
        return mark + self._kept.decode("utf-8", "replace")


async def run_program(
    command: Command, *, told: str, seconds: float, most_bytes: int, until: asyncio.Future[None] | None = None
) -> ProgramResult:
    """Run a program in its own process group; when this returns, all processes that it started have ended.

    Args:
        told: text for its standard input.
        seconds: time limit, wall clock.
        most_bytes: bytes to keep of each output stream.
        until: the program is ended when this future is done.

    Raises: OSError if it cannot be started.
    """
    began = time.monotonic()
    mark = secrets.token_hex(16)
    output, errors = _Tail(most_bytes), _Tail(most_bytes)
    exit_code: int | None = None
    held = _Lifeline(command.lifeline) if command.lifeline is not None else None
    try:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(told.encode("utf-8", "replace"))
            stdin.seek(0)
            # Not asyncio's subprocess: this may run in the event loop of any thread, and starting is quick.
            process = subprocess.Popen(  # noqa: ASYNC220
                command.words,
                stdin=stdin,
                stdout=output.writing,
                stderr=errors.writing,
                cwd=command.folder,
                env={**command.environment, EPISODE_VARIABLE: mark},
                start_new_session=True,
                preexec_fn=linux.die_with_parent,
            )
        try:
            await _ended(process, seconds, until)
            exit_code = process.poll()
        finally:
            if held is not None:
                # End the container first, so that its engine can remove it properly.
                await asyncio.shield(held.cut(process))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            await asyncio.shield(asyncio.to_thread(end_strays, mark))
    finally:
        os.close(output.writing)
        os.close(errors.writing)
        said, complained = output.finish(), errors.finish()
    return ProgramResult(exit_code=exit_code, output=said, errors=complained, seconds=time.monotonic() - began)


class _Lifeline:
    """A Unix socket to which the first process of a container connects. When the connection ends, by `cut` or because
    this process was killed, that process ends the container. Killing the engine's client would not end it."""

    def __init__(self, path: Path) -> None:
        self._listening = unix_server(path)
        self._listening.setblocking(False)
        self._accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(self._listening))

    async def cut(self, client: subprocess.Popen[bytes]) -> None:
        """End the container; wait until it and the engine's client have ended."""
        loop = asyncio.get_running_loop()
        if self._accepting.done():
            connection, _ = self._accepting.result()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                # Process 1 of the container closes the connection when it has ended all other processes there.
                await asyncio.wait({loop.create_task(loop.sock_recv(connection, 1))}, timeout=_GONE_SECONDS)
            connection.close()
        self._accepting.cancel()
        # A container that is still being started finds no socket, and ends.
        self._listening.close()
        if client.poll() is None:
            await _ended(client, _GONE_SECONDS, None)


def unix_server(path: Path) -> socket.socket:
    """A Unix socket at a path that does not exist yet; any user may connect who can reach the path."""
    server = socket.socket(socket.AF_UNIX)
    # Bind by the folder's descriptor: a path below a long TMPDIR may be too long for a Unix socket.
    folder = os.open(path.parent, os.O_PATH)
    try:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    os.chmod(path, 0o666)
    server.listen(1024)
    return server


async def _ended(process: subprocess.Popen[bytes], seconds: float, until: asyncio.Future[None] | None) -> None:
    """Wait until the process has ended, its time is up, or ``until`` is done."""
    over = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < over:
        if until is not None and until.done():
            return
        await asyncio.sleep(_POLL_SECONDS)


def end_strays(mark: str) -> None:
    """Kill the processes that a program started, also those that left its group, and wait for them."""
    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and process.environ().get(EPISODE_VARIABLE) == mark:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, _GONE_SECONDS)

"""The host's side of the server of tools: starting it in the strongest jail there is, forking, asking, ending."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.jail.confine import JailSpec
from draco_ray.environments.jail.launch import SCRATCH_MIB, Levels, LevelUnavailable, last_line, launch, not_offered
from draco_ray.environments.tools.functions import MAX_STATE_BYTES
from draco_ray.environments.tools.options import ToolsOptions
from draco_ray.environments.tools.server import Setup
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

HARD_STOP = 1.25
"""Times ``environment.cell_timeout_seconds`` after which a call that cannot be interrupted costs the process."""
CODE = ("environments/tools",)
"""Of this package: what runs in a jail for tools."""
CPU_CALLS = 60
_STATUS_SHARE = 0.05
"""Of a call's time: how long its end may be asked after."""
_FAREWELL_SECONDS = 5.0


class ToolProcess:
    """A running server of tools, and the process that it forked last. Belongs to one event loop.

    What that process says may be written by code of the policy. The first line that does not fit ends it, and the
    server is not `alive` any more: the next task begins with another one.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: PrivateTempDir,
        control: socket.socket,
        config: EnvironmentConfig,
    ) -> None:
        self._process = process
        self._folder = folder
        self._control = control
        self._config = config
        # JSON spells a character with twelve bytes at most.
        self._longest = max(12 * config.max_output_bytes, MAX_STATE_BYTES) + (1 << 20)
        self._channel: socket.socket | None = None
        self._number = 0
        self.irregular = False
        """Whether a task has not gone as it should: no other one is begun then."""
        self.tools: list[dict[str, Any]] = []
        """Schemas of the functions."""
        self.hooks: frozenset[str] = frozenset()

    @classmethod
    async def start(cls, options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str]) -> ToolProcess:
        """Start a server and have it import the files of tools.

        Raises: ConfigError where these cannot be used; IsolationUnavailable where the host offers no level that
            ``environment.isolation`` allows; EnvironmentCrashed when it does not start.
        """
        levels = Levels(config.isolation)
        for level in levels:
            try:
                started = await cls._start(level, options, config, secrets)
            except LevelUnavailable as error:
                levels.refused(level, error)
                continue
            levels.reached(level)
            log.info("tools are isolated by: %s", level)
            return started
        raise IsolationUnavailable(f"tools cannot be confined: {levels}")

    @classmethod
    async def _start(
        cls, level: str, options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str]
    ) -> ToolProcess:
        folder = PrivateTempDir()
        directory = str(folder.path)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        files = [os.path.abspath(path) for path in options.tools]
        spec = JailSpec(
            level=level,
            control_fd=theirs.fileno(),
            directory=directory,
            data="",
            scratch_mib=SCRATCH_MIB,
            output_bytes=config.max_output_bytes,
            module="draco_ray.environments.tools.server",
            code=CODE,
            shown=(*files, *(os.path.abspath(path) for path in options.reads)),
            network=options.network,
        )
        with theirs:
            started = cls(launch(spec), folder, control, config)
        setup = Setup(
            files=files,
            secrets=dict(secrets),
            memory_mib=config.max_memory_mib,
            cpu_seconds=math.ceil(CPU_CALLS * config.cell_timeout_seconds),
            timeout_seconds=config.cell_timeout_seconds,
            hook_seconds=config.start_timeout_seconds,
            programs=options.network or options.programs,
        )
        try:
            started._send_channel()
            answer = json.loads(await started._exchange(asdict(setup), config.start_timeout_seconds))
        except TimeoutError:
            await started.kill()
            seconds = config.start_timeout_seconds
            raise EnvironmentCrashed(f"the server of tools did not start within {seconds:g} s") from None
        except (EOFError, OSError):
            complaint = last_line(directory)
            await started.kill()
            status = started._process.returncode
            if not_offered(status, complaint):
                raise LevelUnavailable(complaint) from None
            raise EnvironmentCrashed(f"the server of tools did not start (status {status}): {complaint}") from None
        except BaseException:
            await started.kill()
            raise
        if "unusable" in answer:
            await started.kill()
            raise ConfigError(answer["unusable"])
        started.tools, started.hooks = answer["tools"], frozenset(answer["hooks"])
        return started

    async def fork(self) -> None:
        """Fork a process for a task or an evaluation, after whatever ran before has been ended.

        Raises: EnvironmentCrashed when the server is gone.
        """
        await self._order(fork=True, seconds=self._config.start_timeout_seconds)

    async def end(self) -> None:
        """End the process that was forked last, and all that it has started; the server stays. Raises: as `fork`."""
        seconds = self._config.start_timeout_seconds
        if self._channel is not None and await self._order(fork=False, seconds=seconds) != -signal.SIGKILL:
            # It had ended by itself.
            self.irregular = True

    async def ask(self, order: Mapping[str, Any], what: str, timeout_seconds: float) -> dict[str, Any]:
        """Give the process that was forked last an order and return its answer; ``what`` is asked, for messages.

        Raises: EnvironmentCrashed where it has ended, has said anything unasked, or does not answer as it should in
            time.
        """
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(answer := json.loads(await self.ask_unread(order, what, timeout_seconds)), dict):
                return answer
        raise EnvironmentCrashed(f"{what} answered what cannot be read")

    async def ask_unread(self, order: Mapping[str, Any], what: str, timeout_seconds: float) -> bytes:
        """`ask` whose answer is not read."""
        try:
            return await self._exchange(order, timeout_seconds)
        except TimeoutError:
            raise EnvironmentCrashed(f"{what} could not be stopped after {timeout_seconds:g} s") from None
        except EOFError as error:
            reason = f"{what} {error}"
        with contextlib.suppress(EnvironmentCrashed):
            reason += f" (status {await self._order(fork=False, seconds=_STATUS_SHARE * timeout_seconds)})"
        raise EnvironmentCrashed(reason)

    @property
    def alive(self) -> bool:
        """Whether another task may be begun in it."""
        return not self.irregular and self._process.poll() is None

    async def kill(self) -> None:
        """End it and everything it has started, and remove its folder."""
        self.irregular = True
        for each in (self._control, self._channel):
            if each is not None:
                each.close()
        await asyncio.to_thread(self._kill)

    def _kill(self) -> None:
        # The end of the control socket ends the server, which first ends what has left its process group.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_SECONDS)
        if self._process.returncode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.remove()

    async def _order(self, *, fork: bool, seconds: float) -> int:
        """Have the server end a process and, for ``fork``, start another. Returns: the exit status of the former."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                if self._channel is not None:
                    self._channel.close()
                    self._channel = None
                if fork:
                    self._send_channel()
                else:
                    await loop.sock_sendall(self._control, b"end")
                return int(await loop.sock_recv(self._control, 16))
        except BaseException as error:
            # An answer that comes late would be taken for the next one.
            self.irregular = True
            if not isinstance(error, OSError | ValueError):  # TimeoutError is an OSError, and no answer is no number.
                raise
            complaint = last_line(str(self._folder.path))
            raise EnvironmentCrashed(f"the server of tools is gone: {complaint}") from None

    def _send_channel(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])

    async def _exchange(self, order: Mapping[str, Any], timeout_seconds: float) -> bytes:
        """Give an order and receive its answer. Raises: TimeoutError; EOFError, why, where it is not that and alone."""
        loop, channel, received = asyncio.get_running_loop(), self._channel, bytearray()
        self._number += 1
        number = b"%d " % self._number
        line = number + json.dumps(order).encode() + b"\n"
        try:
            if channel is None:
                raise ConnectionError
            with contextlib.suppress(BlockingIOError):
                if channel.recv(1):
                    raise EOFError("said what it was not asked for")
                raise ConnectionError
            async with asyncio.timeout(timeout_seconds):
                await loop.sock_sendall(channel, line)
                while not received.endswith(b"\n"):
                    part = await loop.sock_recv(channel, 1 << 16)
                    if not part:
                        raise ConnectionError
                    if len(received) > self._longest:
                        raise EOFError(f"answered more than {self._longest} bytes")
                    received += part
        except ConnectionError:
            raise EOFError("ended its process") from None
        if not received.startswith(number) or received.index(b"\n") + 1 < len(received):
            raise EOFError("said what it was not asked for")
        return bytes(received[len(number) :])

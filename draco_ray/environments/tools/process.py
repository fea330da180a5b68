"""The host's side of the tool server: starts it in the strongest available jail, forks it, and sends orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.jail.confine import JailSpec
from draco_ray.environments.jail.fork_client import ForkClient
from draco_ray.environments.jail.launch import (
    SCRATCH_MIB,
    IsolationLevels,
    LevelUnavailable,
    is_level_unavailable,
    last_line,
    launch,
)
from draco_ray.environments.tools.functions import MAX_STATE_BYTES
from draco_ray.environments.tools.options import McpServerOptions, ToolsOptions
from draco_ray.environments.tools.server import Setup
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

HARD_STOP = 1.25
"""Multiple of ``environment.cell_timeout_seconds`` after which a call that cannot be interrupted is killed."""
JAILED_CODE = ("environments/tools",)
"""Files of this package that run in a jail for tools."""
CPU_CALLS = 60
_PROGRAMS = ("/usr", "/bin", "/etc/alternatives")
"""Host folders that commands can read, because they contain the programs that a command may start."""
_STATUS_SHARE = 0.05
"""Time limit for asking the server how a call's process ended, as a fraction of the call's own time limit."""
_FAREWELL_SECONDS = 5.0


class ToolProcess(ForkClient):
    """A running tool server and the process it forked last."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: PrivateTempDir,
        control: socket.socket,
        config: EnvironmentConfig,
    ) -> None:
        super().__init__(control)
        self._process = process
        self._folder = folder
        self._config = config
        # JSON encodes a character with at most twelve bytes.
        self._longest = max(12 * config.max_output_bytes, MAX_STATE_BYTES) + (1 << 20)
        self.irregular = False
        """Whether something went wrong, so that this server starts no other task."""

    @classmethod
    async def _start(
        cls,
        config: EnvironmentConfig,
        secrets: Mapping[str, str],
        *,
        shown: Iterable[str | Path],
        network: bool,
        programs: bool,
        files: Iterable[str | Path] = (),
        command: Iterable[str] = (),
    ) -> tuple[Self, dict[str, Any]]:
        """A started server and its answer to `Setup`; ``shown``: paths that it can see, besides ``files``.

        Raises: ConfigError: a file cannot be used; IsolationUnavailable: the host offers no isolation level that
            ``environment.isolation`` allows; EnvironmentCrashed: the server does not start.
        """
        setup = Setup(
            files=[*map(os.path.abspath, files)],
            secrets=dict(secrets),
            memory_mib=config.max_memory_mib,
            cpu_seconds=math.ceil(CPU_CALLS * config.cell_timeout_seconds),
            timeout_seconds=config.cell_timeout_seconds,
            hook_seconds=config.start_timeout_seconds,
            programs=programs,
            command=[*command],
        )
        seen = (*setup.files, *map(os.path.abspath, shown))
        levels = IsolationLevels(config.isolation)
        for level in levels:
            with levels.trying(level):
                started = await cls._start_at(level, setup, config, seen, network)
                log.info("isolation of tools: %s", level)
                return started
        raise IsolationUnavailable(f"tools cannot be isolated: {levels}")

    @classmethod
    async def _start_at(
        cls, level: str, setup: Setup, config: EnvironmentConfig, shown: tuple[str, ...], network: bool
    ) -> tuple[Self, dict[str, Any]]:
        folder = PrivateTempDir()
        directory = str(folder.path)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        spec = JailSpec(
            level=level,
            control_fd=theirs.fileno(),
            directory=directory,
            data="",
            scratch_mib=SCRATCH_MIB,
            output_bytes=config.max_output_bytes,
            module="draco_ray.environments.tools.server",
            code=JAILED_CODE,
            shown=shown,
            network=network,
        )
        with theirs:
            started = cls(launch(spec), folder, control, config)
        try:
            started.send_channel("setup")
            seconds = config.start_timeout_seconds
            answer = json.loads(await started.exchange(asdict(setup), seconds, started._longest))
        except TimeoutError:
            await started.kill()
            raise EnvironmentCrashed(f"the tools' server did not start within {seconds:g} s") from None
        except (EOFError, OSError):
            complaint = last_line(directory)
            await started.kill()
            status = started._process.returncode
            if is_level_unavailable(status, complaint):
                raise LevelUnavailable(complaint) from None
            raise EnvironmentCrashed(f"the tools' server did not start (status {status}): {complaint}") from None
        except BaseException:
            await started.kill()
            raise
        if "unusable" in answer:
            await started.kill()
            raise ConfigError(answer["unusable"])
        return started, answer

    async def fork(self) -> None:
        """End the previous process and fork one for a task or an evaluation.

        Raises: EnvironmentCrashed: the server is lost.
        """
        await self._ordered(self._config.start_timeout_seconds, fork=True)

    async def end(self) -> int | None:
        """End the last forked process and all it started; the server keeps running. Raises: as `fork`.

        Returns: the process's exit status; None if there was no process, or this call had to kill it.
        """
        if self._channel is None:
            return None
        return await self._ordered(self._config.start_timeout_seconds, fork=False)

    @property
    def complaint(self) -> str:
        """The last line of the process's standard error."""
        return last_line(str(self._folder.path))

    @property
    def alive(self) -> bool:
        """Whether the server can run another task."""
        return not self.irregular and self._process.poll() is None

    async def kill(self) -> None:
        """End the server and everything it started, and remove its folder."""
        self.irregular = True
        self.close()
        await asyncio.to_thread(self._kill)

    def _kill(self) -> None:
        # Closing the control socket ends the server, which first ends processes that left its process group.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_SECONDS)
        if self._process.returncode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.remove()

    async def _ordered(self, seconds: float, *, fork: bool) -> int | None:
        try:
            status, _ = await self.order("fork" if fork else "end", seconds, fork=fork)
        except BaseException as error:
            self.irregular = True
            if not isinstance(error, OSError):
                raise
            raise EnvironmentCrashed(f"the tools' server has ended: {self.complaint}") from None
        return status


class FunctionProcess(ToolProcess):
    """A server that has imported the tools files.

    Its process may run the policy's code, so its output is not trusted. At its first invalid line the process is ended,
    and the server is no longer `alive`: the next task starts another server.
    """

    tools: list[dict[str, Any]]
    """Schemas of the functions."""
    hooks: frozenset[str]

    @classmethod
    async def start(cls, options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str]) -> Self:
        """Start a server. Raises: as `_start`."""
        programs = options.network or options.programs
        started, answer = await cls._start(
            config, secrets, shown=options.reads, network=options.network, programs=programs, files=options.tools
        )
        started.tools, started.hooks = answer["tools"], frozenset(answer["hooks"])
        return started

    async def end(self) -> int | None:
        """See `ToolProcess`. If the process had already ended by itself, this server starts no other task."""
        status = await super().end()
        self.irregular |= status is not None
        return status

    async def ask(self, order: Mapping[str, Any], what: str, timeout_seconds: float) -> dict[str, Any]:
        """Send the last forked process an order and return its answer; ``what`` names it in messages.

        Raises: EnvironmentCrashed: the process ended, wrote something else, or did not answer in time.
        """
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(answer := json.loads(await self.ask_unread(order, what, timeout_seconds)), dict):
                return answer
        raise EnvironmentCrashed(f"the reply of {what} cannot be parsed")

    async def ask_unread(self, order: Mapping[str, Any], what: str, timeout_seconds: float) -> bytes:
        """`ask` that returns the answer unparsed."""
        try:
            return await self.exchange(order, timeout_seconds, self._longest)
        except TimeoutError:
            raise EnvironmentCrashed(
                f"{what} could not be stopped after its time limit of {timeout_seconds:g} s"
            ) from None
        except EOFError as error:
            reason = f"{what} {error}"
        with contextlib.suppress(EnvironmentCrashed):
            status = await self._ordered(_STATUS_SHARE * timeout_seconds, fork=False)
            reason += f" (status {status})" if status is not None else ""
        raise EnvironmentCrashed(reason)


class CommandProcess(ToolProcess):
    """A server whose processes run the command of an MCP server."""

    @classmethod
    async def start(
        cls, command: McpServerOptions, options: ToolsOptions, config: EnvironmentConfig, secrets: Mapping[str, str]
    ) -> Self:
        """Start a server. Raises: as `_start`."""
        words, programs = _words(command)
        shown = [*programs, *map(str, command.reads)]
        started, _ = await cls._start(
            config, secrets, shown=shown, network=options.network, programs=True, command=words
        )
        return started

    @property
    def channel(self) -> socket.socket:
        """The socket that is standard input and output of the command that was forked last."""
        assert self._channel is not None
        return self._channel

    async def fork(self) -> None:
        """See `ToolProcess`."""
        self.hang_up()
        await super().fork()

    async def end(self) -> int | None:
        """See `ToolProcess`."""
        self.hang_up()
        return await super().end()


def _words(server: McpServerOptions) -> tuple[list[str], list[str]]:
    """An MCP server's command with the full path of its program, and the host paths of programs that it must see."""
    name, *rest = server.command
    # Uses this interpreter, which has the mcp package.
    program = sys.executable if name in ("python", "python3") else shutil.which(name)
    shown = list(filter(os.path.exists, _PROGRAMS))
    if program is not None and not program.startswith(("/usr/", "/bin/")):
        shown.append(program)
    return [program or name, *rest], shown

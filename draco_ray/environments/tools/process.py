"""The host's side of the process that runs tools: starting it in the strongest jail there is, asking it, ending it."""

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
from draco_ray.environments.tools.options import ToolsOptions
from draco_ray.environments.tools.server import Setup
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable, WorldBroken
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

HARD_STOP = 1.25
"""Times ``environment.cell_timeout_seconds`` after which a call that cannot be interrupted costs the process."""
CODE = ("environments/tools",)
"""Of this package: what runs in a jail for tools."""
CPU_CALLS = 60


class ToolProcess:
    """A running server of tools. Belongs to one event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: PrivateTempDir,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._folder = folder
        self._reader = reader
        self._writer = writer
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
        control, theirs = socket.socketpair()
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
        process = launch(spec)
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=control, limit=8 * config.max_output_bytes + (1 << 20))
        started = cls(process, folder, reader, writer)
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
            answer = await started.ask(asdict(setup), config.start_timeout_seconds)
        except EOFError:
            complaint = last_line(directory)
            await started.kill()
            status = process.returncode
            if not_offered(status, complaint):
                raise LevelUnavailable(complaint) from None
            raise EnvironmentCrashed(f"the process of tools did not start (status {status}): {complaint}") from None
        except BaseException:
            await started.kill()
            raise
        if "unusable" in answer:
            await started.kill()
            raise ConfigError(answer["unusable"])
        started.tools, started.hooks = answer["ready"]["tools"], frozenset(answer["ready"]["hooks"])
        return started

    async def ask(self, order: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Give an order and return its answer.

        Raises: EOFError when it is gone; EnvironmentCrashed when it does not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                self._writer.write(json.dumps(order).encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
        except TimeoutError:
            raise EnvironmentCrashed(f"the process of tools did not answer within {timeout_seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise EOFError(str(error)) from error
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask_task(self, order: Mapping[str, Any], what: str, timeout_seconds: float) -> dict[str, Any]:
        """`ask` of a task that is open. Raises: WorldBroken when ``what`` ended its process, or cannot be stopped."""
        try:
            answer = await self.ask(order, timeout_seconds)
        except EnvironmentCrashed:
            await self.kill()
            raise WorldBroken(f"{what} could not be stopped after {timeout_seconds:g} s") from None
        except EOFError:
            await self.kill()
            raise EnvironmentCrashed(f"the process of tools is gone: {last_line(str(self._folder.path))}") from None
        if "died" in answer:
            raise WorldBroken(f"{what} ended its process (status {answer['died']})")
        return answer

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None and not self._reader.at_eof()

    async def kill(self) -> None:
        """End it and everything it has started, and remove its folder."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._folder.remove)

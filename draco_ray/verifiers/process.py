"""The host's side of a `bridge`: starts its process, and sends orders through a socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.jail import linux
from draco_ray.environments.program import MARK, end_strays, passed_environment
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.verifiers.options import VerifiersOptions, told_to_bridge, verifiers_python

_BRIDGE = Path(__file__).with_name("bridge.py")
_PASSED = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "NLTK_DATA", "UV_CACHE_DIR", "XDG_CACHE_HOME")
"""Environment variables with the locations of data, which are passed on to verifiers."""
_LIST_SECONDS = 900.0
"""Time limit for loading a taskset, including a download of its data."""
_END_SECONDS = 15.0
_LONGEST_LINE = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Contents of a taskset."""

    splits: Mapping[str, list[str]]
    instructions: Mapping[str, str]
    """The instruction of each task, by its id."""
    rewarded: bool
    """Whether the taskset or environment computes rewards."""
    tools: str | None
    """The taskset or harness that offers tools to the policy, if known."""


@functools.cache
def listing(told: str, python: str, passed: tuple[str, ...]) -> Listing:
    """List the tasks with a short-lived process of verifiers' Python.

    Args:
        told: see `told_to_bridge`.
        python: of verifiers' virtual environment.
        passed: names of environment variables.

    Raises: ConfigError: one line; verifiers is missing or of another version, or the taskset or its requirements are
        missing.
    """
    answer = _asked("taskset", "tasks", told, python, passed)
    return Listing(
        splits=answer["splits"], instructions=answer["tasks"], rewarded=answer["rewarded"], tools=answer["tools"]
    )


@functools.cache
def check_renderer(told: str, python: str, passed: tuple[str, ...], *, tokenizer: str, offers: str) -> None:
    """Check that a model's template can express tools.

    Args:
        told, python, passed: see `listing`.
        tokenizer: the model's folder or hub name.
        offers: what offers the tools, for the message.

    Raises: ConfigError: one line.
    """
    told = json.dumps({**json.loads(told), "tokenizer": tokenizer, "offers": offers})
    _asked("tokenizer", "renderer", told, python, passed)


def _asked(what: str, mode: str, told: str, python: str, passed: tuple[str, ...]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [python, str(_BRIDGE), mode],
            input=told,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIST_SECONDS,
            env=_environment(python, passed),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"verifiers: the {what} could not be loaded within {_LIST_SECONDS:g} s") from None
    except OSError as error:
        raise ConfigError(f"verifiers: {python} cannot be started: {error}") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = " ".join(done.stderr.split())[-300:]
        raise ConfigError(
            f"verifiers: the {what} could not be loaded (status {done.returncode}); last output: {last}"
        ) from None
    if "error" in answer:
        raise ConfigError(f"verifiers: {answer['error']}")
    return dict(answer)


class BridgeProcess:
    """A running bridge, for use in one event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        mark: str,
        said: Any,
        folder: PrivateTempDir,
        streams: tuple[Any, asyncio.StreamWriter],
    ) -> None:
        self._process, self._mark, self._said, self._folder = process, mark, said, folder
        self._reader, self._writer = streams
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.played = 0
        """Number of episodes so far."""
        self.alive = True
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, options: VerifiersOptions, config: EnvironmentConfig, *, ground_truth: bool) -> BridgeProcess:
        """Start a bridge with verifiers' environment server.

        Raises: WorldError: verifiers' Python is missing; EnvironmentCrashed: the bridge does not answer; the message
            quotes its output.
        """
        python = verifiers_python(options)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        mark = secrets.token_hex(16)
        said = tempfile.TemporaryFile()  # noqa: SIM115
        folder = PrivateTempDir()
        with theirs, tempfile.TemporaryFile() as stdin:
            stdin.write(told_to_bridge(options, config, ground_truth=ground_truth).encode())
            stdin.seek(0)
            # subprocess instead of asyncio's: see `draco_ray.environments.program`.
            process = subprocess.Popen(  # noqa: ASYNC220
                [python, str(_BRIDGE), "serve", str(theirs.fileno()), str(folder.path)],
                stdin=stdin,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                env={**_environment(python, tuple(options.pass_environment)), MARK: mark},
                start_new_session=True,
                preexec_fn=linux.die_with_parent,
            )
        streams = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        try:
            async with asyncio.timeout(2 * config.start_timeout_seconds):
                first = json.loads(await streams[0].readline() or "{}")
        except (TimeoutError, OSError, ValueError) as error:
            first = {"error": f"it did not answer: {type(error).__name__}"}
        started = cls(process, mark, said, folder, streams)
        if "ready" not in first:
            why = first.get("error") or f"it ended; last output: {started.last_words()}"
            await started.kill()
            raise EnvironmentCrashed(f"verifiers' environment server cannot be started: {why}")
        return started

    @property
    def busy(self) -> bool:
        """Whether an episode is running."""
        return bool(self._waiting)

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Play an episode; cancelling the call ends it.

        Raises: EnvironmentCrashed: the process is lost, or cannot play the episode.
        """
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self.played += 1
        try:
            await self._send({**order, "do": "play", "number": number})
            told = await answer
        except asyncio.CancelledError:
            with contextlib.suppress(EnvironmentCrashed):
                await self._send({"do": "cancel", "number": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "lost" in told:
            raise EnvironmentCrashed(f"verifiers: {told['lost']}")
        return told

    def last_words(self) -> str:
        """The end of the output of the bridge and verifiers."""
        size = os.fstat(self._said.fileno()).st_size
        text = os.pread(self._said.fileno(), 4000, max(0, size - 4000)).decode("utf-8", "replace")
        return " ".join(text.split())[-300:]

    async def kill(self) -> None:
        """End the process and its descendants; it first gets time to end by itself."""
        self.alive = False
        self._listening.cancel()
        self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentCrashed("verifiers' environment server was ended"))
        await asyncio.shield(asyncio.to_thread(self._end))

    def _end(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_strays(self._mark)
        self._folder.remove()
        self._said.close()

    async def _send(self, order: Mapping[str, Any]) -> None:
        if not self.alive:
            raise EnvironmentCrashed("verifiers' environment server has ended")
        try:
            self._writer.write(json.dumps(order).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise EnvironmentCrashed(f"verifiers' environment server has ended: {error}") from None

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                told = json.loads(line)
                if "error" in told:
                    break
                waiting = self._waiting.get(told["number"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
        except (OSError, ValueError):
            pass
        self.alive = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    EnvironmentCrashed(f"verifiers' environment server died; last output: {self.last_words()}")
                )


@dataclass(eq=False)
class Shared:
    """A bridge shared by all slots of a process with the same options.

    It is replaced when it dies or has played the maximum number of episodes.
    """

    options: VerifiersOptions
    config: EnvironmentConfig
    ground_truth: bool
    users: set[int] = field(default_factory=set)
    _bridge: BridgeProcess | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """See `BridgeProcess.play`. Raises: also as `BridgeProcess.start`."""
        bridge = await self._running()
        try:
            return await bridge.play(order)
        finally:
            if bridge is not self._bridge and not bridge.busy and bridge.alive:
                self._end(bridge)

    async def stop(self) -> None:
        """End the bridge."""
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            await bridge.kill()
        await asyncio.gather(*self._ending)

    async def _running(self) -> BridgeProcess:
        async with self._starting:
            bridge, most = self._bridge, self.config.recycle_after_tasks * self.config.slots_per_worker
            if bridge is not None and bridge.alive and bridge.played < most:
                return bridge
            self._bridge = None
            if bridge is not None and not bridge.busy:
                self._end(bridge)
            self._bridge = await BridgeProcess.start(self.options, self.config, ground_truth=self.ground_truth)
            return self._bridge

    def _end(self, bridge: BridgeProcess) -> None:
        ending = asyncio.ensure_future(bridge.kill())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


_SHARED: dict[tuple[int, str], Shared] = {}


def shared_bridge(options: VerifiersOptions, config: EnvironmentConfig, *, ground_truth: bool, user: object) -> Shared:
    """This event loop's bridge for these options, which ``user`` shares until `leave_bridge`."""
    told = told_to_bridge(options, config, ground_truth=ground_truth)
    key = (id(asyncio.get_running_loop()), told)
    shared = _SHARED.setdefault(key, Shared(options, config, ground_truth))
    shared.users.add(id(user))
    return shared


async def leave_bridge(user: object) -> None:
    """Release the bridges of ``user``; those without other users end."""
    for key, shared in list(_SHARED.items()):
        if id(user) in shared.users:
            shared.users.discard(id(user))
            if not shared.users:
                _SHARED.pop(key)
                await shared.stop()


def _environment(python: str, names: tuple[str, ...]) -> dict[str, str]:
    """Environment variables of verifiers' processes, with its programs first on PATH."""
    kept = passed_environment((*_PASSED, *names))
    # The packages on this process's PYTHONPATH are incompatible with verifiers' environment.
    kept.pop("PYTHONPATH", None)
    folder = Path(python).parent
    path = f"{folder}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(folder.parent), "PYTHONUNBUFFERED": "1"}

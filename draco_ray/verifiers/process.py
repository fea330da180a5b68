"""The host's side of a `bridge`: starts its process, and requests one episode per connection to its socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.program import EPISODE_VARIABLE, end_strays, passed_env_vars
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.verifiers.options import VerifiersOptions, bridge_options_json, verifiers_python

_BRIDGE = Path(__file__).with_name("bridge.py")
_PASSED = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "NLTK_DATA", "UV_CACHE_DIR", "XDG_CACHE_HOME")
"""Environment variables about the location of data and caches, which are passed on to verifiers."""
_LIST_SECONDS = 900.0
"""Time limit for loading a taskset, including a download of its data."""
_END_SECONDS = 15.0


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
def list_taskset(told: str, python: str, passed: tuple[str, ...]) -> Listing:
    """List the tasks with a short-lived process of verifiers' Python.

    Args:
        told: see `bridge_options_json`.
        python: interpreter of verifiers' virtual environment.
        passed: names of environment variables.

    Raises: ConfigError: one line; verifiers is missing or of another version, or the taskset or its requirements are
        missing.
    """
    try:
        done = subprocess.run(
            [python, str(_BRIDGE), "tasks"],
            input=told,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIST_SECONDS,
            env=_environment(python, passed),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"verifiers: the taskset could not be loaded within {_LIST_SECONDS:g} s") from None
    except OSError as error:
        raise ConfigError(f"verifiers: {python} cannot be started: {error}") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = " ".join(done.stderr.split())[-300:]
        raise ConfigError(
            f"verifiers: the taskset could not be loaded (status {done.returncode}); last output: {last}"
        ) from None
    if "error" in answer:
        raise ConfigError(f"verifiers: {answer['error']}")
    return Listing(
        splits=answer["splits"], instructions=answer["tasks"], rewarded=answer["rewarded"], tools=answer["tools"]
    )


class BridgeProcess:
    """A running bridge."""

    def __init__(
        self, words: list[str], environment: dict[str, str], ours: asyncio.StreamWriter, theirs: socket.socket
    ) -> None:
        """Start the process; it ends when ``ours``, the other end of ``theirs``, is closed. Raises: OSError."""
        self._mark = secrets.token_hex(16)
        self._folder = PrivateTempDir()
        self._output = self._folder.path / "output"
        self._control = ours
        with self._output.open("wb") as output:
            # Not asyncio's subprocess, for the reason stated in `draco_ray.environments.program`.
            self._process = subprocess.Popen(
                [*words, str(self._folder.path)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=output,
                env={**environment, EPISODE_VARIABLE: self._mark},
                start_new_session=True,
            )
        self.played = self.playing = 0
        """Number of episodes so far, and of those that are running."""

    @classmethod
    async def start(cls, options: VerifiersOptions, config: EnvironmentConfig, *, ground_truth: bool) -> BridgeProcess:
        """Start a bridge, and with it verifiers' environment.

        Raises: ConfigError: verifiers' Python is missing; EnvironmentCrashed: the bridge does not answer; the message
            quotes its output.
        """
        python = verifiers_python(options)
        mine, theirs = socket.socketpair()
        reader, control = await asyncio.open_connection(sock=mine)
        with theirs:
            words = [python, str(_BRIDGE), "serve"]
            started = cls(words, _environment(python, tuple(options.pass_environment)), control, theirs)
        control.write(bridge_options_json(options, ground_truth=ground_truth).encode() + b"\n")
        try:
            async with asyncio.timeout(2 * config.start_timeout_seconds):
                line = await reader.readline()
            problem = json.loads(line).get("error") if line else f"it ended; last output: {started.last_words()}"
        except (TimeoutError, OSError, ValueError) as error:
            problem = f"it did not answer: {type(error).__name__}"
        except asyncio.CancelledError:
            await started.kill()
            raise
        if problem:
            await started.kill()
            raise EnvironmentCrashed(f"verifiers' environment server cannot be started: {problem}")
        return started

    @property
    def alive(self) -> bool:
        """Whether the bridge's process is running."""
        return self._process.poll() is None

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Play an episode; cancelling the call ends it.

        Raises: EnvironmentCrashed: the process is lost, or cannot play the episode.
        """
        self.played += 1
        self.playing += 1
        try:
            reader, writer = await asyncio.open_unix_connection(self._folder.path / "episodes")
            try:
                writer.write(json.dumps(order).encode() + b"\n")
                told = dict(json.loads(await reader.read()))
            finally:
                writer.close()
        except (OSError, ValueError):
            raise EnvironmentCrashed(f"verifiers' environment server died; last output: {self.last_words()}") from None
        finally:
            self.playing -= 1
        if "lost" in told:
            raise EnvironmentCrashed(f"verifiers: {told['lost']}")
        return told

    def last_words(self) -> str:
        """The end of the bridge's output."""
        with contextlib.suppress(OSError), self._output.open("rb") as output:
            output.seek(max(0, os.fstat(output.fileno()).st_size - 4000))
            return " ".join(output.read().decode("utf-8", "replace").split())[-300:]
        return ""

    async def kill(self) -> None:
        """End the process and its descendants; the process first gets time to end by itself."""
        self._control.close()
        await asyncio.shield(asyncio.to_thread(self._end))

    def _end(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_strays(self._mark)
        self._folder.remove()


class SharedBridge:
    """The bridge of all slots of a process that have the same options.

    It is replaced when it has ended, or has played the maximum number of episodes.
    """

    def __init__(self, options: VerifiersOptions, config: EnvironmentConfig, *, ground_truth: bool) -> None:
        self._start = functools.partial(BridgeProcess.start, options, config, ground_truth=ground_truth)
        self._most = config.recycle_after_tasks * config.slots_per_worker
        self._bridges: list[BridgeProcess] = []
        """Running bridges: the last one plays new episodes, earlier ones finish the episodes that they play."""
        self._starting = asyncio.Lock()

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """See `BridgeProcess.play`. Raises: also as `BridgeProcess.start`."""
        async with self._starting:
            if not self._bridges or not self._bridges[-1].alive or self._bridges[-1].played >= self._most:
                self._bridges.append(await self._start())
            bridge = self._bridges[-1]
        try:
            return await bridge.play(order)
        finally:
            done = [each for each in self._bridges[:-1] if not each.playing]
            self._bridges = [each for each in self._bridges if each not in done]
            await asyncio.gather(*(each.kill() for each in done))

    async def stop(self) -> None:
        """End the bridge."""
        bridges, self._bridges = self._bridges, []
        await asyncio.gather(*(each.kill() for each in bridges))


_SHARED: dict[tuple[int, str], SharedBridge] = {}


def _key(options: VerifiersOptions, ground_truth: bool) -> tuple[int, str]:
    return id(asyncio.get_running_loop()), bridge_options_json(options, ground_truth=ground_truth)


def shared_bridge(options: VerifiersOptions, config: EnvironmentConfig, *, ground_truth: bool) -> SharedBridge:
    """This event loop's bridge for these options."""
    return _SHARED.setdefault(_key(options, ground_truth), SharedBridge(options, config, ground_truth=ground_truth))


async def end_bridge(options: VerifiersOptions, *, ground_truth: bool) -> None:
    """End this event loop's bridge for these options, for all that share it; does nothing if there is none."""
    shared = _SHARED.pop(_key(options, ground_truth), None)
    if shared is not None:
        await shared.stop()


def _environment(python: str, names: tuple[str, ...]) -> dict[str, str]:
    """Environment variables of verifiers' processes, with its programs first on PATH."""
    kept = passed_env_vars((*_PASSED, *names))
    # The packages on this process's PYTHONPATH are incompatible with verifiers' environment.
    kept.pop("PYTHONPATH", None)
    folder = Path(python).parent
    path = f"{folder}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(folder.parent), "PYTHONUNBUFFERED": "1"}

"""The host's side of a `world_template`: starts it in the strongest available jail and shares it among slots.

All slots of a process with the same interpreter, isolation, data root and output limit fork from one template, so
AppWorld is loaded once. The template starts with the first slot that needs it and ends with this process.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from draco_ray.environments.jail.confine import JailSpec
from draco_ray.environments.jail.launch import (
    SCRATCH_MIB,
    IsolationLevels,
    LevelUnavailable,
    is_level_unavailable,
    last_line,
    launch,
)
from draco_ray.errors import EnvironmentCrashed, IsolationUnavailable
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

_SIGNALLED = 128
"""Exit statuses from this value on mean a signal, which does not tell whether the host offers the isolation level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateKey:
    """The settings that slots must share to use the same template."""

    python: str
    isolation: str
    """An isolation level, or ``auto``."""
    data: Path
    """The data root's ``data`` folder."""
    output_bytes: int


_templates: dict[TemplateKey, TemplateProcess] = {}
_starting = threading.Lock()
"""Other slots wait while the first one starts a template."""


class _NotLoaded(LevelUnavailable):
    """AppWorld did not load at an isolation level, but the level may be available: the cause may be temporary."""


class TemplateProcess:
    """A running template; thread-safe."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, folder: PrivateTempDir, level: str
    ) -> None:
        self.level = level
        self.system_calls_refused = False
        """Whether tasks are refused some system calls (`system_calls`), e.g. those that start processes."""
        self.directory = str(folder.path)
        """Private folder on the host for the slots' folders; removed with the template or when the host process dies.
        """
        self._folder = folder
        self._process = process
        self._control = control

    @classmethod
    def start(cls, key: TemplateKey, level: str, timeout_seconds: float) -> TemplateProcess:
        """Start a template at an isolation level and wait until it has loaded AppWorld.

        Raises: LevelUnavailable: quotes the process's message; EnvironmentCrashed: the process was killed, or AppWorld
            was not loaded in time.
        """
        folder = PrivateTempDir()
        directory = str(folder.path)
        # SOCK_SEQPACKET preserves message boundaries.
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = JailSpec(
            level=level,
            control_fd=their_control.fileno(),
            directory=directory,
            data=str(key.data),
            scratch_mib=SCRATCH_MIB,
            output_bytes=key.output_bytes,
        )
        process = launch(spec, key.python)
        their_control.close()
        template = cls(process, control, folder, level)
        try:
            control.settimeout(timeout_seconds)
            try:
                message = control.recv(4096)
            except TimeoutError:
                raise EnvironmentCrashed(f"AppWorld was not loaded within {timeout_seconds:g} s") from None
            if not message:
                status = process.wait()
                complaint = last_line(directory)
                if status < 0 or status >= _SIGNALLED:
                    raise EnvironmentCrashed(f"the process that loads AppWorld was killed (status {status})")
                raise LevelUnavailable(complaint) if is_level_unavailable(status, complaint) else _NotLoaded(complaint)
            ready = json.loads(message)
            template.system_calls_refused = ready["system_calls_refused"]
            if not template.system_calls_refused:
                log.warning("this machine cannot filter system calls, so model-written code can start processes")
            if ready["tasks_own_the_host"] and level == "rlimits":
                log.warning(
                    "model-written code runs as root without capabilities and can change root's files; move "
                    "AppWorld's Python and the data root to a place that other users can read"
                )
        except BaseException:
            template.kill()
            raise
        return template

    @property
    def alive(self) -> bool:
        """Whether the template can still fork."""
        # The template sends nothing more, so a readable socket means that it ended.
        ended = select.select([self._control], [], [], 0)[0]
        return not ended and self._process.poll() is None

    def fork(self, slot_spec: str, control: socket.socket, stderr: int) -> None:
        """Request a world server, which reports on its own control socket. Returns at once.

        Raises: OSError: the template ended.
        """
        socket.send_fds(self._control, [slot_spec.encode()], [control.fileno(), stderr])

    def kill(self) -> None:
        """End the template. If it runs in a process namespace, this also ends all servers that it forked."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._folder.remove()


def shared_template(key: TemplateKey, timeout_seconds: float) -> TemplateProcess:
    """This process's template of ``key``; starts it if there is none or it has died, and blocks until it is ready.

    Raises: IsolationUnavailable: the host offers no level that ``key`` allows; EnvironmentCrashed: AppWorld
        cannot be loaded, or the template was killed or was not ready in time.
    """
    with _starting:
        template = _templates.get(key)
        if template is None or not template.alive:
            if template is not None:
                template.kill()
            template = _templates[key] = _start(key, timeout_seconds)
        return template


def _start(key: TemplateKey, timeout_seconds: float) -> TemplateProcess:
    levels = IsolationLevels(key.isolation, key.python)
    failure: type[EnvironmentCrashed] = IsolationUnavailable
    for level in levels:
        with levels.trying(level):
            started_at = time.monotonic()
            try:
                template = TemplateProcess.start(key, level, timeout_seconds)
            except _NotLoaded:
                failure = EnvironmentCrashed
                raise
            log.info("AppWorld loaded in %.1f s; isolation: %s", time.monotonic() - started_at, level)
            if level == "rlimits":
                log.warning(
                    "model-written code is isolated only by rlimits: it can read the host's files and the memory of "
                    "this user's processes"
                )
            return template
    raise failure(f"AppWorld cannot be started: {levels}")

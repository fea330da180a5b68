"""The host's side of a jail: which levels to try, how a program is started, and the last line of its errors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from draco_ray.environments.jail.confine import AUTOMATIC_LEVELS, JAIL_CODE, UNAVAILABLE, JailSpec

SCRATCH_MIB = 128
"""Size of a task's scratch file system, and of its largest file."""
_LAST_BYTES = 1 << 16
"""Number of bytes at the end of a process's standard error that are searched for its last line."""
PACKAGE = Path(__file__).resolve().parents[2]
_reached: dict[str, str] = {}
"""Interpreter -> the level that ``auto`` has found in this process, so that the search is not repeated."""


class LevelUnavailable(Exception):
    """An isolation level is not available on the host."""


class IsolationLevels:
    """The isolation levels to try, strongest first, and why each was refused."""

    def __init__(self, isolation: str, python: str = sys.executable) -> None:
        """``isolation``: see ``environment.isolation``; ``python``: interpreter of the program."""
        self._automatic, self._python = isolation == "auto", python
        known = _reached.get(python)
        self._levels = ((known,) if known else AUTOMATIC_LEVELS) if self._automatic else (isolation,)
        self._complaints: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self._levels)

    @contextlib.contextmanager
    def trying(self, level: str) -> Iterator[None]:
        """Suppress a `LevelUnavailable` that the block raises, and record its reason.

        If the block succeeds, ``auto`` uses ``level`` for later programs, too.
        """
        try:
            yield
        except LevelUnavailable as error:
            self._complaints.append(f"{level}: {error}")
        else:
            if self._automatic:
                _reached[self._python] = level

    def __str__(self) -> str:
        """The reason for each refused level, and an alternative."""
        hint = "; environment.isolation=rlimits would run it with resource limits only" if self._automatic else ""
        return "; ".join(self._complaints) + hint


def jail_command(spec: JailSpec) -> list[str]:
    """The interpreter's arguments that start the program of ``spec`` in its jail."""
    return ["-P", "-s", "-m", "draco_ray.environments.jail.confine", spec.to_json()]


def launch(spec: JailSpec, python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start the program of ``spec`` in its jail; its standard error is written to ``stderr`` in the jail's folder."""
    program = link_package(Path(spec.program), spec.code)
    with open(os.path.join(spec.directory, "stderr"), "wb") as stderr:
        return subprocess.Popen(
            [python, *jail_command(spec)],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": program, "LANG": "C.UTF-8"},
            pass_fds=(spec.control_fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            cwd="/",
        )


def is_level_unavailable(status: int | None, complaint: str) -> bool:
    """Whether a program ended because the host does not offer its isolation level."""
    return status == UNAVAILABLE or complaint.startswith("bwrap: ")


def link_package(folder: Path, code: Iterable[str] | None = None) -> str:
    """Create ``folder`` with a link to this package only.

    Args:
        code: files to link besides those of every jail, see `JailSpec`; None: all.
    Returns: its path, for PYTHONPATH.
    """
    for part in ("",) if code is None else (*JAIL_CODE, *code):
        link = folder / "draco_ray" / part
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(PACKAGE / part)
    return str(folder)


def last_line(directory: str) -> str:
    """The last line of the file ``stderr`` in a process's folder."""
    text = b""
    with contextlib.suppress(OSError), open(os.path.join(directory, "stderr"), "rb") as file:
        # Read only the end: the policy's code may write to this file too, without limit.
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        text = file.read(_LAST_BYTES)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it printed no message"

"""The host's side of a jail: which levels to try, starting a program in one, and what a process said last."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from draco_ray.environments.jail.confine import AUTOMATIC_LEVELS, JAIL_CODE, UNAVAILABLE, JailSpec

SCRATCH_MIB = 128
"""What a task may write, and the largest file."""
_LAST_BYTES = 1 << 16
"""Of a process's complaints, in which its last words are looked for."""
PACKAGE = Path(__file__).resolve().parents[2]
_reached: dict[str, str] = {}
"""The level that ``auto`` reached in this process, by interpreter, so that others are not tried again."""


class LevelUnavailable(Exception):
    """The host does not offer an isolation level."""


class Levels:
    """The levels at which a program may run, strongest first, until one is there."""

    def __init__(self, isolation: str, python: str = sys.executable) -> None:
        """``isolation`` as ``environment.isolation``; ``python`` runs the program."""
        self._automatic, self._python = isolation == "auto", python
        known = _reached.get(python)
        self._levels = ((known,) if known else AUTOMATIC_LEVELS) if self._automatic else (isolation,)
        self._complaints: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self._levels)

    def refused(self, level: str, error: LevelUnavailable) -> None:
        """Take note that a level is not there."""
        self._complaints.append(f"{level}: {error}")

    def reached(self, level: str) -> None:
        """Begin with this level from now on, where any will do."""
        if self._automatic:
            _reached[self._python] = level

    def __str__(self) -> str:
        """What was said of each level that was tried, and what would still work."""
        hint = "; environment.isolation=rlimits would run this with limits alone" if self._automatic else ""
        return "; ".join(self._complaints) + hint


def reached_level(isolation: str) -> str:
    """The level at which a program of this Python's has been started here."""
    return _reached[sys.executable] if isolation == "auto" else isolation


def jail_command(spec: JailSpec) -> list[str]:
    """The words after the interpreter that start the program of ``spec`` in its jail."""
    return ["-P", "-s", "-m", "draco_ray.environments.jail.confine", spec.to_json()]


def launch(spec: JailSpec, python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start the program of ``spec`` in its jail; it complains to the file ``stderr`` in its folder."""
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


def not_offered(status: int | None, complaint: str) -> bool:
    """Whether a program in a jail has ended because the host does not offer its level."""
    return status == UNAVAILABLE or complaint.startswith("bwrap: ")


def link_package(folder: Path, code: Iterable[str] | None = None) -> str:
    """Make ``folder`` and link this package, alone, into it.

    Args:
        code: what of it is linked beside what runs in every jail, as in `JailSpec`; None links all.
    Returns: its path, for PYTHONPATH.
    """
    for part in ("",) if code is None else (*JAIL_CODE, *code):
        link = folder / "draco_ray" / part
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(PACKAGE / part)
    return str(folder)


def last_line(directory: str) -> str:
    """The last words of a process that writes its complaints to the file ``stderr`` in its folder."""
    text = b""
    with contextlib.suppress(OSError), open(os.path.join(directory, "stderr"), "rb") as file:
        # Code of the policy can write to it as well.
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        text = file.read(_LAST_BYTES)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it left no message"

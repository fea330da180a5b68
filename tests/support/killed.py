"""A process that is killed at its n-th change of a file: all earlier changes are made, no later one is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CHANGES = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"})


class SimulatedKill(BaseException):
    """Stands for SIGKILL: no handler of errors catches it."""


class _Countdown:
    left: int | None = None
    seen = 0


_countdown = _Countdown()


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _countdown.left is None:
        return
    if event == "open":
        flags = arguments[2]
        if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    elif event not in CHANGES:
        return
    _countdown.seen += 1
    if _countdown.seen > _countdown.left:
        raise SimulatedKill


@contextmanager
def kill_after_changes(changes: int) -> Iterator[None]:
    """Let this many changes of files happen in the block; at the next, `SimulatedKill` is raised in its place."""
    if not getattr(_hook, "installed", False):
        sys.addaudithook(_hook)
        _hook.installed = True  # type: ignore[attr-defined]
    _countdown.left, _countdown.seen = changes, 0
    try:
        yield
    finally:
        _countdown.left = None

"""Folders that go with the process that made them; those of one that was killed, with the next that makes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "draco-held-"


class HeldFolder:
    """A private folder among the temporary ones, under a name that is short: sockets are to lie in it."""

    def __init__(self) -> None:
        """Make it, and remove those that nobody holds any more."""
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/"):
            with contextlib.suppress(OSError):  # Another user's.
                lock = try_lock(left)
                if lock is not None:
                    if os.fstat(lock).st_uid == os.getuid():
                        shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
        held: int | None = None
        while held is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Another one that begins at this moment may take it for one that is left.
            with contextlib.suppress(FileNotFoundError):
                held = try_lock(self.path)
            if held is not None and not self.path.exists():
                os.close(held)
                held = None
        self._remove = weakref.finalize(self, _removed, self.path, held)

    def remove(self) -> None:
        """Remove it. Safe to call twice."""
        self._remove()


def _removed(path: Path, held: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(held)


def try_lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or this process ends; None if it is locked already."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

"""Temporary folders that go with the process that made them; those of one that was killed, with the next one made.

A process's lie in one folder, which it holds locked: one that nobody holds was left. So a start looks at one lock for
each process, however many folders that has.

Standard library only: jails import this too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

PREFIX = f"draco-{zlib.crc32(os.uname().nodename.encode()) & 0xFFFFFF:06x}-"
"""With the host in it: where hosts share a folder, one need not see another's locks. Short, as a socket's path is."""

_numbers = itertools.count()
_roots: dict[Path, int] = {}
"""This process's folders, one in each place, and their locks."""
_changing = threading.Lock()


class HeldFolder:
    """A private folder, under a name that is short: sockets are to lie in it."""

    def __init__(self, place: Path | None = None) -> None:
        """Make it, and with a process's first one remove what others have left there.

        Args:
            place: where; None is where temporary files are.
        """
        with _changing:
            root = _root((place or Path(tempfile.gettempdir())).absolute())
            self.path = root / str(next(_numbers))
            self.path.mkdir(0o700)

    def remove(self) -> None:
        """Remove it. Safe to call twice."""
        remove_tree(str(self.path))
        root = self.path.parent
        with _changing, contextlib.suppress(OSError):
            root.rmdir()  # Fails while there are others in it.
            if (lock := _roots.pop(root, None)) is not None:
                os.close(lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _root(place: Path) -> Path:
    for root in _roots:
        if root.parent == place and root.is_dir():
            return root
    sweep(place)
    while True:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        # Another process that begins at this moment may take it for one that was left.
        with contextlib.suppress(FileNotFoundError):
            lock = hold(root)
            if root.exists():
                # To be passed through by the users that tasks become.
                root.chmod(0o711)
                _roots[root] = lock
                return root
            os.close(lock)


def sweep(place: Path) -> None:
    """Remove what processes of this host have left in ``place``."""
    for left in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # Another user's, or just removed.
            lock = try_lock(left)
            if lock is not None:
                if os.fstat(lock).st_uid == os.getuid():
                    remove_tree(str(left))
                os.close(lock)


def hold(directory: Path) -> int:
    """Keep a directory from being swept until the descriptor is closed or this process ends; others may hold it too."""
    descriptor = _opened(directory)
    with contextlib.suppress(OSError):  # Where there are no locks nobody sweeps either.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def try_lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or this process ends; None if somebody has a lock on it."""
    descriptor = _opened(directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def remove_tree(folder: str, *, itself: bool = True, uid: int | None = None) -> bool:
    """Remove what is in a folder, whatever a task has made of it. No link is followed, no file's mode is changed.

    At last by a program: folders can be nested deeper than Python's recursion goes.

    Args:
        itself: and the folder.
        uid: the user to do it as; None is the caller's.
    Returns: whether it is gone.
    """
    if itself and uid is None:
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return True
    user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    start = ["find", folder, "-mindepth", "0" if itself else "1"]

    def find(*action: str) -> bool:
        done = subprocess.run([*start, *action], check=False, stderr=subprocess.DEVNULL, cwd="/", **user)
        return done.returncode == 0

    if find("-delete"):
        return True
    # Folders whose mode keeps even their owner out.
    find("-type", "d", "!", "-perm", "-u=rwx", "-execdir", "chmod", "u+rwx", "{}", ";")
    return find("-delete")


@atexit.register
def _end() -> None:
    for root in list(_roots):
        remove_tree(str(root))


def _forget() -> None:
    """In a process that was forked: what there is belongs to the one that forked it, and goes with that."""
    global _changing
    _changing = threading.Lock()
    for lock in _roots.values():
        os.close(lock)
    _roots.clear()


os.register_at_fork(after_in_child=_forget)

"""Private temporary directories that are removed at exit, or, if the process was killed, by the next process.

All directories of a process lie below one root, which the process keeps locked. A root that nobody has locked is
abandoned, and the first process that makes a directory beside it removes it.

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

TEMP_DIR_PREFIX = f"draco-{zlib.crc32(os.uname().nodename.encode()) & 0xFFFFFF:06x}-"
"""Contains a hash of the host name: locks may not be visible across hosts. It is short, because Unix
socket paths must be."""

_numbers = itertools.count()
_roots: dict[Path, int] = {}
"""Root of this process -> descriptor of its lock. There is one root per parent directory."""
_changing = threading.Lock()


class PrivateTempDir:
    """A private temporary directory with a path short enough for Unix sockets."""

    def __init__(self, place: Path | None = None) -> None:
        """Make the directory; the first one of a process also removes abandoned ones.

        Args:
            place: the parent directory; None is the default for temporary files.
        """
        with _changing:
            root = _root((place or Path(tempfile.gettempdir())).absolute())
            self.path = root / str(next(_numbers))
            self.path.mkdir(0o700)

    def remove(self) -> None:
        """Remove the directory. Safe to call twice."""
        remove_tree(str(self.path))
        root = self.path.parent
        with _changing, contextlib.suppress(OSError):
            root.rmdir()  # Fails while the root holds other directories.
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
    remove_abandoned(place)
    while True:
        root = Path(tempfile.mkdtemp(prefix=TEMP_DIR_PREFIX, dir=place))
        # Until the root is locked, another process may take it for abandoned and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = lock_shared(root)
            if root.exists():
                # Let other users traverse it: tasks may run as them.
                root.chmod(0o711)
                _roots[root] = lock
                return root
            os.close(lock)


def remove_abandoned(place: Path) -> None:
    """Remove the abandoned roots of this host in ``place``."""
    for left in place.glob(f"{TEMP_DIR_PREFIX}*"):
        with contextlib.suppress(OSError):  # The root belongs to another user, or was just removed.
            lock = try_lock(left)
            if lock is not None:
                if os.fstat(lock).st_uid == os.getuid():
                    remove_tree(str(left))
                os.close(lock)


def lock_shared(directory: Path) -> int:
    """Take a shared lock: the directory is not abandoned until the descriptor is closed or this process ends."""
    descriptor = _opened(directory)
    with contextlib.suppress(OSError):  # Without file locks, `remove_abandoned` removes nothing.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def try_lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed or this process ends; None if somebody else has locked it."""
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
    """Remove a directory tree, even a hostile one. No link is followed, no file's mode is changed.

    Trees that are nested deeper than Python's recursion limit are removed by ``find``.

    Args:
        itself: remove the directory itself, not only its contents.
        uid: the user to run as; None is the caller's.
    Returns: whether it was removed.
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
    # Make directories accessible whose mode locks out even their owner.
    find("-type", "d", "!", "-perm", "-u=rwx", "-execdir", "chmod", "u+rwx", "{}", ";")
    return find("-delete")


@atexit.register
def _end() -> None:
    for root in list(_roots):
        remove_tree(str(root))


def _forget() -> None:
    """Forget the directories in a forked child: they belong to the parent, which removes them."""
    global _changing
    _changing = threading.Lock()
    for lock in _roots.values():
        os.close(lock)
    _roots.clear()


os.register_at_fork(after_in_child=_forget)

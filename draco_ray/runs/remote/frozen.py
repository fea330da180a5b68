"""A folder that others write to, as it was at one moment."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from draco_ray.errors import StoreError

DATABASE = ".sqlite"
TRIES, PAUSE = 200, 0.05
BUSY_SECONDS = 60.0
_BESIDE_A_DATABASE = (f"{DATABASE}-journal", f"{DATABASE}-wal", f"{DATABASE}-shm")


@dataclass(frozen=True, slots=True)
class Seen:
    """By what a file that was replaced or has grown is known."""

    inode: int
    size: int
    changed: int

    def still(self, later: Seen | None) -> bool:
        """Whether a file that was seen later is this one, or this one with more at its end (a log)."""
        return later is not None and later.inode == self.inode and (later.size > self.size or later == self)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The files of a folder at one moment."""

    seen: Mapping[str, Seen]
    """All of them, by path."""
    changed: Mapping[str, Path]
    """Those that were not known: what they held then."""


def freeze(folder: Path, staging: Path, known: Mapping[str, Seen]) -> Frozen:
    """Take hold of the files of a run directory that are not known yet.

    Writers of a run directory replace files and never change them, but for logs, which grow, and databases. So a
    second name for each file holds what it is now; if none was replaced or removed meanwhile, all are of one moment.

    Args:
        folder: the run's.
        staging: an empty folder in it, for the second names.
        known: what was seen of files that need not be held.

    Raises:
        StoreError: the folder does not come to rest, or cannot be read.
    """
    for attempt in range(TRIES):
        held = staging / str(attempt)
        held.mkdir()
        found = listing(folder)
        try:
            changed = {
                path: _hold(folder / path, held / str(index))
                for index, (path, seen) in enumerate(found.items())
                if known.get(path) != seen and not path.endswith(DATABASE)
            }
        except FileNotFoundError:
            changed = None
        later = listing(folder)
        if changed is not None and all(seen.still(later.get(path)) for path, seen in found.items() if _rests(path)):
            # Last: the replies that rows are made of are there before the rows.
            for index, path in enumerate(
                path for path, seen in found.items() if not _rests(path) and known.get(path) != seen
            ):
                changed[path] = _backup(folder / path, held / f"{index}{DATABASE}")
            return Frozen(found, changed)
        shutil.rmtree(held)
        time.sleep(PAUSE)
    raise StoreError(f"{folder}: its files change faster than they can be copied")


def listing(folder: Path) -> dict[str, Seen]:
    """The files of a run directory that belong to the run, by path with ``/``."""
    found = {}
    for inside, folders, files in os.walk(folder):
        at = os.path.relpath(inside, folder)
        top, checkpoints = at == ".", at == "checkpoints"
        if top or checkpoints:
            # What is hidden there is of this machine, or not finished.
            folders[:] = [name for name in folders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".")]
        for name in files:
            if name.endswith((".tmp", *_BESIDE_A_DATABASE)):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(inside, name))
                if stat.S_ISREG(status.st_mode):
                    path = name if top else f"{at}/{name}"
                    found[path] = Seen(status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _rests(path: str) -> bool:
    return not path.endswith(DATABASE)


def _hold(file: Path, at: Path) -> Path:
    try:
        os.link(file, at, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system without second names.
        shutil.copyfile(file, at, follow_symlinks=False)
    return at


def _backup(file: Path, at: Path) -> Path:
    """A database as it is between two transactions; a file that is none, as it is."""
    try:
        with (
            contextlib.closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as source,
            contextlib.closing(sqlite3.connect(at)) as copy,
        ):
            source.execute("PRAGMA trusted_schema = OFF")
            source.backup(copy)
    except sqlite3.OperationalError as error:
        raise StoreError(f"{file}: cannot be copied: {error}") from None
    except sqlite3.DatabaseError:
        shutil.copyfile(file, at)
    return at


@contextlib.contextmanager
def staging_folder(folder: Path, name: str) -> Iterator[Path]:
    """An empty folder in a run directory, gone afterwards."""
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)

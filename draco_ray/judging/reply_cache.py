"""Answers that were paid for, on disk: a resumed run asks no question twice, and stage1 can be kept
across epochs.

Every answer is stored as it arrives, even one that turns out to be malformed: the question that mends it is keyed on
it, so replaying both costs nothing. When a whole phase fails, its answers are forgotten and the next try asks anew.

One SQLite file of JSON values. A run directory may come from somebody else, so nothing in it is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from draco_ray.errors import StoreError

log = logging.getLogger(__name__)

FILE = "replies.sqlite"
"""In the cache's folder."""
PICKLED_FILE = "cache.db"
"""Of earlier versions, whose values were pickled."""
BUSY_SECONDS = 60.0
"""For which a write waits for those of other processes."""

SCHEMA = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, answer TEXT NOT NULL) STRICT, WITHOUT ROWID"

ResultT = TypeVar("ResultT")


def request_key(request: dict[str, object]) -> str:
    """SHA-256 of everything that is sent, whatever the order of its keys."""
    canonical = json.dumps(request, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class ReplyCache:
    """A folder of answers, safe to share between judge workers; disk access happens in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            StoreError: it cannot be opened; SQLite writes to do so.
        """
        self._folder = folder
        # One thread: SQLite's connection belongs to it, and what is asked for happens in that order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replies")
        with self._said_plainly():
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / PICKLED_FILE).exists() and not (folder / FILE).exists():
                log.warning(
                    "judge replies in %s are of an earlier version, which pickled them: they are not read, what they "
                    "answer is asked again",
                    folder / PICKLED_FILE,
                )
            self._connection = self._thread.submit(_connect, folder / FILE).result()

    def __len__(self) -> int:
        """Answers stored."""
        count: int = self._thread.submit(
            lambda: self._connection.execute("SELECT count(*) FROM replies").fetchone()[0]
        ).result()
        return count

    async def get(self, key: str) -> dict[str, object] | None:
        """The stored answer, if there is one.

        Raises:
            StoreError: the file is damaged.
        """
        row = await self._run(
            lambda: self._connection.execute("SELECT answer FROM replies WHERE key = ?", (key,)).fetchone()
        )
        if row is None:
            return None
        try:
            answer = json.loads(row[0])
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            log.warning("judge reply %s in %s is not readable and is asked for again", key[:12], self._folder / FILE)
            return None
        return answer

    async def put(self, key: str, answer: dict[str, object]) -> None:
        """Store an answer; the last one wins.

        Raises:
            StoreError: it cannot be kept: nothing more is to be paid for.
        """
        row = (key, json.dumps(answer))
        await self._run(lambda: self._connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", row))

    async def forget(self, key: str) -> None:
        """Drop an answer; one that is not there is no error.

        Raises:
            StoreError: it cannot be dropped.
        """
        await self._run(lambda: self._connection.execute("DELETE FROM replies WHERE key = ?", (key,)))

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        """``work``, in the connection's thread."""
        with self._said_plainly():
            return await asyncio.wrap_future(self._thread.submit(work))

    @contextlib.contextmanager
    def _said_plainly(self) -> Iterator[None]:
        """What the disk or SQLite refuse, as one line."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(
                f"judge replies cannot be kept in {self._folder}: {error}; make room there (or set judge.cache) "
                "and continue the run"
            ) from None
        except sqlite3.Error as error:
            raise StoreError(
                f"judge replies in {self._folder / FILE} cannot be read: {error}; move that file away, what it answers "
                "is then paid for again"
            ) from None


def _connect(file: Path) -> sqlite3.Connection:
    """A connection that commits each statement."""
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)
    # Nothing that a received file may hold besides values is carried out.
    connection.execute("PRAGMA trusted_schema = OFF")
    # Judge workers on several nodes share the folder; SQLite's write-ahead log and memory maps work on one host only.
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA mmap_size = 0")
    connection.execute(SCHEMA)
    return connection

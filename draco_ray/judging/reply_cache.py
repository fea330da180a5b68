"""Answers that were paid for, on disk: a resumed run asks no question twice, and stage1 can be kept
across epochs.

Every answer is stored as it arrives, even one that turns out to be malformed: the question that mends it is keyed on
it, so replaying both costs nothing. When a whole phase fails, its answers are forgotten and the next try asks anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import diskcache

from draco_ray.errors import StoreError


def request_key(request: dict[str, object]) -> str:
    """SHA-256 of everything that is sent, whatever the order of its keys."""
    canonical = json.dumps(request, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class ReplyCache:
    """A folder of answers, safe to share between judge workers; disk access happens in a thread."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            StoreError: it cannot be opened; SQLite writes to do so.
        """
        # Paid answers are not evicted; a run's worth of text is small beside its adapters.
        # Judge workers on several nodes share the folder; SQLite's write-ahead log and memory maps work on one host.
        with _said_plainly(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._answers = diskcache.Cache(
                str(folder),
                eviction_policy="none",
                size_limit=2**40,
                sqlite_journal_mode="delete",
                sqlite_mmap_size=0,
            )
        self._folder = folder

    def __len__(self) -> int:
        """Answers stored."""
        return len(self._answers)

    async def get(self, key: str) -> dict[str, object] | None:
        """The stored answer, if there is one."""
        text = await asyncio.to_thread(self._answers.get, key)
        return None if text is None else json.loads(text)

    async def put(self, key: str, answer: dict[str, object]) -> None:
        """Store an answer; the last one wins.

        Raises:
            StoreError: it cannot be kept: nothing more is to be paid for.
        """
        with _said_plainly(self._folder):
            await asyncio.to_thread(self._answers.set, key, json.dumps(answer))

    async def forget(self, key: str) -> None:
        """Drop an answer; one that is not there is no error."""
        await asyncio.to_thread(self._answers.delete, key)


@contextlib.contextmanager
def _said_plainly(folder: Path) -> Iterator[None]:
    """What the disk or SQLite refuse, as one line."""
    try:
        yield
    except (OSError, sqlite3.Error, diskcache.Timeout) as error:
        raise StoreError(
            f"judge replies cannot be kept in {folder}: {error}; make room there (or set judge.cache) and continue "
            "the run"
        ) from None

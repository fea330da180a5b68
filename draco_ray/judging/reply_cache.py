"""The store of judge replies: a resumed run asks no question twice, and stage1 can be reused across epochs.

Every reply is stored as it arrives, even a malformed one: the key of the follow-up question contains it, so both can be
replayed. When a whole phase fails, its replies are deleted and the next attempt asks again.

The same file holds the cost ledger: each request is entered with its maximum cost before it is sent, and its actual
cost is entered together with its reply in one transaction. So the ledger has the cost of every stored reply, even if
a process is killed; a request whose outcome is unknown stays in it at its maximum cost, since it may be billed.

All judge workers of a run share one store. A worker claims a question before it asks; others with the same question
wait for its answer. Claims are held in memory and expire unless renewed, so nobody waits for a dead worker.

One SQLite file of JSON values. A run directory may come from somebody else, so nothing in it is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from draco_ray.errors import StoreError

SHARED_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse")
)
"""Types of file systems that several machines share, or may share."""
OWN_FUSE = frozenset(("fuse.fuse-overlayfs",))
"""FUSE file systems of a container's own disk."""


def check_local_disk(folder: Path) -> None:
    """Check that judge replies may be stored in a folder, which need not exist.

    Raises:
        StoreError: it lies on a file system that machines share.
    """
    kind, mounted = file_system_of(folder.resolve())
    if kind in OWN_FUSE or kind.partition(".")[0] not in SHARED_FILE_SYSTEMS:
        return
    raise StoreError(
        f"judge replies cannot be stored in {folder.resolve()}: {mounted} is a shared file system ({kind}), where "
        "SQLite may lose paid replies; choose a folder on a local disk (--out, or judge.cache of a training run)"
    )


def file_system_of(path: Path) -> tuple[str, Path]:
    """Type and mount point of the file system of an absolute path, which need not exist; empty if unknown."""
    found = ("", Path())
    for mount in psutil.disk_partitions(all=True):
        at = Path(mount.mountpoint)
        # A later mount hides an earlier one at the same place.
        if path.is_relative_to(at) and len(at.parts) >= len(found[1].parts):
            found = (mount.fstype, at)
    return found


log = logging.getLogger(__name__)

REPLIES_FILE = "replies.sqlite"
"""File name in the cache's folder."""
BUSY_SECONDS = 180.0
"""Maximum wait for the writes of other processes; a process that hangs during a write is killed by then
(`draco_ray.workers.monitor`)."""
CLAIM_SECONDS = 15.0
"""Seconds until a claim that is not renewed expires: its worker has died or is stopped."""
PUT_SQL = "INSERT OR REPLACE INTO replies VALUES (?, ?)"
SETTLE_SQL = "INSERT INTO requests VALUES (?, ?, ?) ON CONFLICT (number) DO UPDATE SET dollars = excluded.dollars"

RESTORE = (
    "restore the file from a copy, or choose another folder (--out, or judge.cache of a training run), which means "
    "paying for these replies again"
)

CREATE_TABLES_SQL = (
    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, answer TEXT NOT NULL) STRICT, WITHOUT ROWID",
    # dollars: NULL while the outcome of the request is unknown.
    "CREATE TABLE IF NOT EXISTS requests (number TEXT PRIMARY KEY, most REAL NOT NULL, dollars REAL) STRICT",
)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLedger:
    """Costs of the requests of a run by request number, in dollars."""

    settled: dict[str, float]
    under_way: dict[str, float]
    """Maximum costs of requests without a known outcome, in dollars."""

    @property
    def dollars(self) -> float:
        """The sum over all requests."""
        return math.fsum([*self.settled.values(), *self.under_way.values()])


@dataclass(slots=True)
class _Claim:
    """A claim on a question: only its holder sends the question, and others wait for the reply."""

    holder: str
    expires: float = 0.0
    """Time at which the claim expires, in seconds of the monotonic clock."""
    released: asyncio.Event = field(default_factory=asyncio.Event)


def request_key(request: dict[str, object]) -> str:
    """SHA-256 of a request, independent of the order of its keys."""
    canonical = json.dumps(request, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class ReplyCache:
    """A folder of replies, safe to share between judge workers; disk access happens in its own thread."""

    def __init__(self, folder: Path) -> None:
        """Open the folder; create it if there is none.

        Raises:
            StoreError: it cannot be opened (SQLite writes to do so), or lies on a file system that machines share.
        """
        check_local_disk(folder)
        self._folder = folder
        self._claims: dict[str, _Claim] = {}
        # One thread, which owns SQLite's connection: requests are served in order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replies")
        self._pending: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        with self._said_plainly():
            folder.mkdir(parents=True, exist_ok=True)
            create_store(folder)
            self._connection = self._thread.submit(_connect, folder / REPLIES_FILE).result()

    def __len__(self) -> int:
        """Number of stored answers."""
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
        checksum, _, text = str(row[0]).partition(" ")
        try:
            answer = json.loads(text) if checksum == _checksum(text) else None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            log.warning(
                "judge reply %s in %s cannot be read, so the request is sent again",
                key[:12],
                self._folder / REPLIES_FILE,
            )
            return None
        return answer

    async def put(self, key: str, answer: dict[str, object]) -> None:
        """Store an answer; the last one wins.

        Raises:
            StoreError: it cannot be stored, so nothing more may be paid for.
        """
        row = (key, _row(answer))
        await self._run(lambda: self._connection.execute(PUT_SQL, row))

    async def begin(self, number: str, most: float) -> None:
        """Enter a request in the cost ledger before it is sent.

        Args:
            number: number of its lease.
            most: maximum cost in dollars.

        Raises:
            StoreError: it cannot be entered, so it must not be sent.
        """
        row = (number, most)
        await self._run(lambda: self._connection.execute("INSERT OR REPLACE INTO requests VALUES (?, ?, NULL)", row))

    async def settle(self, number: str, dollars: float, reply: tuple[str, dict[str, object]] | None = None) -> None:
        """Enter the cost of a request, and store its reply (key, answer) with it.

        Raises:
            StoreError: they cannot be stored, so nothing more may be paid for.
        """
        stored = None if reply is None else (reply[0], _row(reply[1]))

        def write() -> None:
            if stored is not None:
                self._connection.execute(PUT_SQL, stored)
            self._connection.execute(SETTLE_SQL, (number, dollars, dollars))

        await self._run(write)

    async def forget(self, key: str) -> None:
        """Drop an answer, if there is one.

        Raises:
            StoreError: it cannot be dropped.
        """
        await self._run(lambda: self._connection.execute("DELETE FROM replies WHERE key = ?", (key,)))

    async def claim(self, key: str, holder: str) -> None:
        """Wait until nobody else holds the claim on a question; then hold, or renew, it for `CLAIM_SECONDS`.

        Args:
            key: key of the question.
            holder: unique to each call.
        """
        while (claim := self._claims.get(key)) is not None and claim.holder != holder:
            if (left := claim.expires - time.monotonic()) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await claim.released.wait()
        if claim is None or claim.holder != holder:
            claim = self._claims[key] = _Claim(holder)
        claim.expires = time.monotonic() + CLAIM_SECONDS

    async def release(self, key: str, holder: str) -> None:
        """Release a claim; an expired claim is ignored."""
        claim = self._claims.get(key)
        if claim is not None and claim.holder == holder:
            del self._claims[key]
            claim.released.set()

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run ``work`` in the connection's thread, in one transaction with everything that waits there (group commit).

        The changes are on disk when this returns.
        """
        done: Future[ResultT] = Future()
        self._pending.append((work, done))
        self._thread.submit(self._commit_pending)
        with self._said_plainly():
            # Store a paid reply even if its caller is gone.
            return await asyncio.shield(asyncio.wrap_future(done))

    def _commit_pending(self) -> None:
        """Run all pending work in one transaction; if it fails, every caller gets the error."""
        batch = [self._pending.popleft() for _ in range(len(self._pending))]
        if not batch:
            return
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                results = [work() for work, _ in batch]
        except BaseException as error:
            for _, done in batch:
                done.set_exception(error)
        else:
            for (_, done), result in zip(batch, results, strict=True):
                done.set_result(result)

    @contextlib.contextmanager
    def _said_plainly(self) -> Iterator[None]:
        """Report errors of the disk and of SQLite in one line."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise StoreError(
                    f"judge replies cannot be stored in {self._folder}: another process has locked the file for "
                    f"{BUSY_SECONDS:g} s; end that process and continue the run"
                ) from None
            raise StoreError(
                f"judge replies cannot be stored in {self._folder}: {error}; free disk space there, or make it "
                "writable (or set judge.cache), and continue the run"
            ) from None
        except sqlite3.Error as error:
            raise StoreError(
                f"judge replies in {self._folder / REPLIES_FILE} cannot be read: {error}; {RESTORE}"
            ) from None


def _row(answer: dict[str, object]) -> str:
    """An answer as it is stored: its checksum, a blank, its JSON."""
    text = json.dumps(answer)
    return f"{_checksum(text)} {text}"


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def _connect(file: Path) -> sqlite3.Connection:
    """A connection in autocommit mode: each statement is a transaction, unless BEGIN starts one."""
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)
    # Do not execute anything that a received file may contain.
    connection.execute("PRAGMA trusted_schema = OFF")
    # No write-ahead log and no memory maps: they need further files and a single host.
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA mmap_size = 0")
    for statement in CREATE_TABLES_SQL:
        connection.execute(statement)
    return connection


def create_store(folder: Path) -> None:
    """Create the reply file atomically if there is none, because an empty file means that replies were lost.

    Raises:
        StoreError: the existing one is damaged.
        OSError: it cannot be created.
    """
    file, made = folder / REPLIES_FILE, folder / f"{REPLIES_FILE}.tmp"
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        if not _is_there(file):
            made.unlink(missing_ok=True)
            _connect(made).close()
            os.replace(made, file)
    finally:
        os.close(opened)


def check_store(folder: Path) -> bool:
    """Whether there are replies in a folder; they are checked for damage.

    Raises:
        StoreError: they are damaged.
    """
    file = folder / REPLIES_FILE
    if not _is_there(file):
        return False
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            pages, size = (connection.execute(f"PRAGMA page_{each}").fetchone()[0] for each in ("count", "size"))
            # SQLite does not notice a truncated last page.
            if file.stat().st_size < pages * size:
                found = f"the last page is truncated at byte {file.stat().st_size}"
    except sqlite3.Error as error:
        found = str(error)
    if found != "ok":
        raise StoreError(f"judge replies in {file} are damaged: {' '.join(found.split())[:200]}; {RESTORE}")
    return True


def _is_there(file: Path) -> bool:
    """Whether the reply file exists. Raises: StoreError: it is empty, or only its journal exists."""
    journals = (file.with_name(f"{file.name}-{kind}") for kind in ("journal", "wal"))
    if file.exists():
        # SQLite treats a file of one byte as empty.
        problem = "the file is empty" if file.is_file() and file.stat().st_size <= 1 else None
    else:
        problem = next((f"{each.name} exists but {REPLIES_FILE} does not" for each in journals if each.exists()), None)
    if problem is not None:
        raise StoreError(f"judge replies in {file} are damaged: {problem}; {RESTORE}")
    return file.exists()


def read_cost_ledger(folder: Path, run: str = "") -> CostLedger:
    """The cost ledger in a folder of replies; empty if there is none.

    Args:
        folder: the cache's folder, which is not changed.
        run: prefix of the run's request numbers; empty: all requests.

    Raises:
        StoreError: it cannot be read.
    """
    file = folder / REPLIES_FILE
    found: list[tuple[str, float, float | None]] = []
    if _is_there(file):
        try:
            # Not read-only: the journal of a killed writer has to be rolled back.
            with contextlib.closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as connection:
                connection.execute("PRAGMA trusted_schema = OFF")
                if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'requests'").fetchone():
                    found = connection.execute("SELECT number, most, dollars FROM requests").fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the cost ledger in {file} cannot be read: {error}; {RESTORE}") from None
    for number, *amounts in found:
        # A received file may hold anything: a negative amount would enlarge the budget.
        if not isinstance(number, str) or not all(map(_is_amount, amounts)) or amounts[0] is None:
            raise StoreError(
                f"the cost ledger in {file} cannot be read: request {str(number)[:80]!a} has the costs "
                f"{str(amounts)[:80]}; expected its maximum cost and its cost, in dollars"
            )
    mine = [row for row in found if row[0].startswith(run)]
    return CostLedger(
        settled={number: dollars for number, _, dollars in mine if dollars is not None},
        under_way={number: most for number, most, dollars in mine if dollars is None},
    )


def release_cost_of_unanswered(folder: Path, except_numbers: Collection[str] = ()) -> float:
    """Enter a cost of 0 for requests that were never answered; returns the dollars that were reserved for them.

    The cost of the requests whose numbers are in ``except_numbers`` stays reserved.

    For users who know from the provider's record that they were not billed. No other process may be using the cache.

    Raises:
        StoreError: the cost ledger cannot be read or written.
    """
    freed = {each: most for each, most in read_cost_ledger(folder).under_way.items() if each not in except_numbers}
    file = folder / REPLIES_FILE
    if freed:
        try:
            with contextlib.closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as connection, connection:
                connection.executemany(
                    "UPDATE requests SET dollars = 0.0 WHERE number = ?", [(each,) for each in freed]
                )
        except sqlite3.Error as error:
            raise StoreError(f"the cost ledger in {file} cannot be written: {error}") from None
    return math.fsum(freed.values())


def _is_amount(value: object) -> bool:
    return value is None or (isinstance(value, float) and 0 <= value < math.inf)

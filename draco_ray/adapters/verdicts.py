"""Verdicts of judged trajectories in one SQLite file: judging writes them, a trainer's advantage estimator reads them.

Trainers shuffle batches, spread a group over several workers, and give their estimators only rewards and masks. So a
verdict is stored and looked up by the key of its trajectory:

    store = VerdictStore("verdicts.sqlite")
    store.put({key: StepVerdict.of(judged)})
    advantages_BT = store.spread(keys, advantages_B, mask_BT)

The file may be used by several processes of one machine at a time (write-ahead log; not on a network file system). It
is kept when they end, so a restarted trainer finds the earlier verdicts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import TypeAdapter

from draco_ray.adapters.conversations import JudgedConversation
from draco_ray.adapters.tokens import sampled_runs, token_advantages
from draco_ray.errors import ConfigError, DracoError
from draco_ray.records import FloatArray
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

Missing = Literal["error", "uniform"]
LEASE_SECONDS = 1800.0
"""After this time another worker may judge a group whose judging worker died."""
POLL_SECONDS = 0.5
ALIVE_SECONDS = 30.0
"""A worker that has not polled for this long counts as dead, and its trajectory no longer waits."""
TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (uid, grp, sample, record, verdict, PRIMARY KEY (uid, grp, sample));
CREATE TABLE IF NOT EXISTS waiting (uid, grp, sample, record, seen, PRIMARY KEY (uid, grp, sample));
CREATE TABLE IF NOT EXISTS judging (uid, grp, until, PRIMARY KEY (uid, grp));
"""


class MissingVerdict(DracoError):
    """A trainer asks for the verdict of a trajectory that was not judged."""


class TrajectoryKey(NamedTuple):
    """Identifies a trajectory."""

    uid: str
    """The task or prompt, as the trainer names it."""
    group: str
    """The group of that task, for example a generation step; empty if each uid has only one group."""
    sample: str
    """The trajectory of the group: its number, or `digest` of its tokens."""


def digest(value: Any) -> str:
    """A short name for a prompt, a list of token ids, or anything else that JSON can represent."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """The data of a judged trajectory that are needed to spread its advantage."""

    reward: float | None
    """R_i in [-1, 1]; None where judging failed."""
    quality: tuple[float | None, ...] = ()
    """Q_j of each step; None where no step is cited."""
    acted: tuple[bool, ...] = ()
    """For each turn of the agent, whether it is a step."""
    tokens: tuple[int, ...] | None = None
    """Number of sampled tokens of each turn, if known at judging; a row with other counts is stale."""
    first: int = 0
    """Index of the row's first turn, if a trainer splits a trajectory into several rows."""
    error: str | None = None
    """Why there is no reward."""

    def part(self, turns: int) -> tuple[int, ...]:
        """Token counts of ``turns`` turns, beginning with the row's first."""
        return (self.tokens or ())[self.first : self.first + turns]

    @classmethod
    def of(cls, judged: JudgedConversation | None, tokens: Sequence[int] | None = None) -> StepVerdict:
        """The verdict of a judged conversation; ``tokens`` are the sampled tokens of each turn."""
        if judged is None or judged.trace.reward is None:
            return cls(reward=None, error="no trace" if judged is None else judged.trace.error)
        counts = None if tokens is None else tuple(tokens)
        return cls(reward=judged.trace.reward, quality=tuple(judged.quality), acted=judged.acted, tokens=counts)


VERDICT = TypeAdapter(StepVerdict)


class VerdictStore:
    """See the module's docstring. The store can be pickled; copies in other processes use the same file."""

    def __init__(self, path: str | Path | None = None, *, missing: Missing = "error") -> None:
        """
        Args:
            path: the file; None: a new temporary one.
            missing: what `spread` does without a verdict. ``error`` raises; ``uniform`` leaves the trajectory's
                advantage on all of its tokens and counts it.

        Raises: ConfigError: ``missing`` is neither, or the file cannot be opened.
        """
        if missing not in ("error", "uniform"):
            raise ConfigError(f"missing={missing!r}: expected 'error' or 'uniform'")
        if path is None:
            folder = PrivateTempDir()
            path = folder.path / "verdicts.sqlite"
            weakref.finalize(self, folder.remove)
        self.path, self.missing = Path(path).absolute(), missing
        self.counts: Counter[str] = Counter()
        """Rows that `spread` has seen in this process: spread, uncited, cut, failed, stale, missing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"verdict store {self.path}: {error}; expected a writable file") from error

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        # A connection must not cross a fork or a thread; opening one takes a fraction of a millisecond.
        connection = sqlite3.connect(self.path, timeout=60.0)
        # With the write-ahead log this loses nothing when a process dies.
        connection.execute("PRAGMA synchronous=NORMAL")
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def put(self, verdicts: Mapping[TrajectoryKey, StepVerdict]) -> None:
        """Store verdicts; an existing key gets the new verdict."""
        rows = [(*key, "", json.dumps(asdict(verdict))) for key, verdict in verdicts.items()]
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?)", rows)

    def get(self, keys: Sequence[TrajectoryKey]) -> list[StepVerdict | None]:
        """Verdicts in the order of the keys; None where there is none."""
        with self._open() as connection:
            return [_verdict(connection, key) for key in keys]

    def spread(self, keys: Sequence[TrajectoryKey], advantages: ArrayLike, mask: ArrayLike) -> FloatArray:
        """Spread each trajectory's advantage over the tokens of its steps (Eq. `credit`).

        Every token keeps A_i if no step is cited, judging failed, or the row's turns differ from the judged ones (the
        trainer truncated it); `counts` counts these rows. Rows without a sampled token are all 0.

        Args:
            keys: B keys.
            advantages: (B,) A_i, as the trainer computed them.
            mask: (B, T) 1 where the policy sampled the token.

        Returns: (B, T) float32.

        Raises: MissingVerdict: no verdict, or one of another trajectory, and ``missing`` is ``error``; ValueError: the
            arguments differ in length.
        """
        advantages_B, mask_BT = np.asarray(advantages, dtype=np.float32), np.asarray(mask)
        if not len(keys) == len(advantages_B) == len(mask_BT):
            raise ValueError(f"{len(keys)} keys, {len(advantages_B)} advantages and {len(mask_BT)} rows of the mask")
        before = self.counts.copy()
        rows = [
            self._row(*each) if each[3].any() else np.zeros(len(each[3]), dtype=np.float32)
            for each in zip(keys, self.get(keys), map(float, advantages_B), mask_BT, strict=True)
        ]
        new = self.counts - before
        if without := {name: new[name] for name in ("failed", "stale", "missing", "cut") if new[name]}:
            log.warning("step credit: %s of %d rows keep a uniform advantage", without, len(keys))
        return np.stack(rows) if rows else np.zeros(mask_BT.shape, dtype=np.float32)

    def _row(self, key: TrajectoryKey, verdict: StepVerdict | None, advantage: float, mask_T: Any) -> FloatArray:
        mask_T = mask_T != 0
        runs = tuple(end - begin for begin, end in sampled_runs(mask_T))
        uniform_T = np.where(mask_T, np.float32(advantage), np.float32(0.0))
        if verdict is None or (verdict.tokens and verdict.part(len(runs)) != runs):
            reason = "missing" if verdict is None else "stale"
            if self.missing == "error":
                what = "no verdict" if verdict is None else "the verdict is of another trajectory (stale)"
                raise MissingVerdict(
                    f"trajectory {'/'.join(filter(None, key))}: {what} in {self.path}; judge the trajectory before its "
                    'advantage is computed, or set missing="uniform"'
                )
            self.counts[reason] += 1
            return uniform_T
        turns = verdict.tokens or runs
        if verdict.reward is None:
            self.counts["failed"] += 1
        elif not verdict.quality or any(each is None for each in verdict.quality):
            self.counts["uncited"] += 1
        elif len(turns) != len(verdict.acted):
            self.counts["cut"] += 1
        else:
            self.counts["spread"] += 1
            # The mask of the whole trajectory, of which this row may be a part: each turn's sampled tokens, then one
            # unsampled token.
            whole = np.concatenate([[1] * count + [0] for count in turns])
            values = token_advantages(advantage, verdict.quality, verdict.acted, whole)[whole != 0]
            begin = sum(turns[: verdict.first])
            uniform_T[mask_T] = values[begin : begin + mask_T.sum()]
        return uniform_T

    async def judge_in_group(
        self,
        key: TrajectoryKey,
        record: Mapping[str, Any],
        size: Callable[[], int],
        judge: Callable[[list[dict[str, Any]]], Awaitable[list[StepVerdict]]],
        *,
        timeout: float = 3600.0,
    ) -> StepVerdict:
        """Wait until the trajectory's group, which may be spread over workers, is complete and judged.

        The worker that first sees the complete group judges it; the others wait for its verdicts. A trajectory that was
        judged before, with the same record, gets its verdict at once.

        Args:
            key: this trajectory's key; no other group may have its uid and group.
            record: input of ``judge`` for this trajectory, as JSON.
            size: number of trajectories in the group; asked again while waiting, because one may be lost.
            judge: returns one verdict for each record of a group, in order.
            timeout: seconds until the group must be complete and judged.

        Raises: MissingVerdict: the group was not complete, or not judged, in time.
        """
        text, deadline, announced = json.dumps(record), time.monotonic() + timeout, -ALIVE_SECONDS
        while time.monotonic() < deadline:
            with self._open() as connection:
                if time.monotonic() - announced > ALIVE_SECONDS / 3:
                    row = (*key, text, time.time())
                    connection.execute("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?, ?, ?)", row)
                    connection.commit()
                    announced = time.monotonic()
                verdict, rows = _verdict(connection, key, text), _waiting(connection, key)
            if verdict is not None:
                return verdict
            if len(rows) >= size() and (rows := self._claim(key, text, size())):
                await self._judge_group(key, rows, judge)
            else:
                await asyncio.sleep(POLL_SECONDS)
        raise MissingVerdict(
            f"group {key.uid}: {len(rows)} of {size()} trajectories arrived within {timeout:.0f} s; the group is not "
            "judged"
        )

    def _claim(self, key: TrajectoryKey, record: str, size: int) -> list[tuple[str, str]]:
        """Samples and records of the group if this worker is the one to judge it; else an empty list."""
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            rows, now = _waiting(connection, key), time.time()
            if len(rows) < size or _verdict(connection, key, record) is not None:
                return []
            connection.execute("DELETE FROM judging WHERE uid = ? AND grp = ? AND until < ?", (*key[:2], now))
            row = (*key[:2], now + LEASE_SECONDS)
            claimed = connection.execute("INSERT OR IGNORE INTO judging VALUES (?, ?, ?)", row).rowcount == 1
        return rows if claimed else []

    async def _judge_group(self, key: TrajectoryKey, rows: list[tuple[str, str]], judge: Any) -> None:
        try:
            verdicts = await judge([json.loads(record) for _, record in rows])
            with self._open() as connection:
                connection.executemany(
                    "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?)",
                    [
                        (*key[:2], sample, record, json.dumps(asdict(verdict)))
                        for (sample, record), verdict in zip(rows, verdicts, strict=True)
                    ],
                )
                connection.execute("DELETE FROM waiting WHERE uid = ? AND grp = ?", key[:2])
        finally:
            with self._open() as connection:
                connection.execute("DELETE FROM judging WHERE uid = ? AND grp = ?", key[:2])


def _verdict(connection: sqlite3.Connection, key: TrajectoryKey, record: str | None = None) -> StepVerdict | None:
    row = connection.execute(
        "SELECT record, verdict FROM verdicts WHERE uid = ? AND grp = ? AND sample = ?", key
    ).fetchone()
    if row is None or record not in (None, row[0]):
        return None
    return VERDICT.validate_json(row[1])


def _waiting(connection: sqlite3.Connection, key: TrajectoryKey) -> list[tuple[str, str]]:
    """Samples and records of the group whose workers are alive."""
    return connection.execute(
        "SELECT sample, record FROM waiting WHERE uid = ? AND grp = ? AND seen > ? ORDER BY sample",
        (*key[:2], time.time() - ALIVE_SECONDS),
    ).fetchall()

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

import hashlib
import json
import logging
import sqlite3
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import TypeAdapter

from draco_ray.adapters.conversations import JudgedConversation
from draco_ray.adapters.per_token_advantages import sampled_spans, token_advantages
from draco_ray.errors import ConfigError, DracoError
from draco_ray.records import FloatArray
from draco_ray.temp_dirs import PrivateTempDir

log = logging.getLogger(__name__)

Missing = Literal["error", "uniform"]
CREATE_TABLE_SQL = "CREATE TABLE IF NOT EXISTS verdicts (uid, grp, sample, verdict, PRIMARY KEY (uid, grp, sample))"


class MissingVerdict(DracoError):
    """A trainer asks for the verdict of a trajectory that was not judged."""


class TrajectoryKey(NamedTuple):
    """Identifies a trajectory."""

    uid: str
    """The task or prompt, as the trainer names it."""
    group: str
    """The group of rollouts of this uid, for example the generation step; empty if each uid has only one group."""
    sample: str
    """The trajectory within its group: its index, or the `digest` of its tokens."""


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
    """Why the trajectory has no reward; None if it has one."""

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


VERDICT_ADAPTER = TypeAdapter(StepVerdict)


class VerdictStore:
    """See the module's docstring. The store can be pickled; copies in other processes use the same file."""

    def __init__(self, path: str | Path | None = None, *, missing: Missing = "error") -> None:
        """
        Args:
            path: the file; None: a new temporary one.
            missing: what `spread` does without a verdict. ``error`` raises; ``uniform`` leaves the trajectory's
                advantage on all of its tokens and counts the row in `counts`.

        Raises: ConfigError: ``missing`` has another value, or the file cannot be opened.
        """
        if missing not in ("error", "uniform"):
            raise ConfigError(f"missing={missing!r}: expected 'error' or 'uniform'")
        if path is None:
            folder = PrivateTempDir()
            path = folder.path / "verdicts.sqlite"
            weakref.finalize(self, folder.remove)
        self.path, self.missing = Path(path).absolute(), missing
        self.counts: Counter[str] = Counter()
        """Outcome of `spread` (spread, uncited, cut, failed, stale or missing) -> number of rows, in this process."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(CREATE_TABLE_SQL)
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
        rows = [(*key, json.dumps(asdict(verdict))) for key, verdict in verdicts.items()]
        # Columns are named because files of earlier versions have one more.
        command = "INSERT OR REPLACE INTO verdicts (uid, grp, sample, verdict) VALUES (?, ?, ?, ?)"
        with self._open() as connection:
            connection.executemany(command, rows)

    def get(self, keys: Sequence[TrajectoryKey]) -> list[StepVerdict | None]:
        """Verdicts in the order of the keys; None for a key without a verdict."""
        query = "SELECT verdict FROM verdicts WHERE uid = ? AND grp = ? AND sample = ?"
        with self._open() as connection:
            rows = [connection.execute(query, key).fetchone() for key in keys]
        return [None if row is None else VERDICT_ADAPTER.validate_json(row[0]) for row in rows]

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
            raise ValueError(f"{len(keys)} keys, {len(advantages_B)} advantages and {len(mask_BT)} rows; must match")
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
        runs = tuple(end - begin for begin, end in sampled_spans(mask_T))
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

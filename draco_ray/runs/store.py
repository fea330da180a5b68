"""Writes a run directory: rows as they appear, and one file per table for a finished step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draco_ray.config.config_signature import private_opener
from draco_ray.records import JudgeCall
from draco_ray.runs.directory import PART_SUFFIX, STEP_PATTERN, RunDirectory, read_table, write_part, write_private
from draco_ray.runs.rows import Row, call_rows, part_rows, recover_paid_call
from draco_ray.runs.schema import STEP_TABLES, TABLE_SCHEMAS

ROW_GROUP_BYTES = 32 * 2**20
"""Size of a row group before compression, which limits how much of a table is in memory."""


class RunStore:
    """The only writer of a run directory.

    Every file is written under a temporary name and renamed, so a killed run leaves complete files only.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def write(self, table: str, step: int, key: str, rows: Sequence[Row]) -> None:
        """Write rows of an unfinished step; writing the same key again replaces them."""
        if not rows:
            return
        try:
            made = pa.Table.from_pylist(list(rows), schema=TABLE_SCHEMAS[table])
        except UnicodeEncodeError:
            made = pa.Table.from_pylist(_encodable(rows), schema=TABLE_SCHEMAS[table])
        self.write_table(table, step, key, made)

    def write_table(self, table: str, step: int, key: str, rows: pa.Table) -> None:
        """Like `write`, for an Arrow table."""
        path = self.directory.part(table, step, key)
        (write_part if path.suffix == PART_SUFFIX else write_parquet)(path, rows)

    def drop_rollouts(self, step: int, but: Collection[str]) -> None:
        """Remove the rollouts of an unfinished step, except those with the keys ``but``."""
        for path in (path for table in ("trajectories", "steps") for path in self.directory.parts(table, step)):
            if path.stem not in but:
                path.unlink()

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the step's metrics line and merge its parts into one file per table. May be repeated after a kill."""
        self.write_metrics(step, metrics)
        self.gather(step)

    def gather(self, step: int, tables: Collection[str] = TABLE_SCHEMAS.keys()) -> None:
        """Merge the parts of a finished step into one file per table. May be repeated after a kill."""
        for table in tables:
            parts = self.directory.part(table, step, "any").parent
            if not parts.is_dir():
                continue
            whole = parts.with_suffix(".parquet")
            # If the merged file exists, the parts are leftovers that were not removed yet.
            if not whole.exists() and (paths := self.directory.parts(table, step)):
                _join(whole, table, paths)
            shutil.rmtree(parts)

    def ungathered(self, last: int) -> list[int]:
        """Steps up to ``last`` that still have parts, ascending."""
        folders = (path for table in STEP_TABLES for path in (self.directory.tables / table).glob("step*/"))
        steps = {int(found[1]) for path in folders if (found := STEP_PATTERN.fullmatch(path.name))}
        return sorted(step for step in steps if step <= last)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a step's metrics line, or replace it."""
        # Rewrite the file: a killed writer may have written this step's line already.
        lines = [line for line in self.directory.metrics() if line["step"] != step] + [dict(metrics)]
        write_private(self.directory.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))


def _encodable(value: Any) -> Any:
    """A value without lone surrogates: errors and requirements may quote what the policy wrote."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table's file atomically, readable by its owner only."""
    _write(path, table.schema, [table])


def _join(whole: Path, table: str, paths: Sequence[Path]) -> None:
    """Merge part files into one, a row group at a time."""

    def groups() -> Iterator[pa.Table]:
        held: list[pa.Table] = []
        size = 0
        for path in paths:
            held.append(read_table(path, table))
            size += held[-1].nbytes
            if size > ROW_GROUP_BYTES:
                yield pa.concat_tables(held)
                held, size = [], 0
        if held:
            yield pa.concat_tables(held)

    _write(whole, TABLE_SCHEMAS[table], groups())


def _write(path: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(".tmp")
    with (
        open(temporary, "wb", opener=private_opener) as file,
        # No dictionary encoding: for token ids or prompts it costs more than it saves.
        pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
        ) as writer,
    ):
        for group in groups:
            writer.write_table(group)
        writer.close()
        # The parts are removed next, so the file must survive a power failure.
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class PaidCalls:
    """Rows of judge calls that count each paid reply once, also after the run was killed and resumed."""

    def __init__(self, store: RunStore, requests_name: str) -> None:
        """
        Args:
            store: the store of the run.
            requests_name: prefix of the request numbers of this run.
        """
        self._store = store
        self._requests_name = requests_name

    def rows(self, step: int, key: str, calls: Iterable[JudgeCall], table: str = "judge_calls") -> list[Row]:
        """Rows for the calls of a judge phase that is recorded under ``key`` of ``table``.

        If a cached reply was paid for earlier in this step, its earlier row is used instead of a new one. Rows of
        other calls that an earlier process paid for follow at the end.
        """
        made = call_rows(step, [recover_paid_call(call, self._recorded, self._requests_name) for call in calls])
        earlier = part_rows(self._store.directory, table, step, key)
        for index, row in enumerate(made):
            asked = (row["prompt"], row["reply"])
            first = next((each for each in earlier if asked == (each["prompt"], each["reply"])), None)
            if not row["requests"] and first is not None:
                # Use each earlier row only once: votes may have equal prompts and replies, and each vote was paid for.
                made[index] = first
                earlier.remove(first)
        known = {row["call_id"] for row in made}
        return [*made, *(row for row in earlier if row["call_id"] not in known)]

    @cached_property
    def _recorded(self) -> set[str]:
        """Call ids that are already in the tables."""
        kept = self._store.directory
        names = ("judge_calls", "heldout_calls")
        return {each for name in names for each in kept.table(name, columns=["call_id"]).column("call_id").to_pylist()}

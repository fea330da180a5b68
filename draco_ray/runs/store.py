"""Writing a run directory: rows land on disk as they are made, and a finished step becomes one file a table."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draco_ray.config.origin import private
from draco_ray.runs.directory import STEP, SUFFIX, RunDirectory, read_table, write_part, write_private
from draco_ray.runs.rows import Row
from draco_ray.runs.schema import STEP_TABLES, TABLES

ROW_GROUP_BYTES = 32 * 2**20
"""Of a gathered table, before compression: no more of it is held at once."""


class RunStore:
    """The one writer of a run directory.

    Every write goes to a temporary name first and is renamed, so a run that is killed leaves whole files only.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def write(self, table: str, step: int, key: str, rows: Sequence[Row]) -> None:
        """Keep ``rows`` of a step under way; the same key written again replaces them."""
        if rows:
            self.write_table(table, step, key, pa.Table.from_pylist(list(rows), schema=TABLES[table]))

    def write_table(self, table: str, step: int, key: str, rows: pa.Table) -> None:
        """As `write`."""
        path = self.directory.part(table, step, key)
        (write_part if path.suffix == SUFFIX else write_parquet)(path, rows)

    def part(self, table: str, step: int, key: str) -> list[Row]:
        """What was kept under a key of a step under way."""
        path = self.directory.part(table, step, key)
        rows: list[Row] = read_table(path, table).to_pylist() if path.exists() else []
        return rows

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the step's metrics line and gather its parts into one file a table; killed, it can be repeated."""
        self.write_metrics(step, metrics)
        self.gather(step)

    def gather(self, step: int, tables: Collection[str] = TABLES.keys()) -> None:
        """Make one file a table of the parts of a step to which nothing is added; killed, it can be repeated."""
        for table in tables:
            parts = self.directory.part(table, step, "any").parent
            if not parts.is_dir():
                continue
            whole = parts.with_suffix(".parquet")
            # Beside a table that is whole, parts are what is left of those it was made of: some are gone.
            if not whole.exists() and (paths := self.directory.parts(table, step)):
                _join(whole, table, paths)
            shutil.rmtree(parts)

    def ungathered(self, last: int) -> list[int]:
        """Steps up to ``last`` some of whose tables are in parts, ascending."""
        folders = (path for table in STEP_TABLES for path in (self.directory.tables / table).glob("step*/"))
        steps = {int(found[1]) for path in folders if (found := STEP.fullmatch(path.name))}
        return sorted(step for step in steps if step <= last)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a step's metrics line, in place of one that is there."""
        # Rewritten as a whole: a writer that was killed may have left half a line, or has this step's line already.
        lines = [line for line in self.directory.metrics() if line["step"] != step] + [dict(metrics)]
        write_private(self.directory.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table's file whole or not at all, for its owner's eyes."""
    _write(path, table.schema, [table])


def _join(whole: Path, table: str, paths: Sequence[Path]) -> None:
    """One file of many, a row group of them at a time."""

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

    _write(whole, TABLES[table], groups())


def _write(path: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(".tmp")
    with (
        open(temporary, "wb", opener=private) as file,
        # A dictionary of token ids or of prompts is as long as its column, and costs more than all the rest.
        pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
        ) as writer,
    ):
        for group in groups:
            writer.write_table(group)
        writer.close()
        # The parts that it takes the place of are removed: it has to outlive the machine's power as they do.
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

"""Writing a run directory: rows land on disk as they are made, and a finished step becomes one file a table."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draco_ray.config.origin import private
from draco_ray.runs.directory import RunDirectory, read_table, write_private
from draco_ray.runs.rows import Row
from draco_ray.runs.schema import TABLES


class RunStore:
    """The one writer of a run directory.

    Every write goes to a temporary name first and is renamed, so a run that is killed leaves whole files only.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def write(self, table: str, step: int, key: str, rows: Sequence[Row]) -> None:
        """Keep ``rows`` of a step under way; the same key written again replaces them."""
        if rows:
            path = self.directory.part(table, step, key)
            write_parquet(path, pa.Table.from_pylist(list(rows), schema=TABLES[table]))

    def part(self, table: str, step: int, key: str) -> list[Row]:
        """What was kept under a key of a step under way."""
        path = self.directory.part(table, step, key)
        if not path.exists():
            return []
        rows: list[Row] = read_table(path, table).to_pylist()
        return rows

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the step's metrics line and gather its parts into one file a table; killed, it can be repeated."""
        self.write_metrics(step, metrics)
        for table in TABLES:
            parts = self.directory.part(table, step, "any").parent
            if not parts.is_dir():
                continue
            whole = parts.with_suffix(".parquet")
            # Beside a table that is whole, parts are what is left of those it was made of: some are gone.
            if not whole.exists() and (paths := sorted(parts.glob("*.parquet"))):
                write_parquet(whole, pa.concat_tables([read_table(path, table) for path in paths]))
            shutil.rmtree(parts)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a step's metrics line, in place of one that is there."""
        # Rewritten as a whole: a writer that was killed may have left half a line, or has this step's line already.
        lines = [line for line in self.directory.metrics() if line["step"] != step] + [dict(metrics)]
        write_private(self.directory.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table's file whole or not at all, for its owner's eyes."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", opener=private) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    os.replace(temporary, path)

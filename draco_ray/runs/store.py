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

from draco_ray.runs.directory import RunDirectory
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
            _write_parquet(self._part(table, step, key), pa.Table.from_pylist(list(rows), schema=TABLES[table]))

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Gather the step's parts into one file a table and append its metrics line."""
        for table, schema in TABLES.items():
            parts = self._part(table, step, "any").parent
            if not parts.is_dir():
                continue
            gathered = [
                pq.read_table(path, schema=schema, partitioning=None) for path in sorted(parts.glob("*.parquet"))
            ]
            _write_parquet(parts.with_suffix(".parquet"), pa.concat_tables(gathered))
            shutil.rmtree(parts)
        with self.directory.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(metrics)) + "\n")

    def _part(self, table: str, step: int, key: str) -> Path:
        return self.directory.tables / table / f"step{step:05d}" / f"{key}.parquet"


def _write_parquet(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)

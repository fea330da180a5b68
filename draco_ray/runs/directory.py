"""Where things lie in a run directory, and reading them back.

::

    config.yaml                       the resolved configuration
    metrics.jsonl                     one line a training step
    tables/<table>/step00003.parquet  a finished step
    tables/<table>/step00003/*.parquet  a step under way: one file per rollout or group, as they finish
    checkpoints/step00003/            adapter (PEFT format), optimizer, counters
    judge_cache/                      every judge reply by request, so that none is paid for twice
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draco_ray.errors import ConfigError
from draco_ray.runs.schema import TABLES


class RunDirectory:
    """Paths and readers of one run. Reading never changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run.

        Raises:
            ConfigError: if ``path`` is not a run directory.
        """
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path}: not a run directory (it has no config.yaml)")
        return cls(path)

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> RunDirectory:
        """A new run.

        Raises:
            ConfigError: if ``path`` exists already, or cannot be written.
        """
        try:
            path.mkdir(parents=True)
            (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"run directory {path} already exists; choose another run.name") from None
        except OSError as error:
            raise ConfigError(f"run directory {path} cannot be created: {error.strerror}; set run.root") from None
        return cls(path)

    @property
    def tables(self) -> Path:
        """Folder of the Parquet tables."""
        return self.path / "tables"

    @property
    def checkpoints(self) -> Path:
        """Folder of the learner's checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        """The metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def judge_cache(self) -> Path:
        """The default place of the durable reply cache."""
        return self.path / "judge_cache"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint written after ``step``."""
        return self.checkpoints / f"step{step:05d}"

    def part(self, table: str, step: int, key: str) -> Path:
        """File of one rollout's or group's rows in a step under way."""
        return self.tables / table / f"step{step:05d}" / f"{key}.parquet"

    def config_text(self) -> str:
        """The resolved configuration, as YAML."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every finished step, in order."""
        if not self.metrics_file.exists():
            return []
        # A line that has no end yet is one that a killed writer began.
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.strip()]

    def steps(self) -> list[int]:
        """Training steps that have rows, finished or under way, ascending."""
        names = {path.stem for path in self.tables.glob("*/step*")}
        return sorted(int(name.removeprefix("step")) for name in names)

    def table(self, name: str, step: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """A table, finished steps and the one under way alike: all of it, or one training step's rows, some columns.

        Raises:
            KeyError: if no table has that name.
        """
        schema = TABLES[name]
        folder = self.tables / name
        pattern = "step*" if step is None else f"step{step:05d}"
        finished = sorted(folder.glob(f"{pattern}.parquet"))
        # Leftovers of a step that was compacted since are the same rows twice.
        under_way = [
            path
            for path in sorted(folder.glob(f"{pattern}/*.parquet"))
            if not path.parent.with_suffix(".parquet").exists()
        ]
        wanted = schema.names if columns is None else list(columns)
        parts = [pq.read_table(path, schema=schema, columns=wanted, partitioning=None) for path in finished + under_way]
        return pa.concat_tables(parts) if parts else schema.empty_table().select(wanted)

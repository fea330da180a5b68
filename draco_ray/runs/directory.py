"""Layout and readers of a run directory.

::

    run.json                          schema version, and whose configuration it is (`config.config_signature`)
    config.yaml                       the resolved configuration
    metrics.jsonl                     one line per training step
    manifest.json                     SHA-256 digests of finished steps (`draco_ray.runs.manifest`)
    tables/<table>/step00003.parquet  a finished step (for measurements of a policy: step00003/*.parquet)
    tables/<table>/step00003/*.arrow  an unfinished step: one file per rollout or group, as they finish
    checkpoints/step00003/            adapter (PEFT format), optimizer, counters and digests
    judge_cache/                      judge replies by request, so that none is paid for twice

Only the owner may read a run directory, unless they change its mode. It may come from somebody else, so nothing in it
is unpickled, and a damaged file is reported in one line with its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draco_ray.config import config_signature
from draco_ray.config.config_signature import private_opener
from draco_ray.config.config_signature import write_private as write_private
from draco_ray.config.file_names import validate_file_name
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError, DamagedRun, StoreError
from draco_ray.records import EpisodeEnd, Termination, Verdict
from draco_ray.runs.schema import REQUIRED, STEP_TABLES, STRUCTURED_METRICS, TABLE_SCHEMAS

PART_SUFFIX = ".arrow"
"""File extension of a part: the file of one rollout or group of an unfinished step."""
_CHECKSUM = 4


def write_part(path: Path, rows: pa.Table) -> None:
    """Write a part atomically, readable by its owner only. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    data = sink.getvalue()
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", opener=private_opener) as file:
        file.write(data)
        file.write(zlib.crc32(data).to_bytes(_CHECKSUM, "little"))
    os.replace(temporary, path)


def read_part(path: Path) -> pa.Table:
    """The rows of a part.

    Raises:
        OSError, ValueError: it cannot be read, or its checksum is wrong.
    """
    data = memoryview(path.read_bytes())
    rows, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if zlib.crc32(rows) != int.from_bytes(checksum, "little"):
        raise ValueError("the file's checksum is wrong")
    with pa.ipc.open_stream(pa.py_buffer(rows)) as stream:
        return stream.read_all()


STEP_PATTERN = re.compile(r"step([0-9]{1,9})")
"""Name of a training step's folder or file."""
READ_ATTEMPTS = 10
"""Attempts to read a table while a writer merges its parts."""
_VALUES: dict[tuple[str, str], type[Enum]] = {
    ("trajectories", "ended"): EpisodeEnd,
    ("trajectories", "termination"): Termination,
    ("evaluation_trajectories", "ended"): EpisodeEnd,
    ("evaluation_trajectories", "termination"): Termination,
    ("evaluations", "ended"): EpisodeEnd,
    ("verdicts", "verdict"): Verdict,
    ("citations", "verdict"): Verdict,
}
"""(table, column) -> the enumeration whose values the column holds."""


def read_text(path: Path) -> str:
    """A text file of a run or an evaluation directory.

    Raises:
        DamagedRun: it is missing, no regular file, or no UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, error) from None


def read_bytes(path: Path) -> bytes:
    """A file of a run or an evaluation directory.

    Raises:
        DamagedRun: it is missing, or no regular file.
    """
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, error) from None


def damaged(path: Path, problem: object) -> DamagedRun:
    """The error for a damaged file."""
    return DamagedRun(f"{path}: damaged: {' '.join(str(problem).split())[:300]}; restore this file, or move it away")


def read_table(path: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of one file of the table ``name``, all columns or some.

    Raises:
        DamagedRun: the file cannot be read, or its columns are not the table's.
    """
    schema = TABLE_SCHEMAS[name]
    wanted = schema if columns is None else pa.schema([schema.field(column) for column in columns])
    found = read_parquet(path, wanted)
    try:
        _check_rows(found, name)
    except DamagedRun as error:
        raise damaged(path, error) from None
    return found


def read_parquet(path: Path, schema: pa.Schema) -> pa.Table:
    """The columns of ``schema`` from a file of a run directory: Parquet, or a part of an unfinished step.

    Raises:
        DamagedRun: the file cannot be read, or its columns do not match.
    """
    try:
        check_regular(path)
        if path.suffix == PART_SUFFIX:
            rows = read_part(path)
            # Copy the columns: all columns share one buffer, which would stay in memory.
            found = rows.select([name for name in schema.names if name in rows.column_names])
            found = found.take(pa.array(range(rows.num_rows)))
        else:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                found = file.read([name for name in schema.names if name in file.schema_arrow.names])
        if absent := [column for column in schema.names if column not in found.column_names]:
            raise DamagedRun(f"the file has no column {absent[0]!r}")
        found = found.select(schema.names)
        for field in schema:
            if found.schema.field(field.name).type != field.type:
                kind = found.schema.field(field.name).type
                raise DamagedRun(f"column {field.name!r} is {kind}, expected {field.type}")
        found = found.cast(schema)
        found.validate(full=True)
    except (OSError, pa.ArrowException, DamagedRun, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from None
    return found


def _check_rows(table: pa.Table, name: str) -> None:
    for column in table.column_names:
        values = table.column(column)
        if column in REQUIRED[name] and values.null_count:
            raise DamagedRun(f"column {column!r} has nulls")
        if (kind := _VALUES.get((name, column))) is not None:
            known = {each.value for each in kind}
            if unknown := [each for each in pc.unique(values).to_pylist() if each is not None and each not in known]:
                raise DamagedRun(f"column {column!r} contains the unknown value {unknown[0]!r}")


def check_regular(path: Path) -> None:
    """Refuse a file that is not regular: reading a pipe or a device would block. Raises: OSError."""
    if not path.exists():
        raise OSError("it is missing")
    if not path.is_file():
        raise OSError("not a regular file")


def _is_number(value: object) -> bool:
    # JSON has integers that exceed every float.
    return isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 2**63)


class RunDirectory:
    """Paths and readers of one run. Reading never changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables = path / "tables"
        """Folder of the Parquet tables."""
        self.checkpoints = path / "checkpoints"
        """Folder of the learner's checkpoints."""
        self.metrics_file = path / "metrics.jsonl"
        """The file of metrics, one JSON object per line."""
        self.judge_cache = path / "judge_cache"
        """Default folder of the stored judge replies."""

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run.

        Raises:
            ConfigError: if ``path`` is not a run directory.
            DamagedRun: its schema has another version, or its ``run.json`` cannot be read.
        """
        path = Path(path)
        try:
            if path.is_dir() and not os.access(path, os.X_OK):
                raise ConfigError(f"{path}: permission denied; a run directory is private to the user who made it")
            if not path.is_dir() or not os.path.lexists(path / "config.yaml"):
                raise ConfigError(f"{path}: not a run directory (it has no config.yaml)")
        except OSError as error:
            raise ConfigError(f"{path}: not a run directory ({error.strerror})") from None
        run = cls(path)
        if run.schema_version != config_signature.SCHEMA_VERSION:
            raise DamagedRun(
                f"{path}: run directory of schema version {run.schema_version}, expected "
                f"{config_signature.SCHEMA_VERSION}; use the draco-ray that wrote it, or start a new run"
            )
        if not run.ours and (link := config_signature.find_escaping_symlink(path)) is not None:
            raise DamagedRun(f"{link}: this link leads out of a run directory that somebody else made; remove the link")
        return run

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> RunDirectory:
        """A new run, readable by its owner only.

        Raises:
            ConfigError: if ``path`` exists already, or cannot be written.
        """
        draft: Path | None = None
        try:
            str(path.absolute()).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"run directory {path}: expected a name in UTF-8, which tables need") from None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                raise FileExistsError
            # Rename the directory once it has its configuration, so that a start killed here does not take the name.
            draft = path.with_name(f".new-run-{secrets.token_hex(8)}")
            draft.mkdir(mode=0o700)
            cls(draft).write_config(config_yaml)
            draft.rename(path)
        except OSError as error:
            if draft is not None:
                shutil.rmtree(draft, ignore_errors=True)
            if path.is_dir():
                raise ConfigError(f"run directory {path} already exists; choose another run.name") from None
            why = "because a file has this name" if isinstance(error, FileExistsError) else error.strerror
            raise ConfigError(f"run directory {path} cannot be created: {why}; set run.root") from None
        return cls(path)

    def write_config(self, config_yaml: str) -> None:
        """Write the run's configuration and mark it as this user's. Raises: OSError."""
        path = self.path / "config.yaml"
        if path.exists():
            # If the process is killed between these writes, run.json matches the configuration, be it old or new.
            config_signature.sign_config(self.path, read_text(path), config_yaml)
        write_private(path, config_yaml)
        config_signature.sign_config(self.path, config_yaml)
        for known in ("_config", "ours", "schema_version"):
            self.__dict__.pop(known, None)

    @cached_property
    def ours(self) -> bool:
        """Whether this user wrote the run's configuration."""
        try:
            return config_signature.is_ours(self.path, self.config_text())
        except DamagedRun:
            return False

    @cached_property
    def schema_version(self) -> int:
        """The schema version of the run directory.

        Raises:
            DamagedRun: ``run.json`` is missing or cannot be read.
        """
        path = self.path / config_signature.RUN_FILE
        try:
            version = json.loads(read_text(path))["schema_version"]
            if not isinstance(version, int) or isinstance(version, bool) or version < 0:
                raise ValueError(f"schema_version is {version!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(path, f"no schema version ({error})") from None
        return version

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint written after ``step``."""
        return self.checkpoints / f"step{step:05d}"

    def part(self, table: str, step: int, key: str) -> Path:
        """File for the rows of one rollout or group of an unfinished step.

        Raises:
            DamagedRun: ``key`` comes from a table and would lead out of the folder.
        """
        try:
            return self.tables / table / f"step{step:05d}" / f"{validate_file_name(key)}{_part_suffix(table)}"
        except ValueError as error:
            raise DamagedRun(
                f"{self.tables / table}: rows of step {step} have the invalid name {key[:100]!r}: {error}"
            ) from None

    def parts(self, table: str, step: int) -> list[Path]:
        """The part files of a table for an unfinished step."""
        return self._parts(table, f"step{step:05d}")

    def config_text(self) -> str:
        """The resolved configuration, as YAML.

        Raises:
            DamagedRun: it cannot be read.
        """
        path = self.path / "config.yaml"
        text = read_text(path)
        if (problem := config_signature.config_edit_problem(self.path, text)) is not None:
            raise damaged(path, problem)
        return text

    def setting(self, key: str) -> Any:
        """The value of a dotted key in the run's configuration, or the default.

        Raises:
            DamagedRun: the configuration cannot be read, or a value is invalid.
        """
        node: Any = self._config
        for part in key.split("."):
            node = getattr(node, part)
        return node

    @cached_property
    def _config(self) -> DracoConfig:
        self.config_text()  # Raises DamagedRun if the file was edited.
        path = self.path / "config.yaml"
        try:
            return load_config(str(path), trust=True)
        except ConfigError as error:
            raise damaged(path, error) from None

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every finished step, in order.

        Raises:
            DamagedRun: the file cannot be read, or a line is invalid.
        """
        if not os.path.lexists(self.metrics_file):
            return []
        # The file is written atomically, so a line without a newline is damage.
        *lines, rest = read_text(self.metrics_file).split("\n")
        if rest or not lines:
            raise damaged(self.metrics_file, f"line {len(lines) + 1} is incomplete" if rest else "it is empty")
        read = [self._metrics_line(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        # Lines that were restored from a copy may be at the end.
        read.sort(key=lambda line: line["step"])
        for one, other in pairwise(read):
            if one["step"] == other["step"]:
                raise damaged(self.metrics_file, f"step {one['step']} occurs twice")
        return read

    def _metrics_line(self, number: int, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text, parse_constant=float)
            if not isinstance(line, dict):
                raise ValueError(f"expected an object, found {type(line).__name__}")
            if type(line.get("step")) is not int or line["step"] < 0:
                raise ValueError("step: expected a step number")
            for name, value in line.items():
                if name not in STRUCTURED_METRICS and not _is_number(value):
                    raise ValueError(f"{name}: expected a number")
        except (ValueError, RecursionError) as error:
            raise damaged(self.metrics_file, f"line {number}: {error}") from None
        # We write missing measurements as null; other JSON writers may use NaN or infinity, so replace these by null.
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }

    def steps(self) -> list[int]:
        """Training steps that have rows, finished or not, ascending."""
        found = (STEP_PATTERN.fullmatch(path.stem) for path in self.tables.glob("*/step*"))
        return sorted({int(match[1]) for match in found if match})

    @property
    def untouched(self) -> bool:
        """Whether the run never began: it has no rows, metrics or checkpoints."""
        return not (self.steps() or self.checkpoint_steps() or os.path.lexists(self.metrics_file))

    def checkpoint_steps(self) -> list[int]:
        """Training steps that have a checkpoint, ascending."""
        found = (STEP_PATTERN.fullmatch(path.name) for path in self.checkpoints.glob("step*"))
        return sorted(int(match[1]) for match in found if match)

    def table(self, name: str, step: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """A table with the rows of all training steps or of one, finished or not.

        Raises:
            KeyError: if no table has that name.
            DamagedRun: a file cannot be read, or has other columns, another step's rows or an unexpected name.
        """
        wanted = TABLE_SCHEMAS[name].names if columns is None else list(columns)
        read_too = [*wanted, *({"training_step"} - set(wanted))]
        for left in reversed(range(READ_ATTEMPTS)):
            paths = self._files(name, step)
            try:
                read = [_of_its_step(path, read_table(path, name, read_too)) for path in paths]
            except DamagedRun:
                # The parts may have been merged and removed meanwhile.
                if left and paths != self._files(name, step):
                    continue
                raise
            return pa.concat_tables([TABLE_SCHEMAS[name].empty_table().select(read_too), *read]).select(wanted)
        raise AssertionError

    def _files(self, name: str, step: int | None) -> list[Path]:
        """The files that hold a table's rows, each row once."""
        folder = self.tables / name
        pattern = "step*" if step is None else f"step{step:05d}"
        # List parts first: if a step is merged in between, its parts are left out below.
        under_way = self._parts(name, pattern)
        finished = sorted(folder.glob(f"{pattern}.parquet"))
        if strange := [path for path in finished if _step_of(path) is None]:
            raise damaged(strange[0], "its name is not that of a step, so its rows may be duplicates")
        # Leave out the parts of a merged step: its Parquet file has the same rows.
        gathered = set(finished)
        return finished + [path for path in under_way if path.parent.with_suffix(".parquet") not in gathered]

    def _parts(self, table: str, pattern: str) -> list[Path]:
        found: list[Path] = []
        for folder in (self.tables / table).glob(f"{pattern}/"):
            # The folder is removed once its step has been merged.
            with contextlib.suppress(FileNotFoundError):
                found += folder.glob(f"*{_part_suffix(table)}")
        return sorted(found)


def _step_of(path: Path) -> int | None:
    """The step in the name of a file or its folder; None for other names, such as those of copies."""
    found = STEP_PATTERN.fullmatch(path.parent.name) or STEP_PATTERN.fullmatch(path.stem)
    step = None if found is None else int(found[1])
    return step if found is not None and found[0] == f"step{step:05d}" else None


def _of_its_step(path: Path, rows: pa.Table) -> pa.Table:
    """Return ``rows`` if they all belong to the step in the file's name; rows of another step might be duplicates."""
    if others := [step for step in pc.unique(rows.column("training_step")).to_pylist() if step != _step_of(path)]:
        raise damaged(path, f"it has rows of step {others[0]}")
    return rows


def _part_suffix(table: str) -> str:
    """Suffix of a table's parts; parts that are never merged are Parquet files."""
    return PART_SUFFIX if table in STEP_TABLES else ".parquet"


@contextlib.contextmanager
def lock_run(run: RunDirectory) -> Iterator[None]:
    """Lock a run directory, so that only one process works in it.

    Raises:
        ConfigError: another process works in it.
        StoreError: it cannot be written.
    """
    lock = run.path / ".lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"run directory {run.path} cannot be written: {error.strerror}; make it writable, and continue the run"
            ) from None
        raise damaged(lock, error.strerror) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run directory {run.path}: another process is using it; end that process") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def as_store_errors(run: Path) -> Iterator[None]:
    """Turn an OSError of a write into a `StoreError` of one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise StoreError(
            f"run directory {run} cannot be written: {why}; free disk space there, or make it writable"
        ) from None

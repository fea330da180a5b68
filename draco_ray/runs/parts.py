"""Rows of a step under way, a file for each rollout or group: written at once, read once more when they are gathered.

A file is a stream of Arrow's (``pyarrow.ipc.open_stream`` reads it) and its CRC-32, four bytes, the lowest first. A
Parquet file of so few rows takes ten times as long to write, and to read.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pyarrow as pa

from draco_ray.config.origin import private

SUFFIX = ".arrow"
"""File extension of a part."""
_CHECKSUM = 4


def write_part(path: Path, rows: pa.Table) -> None:
    """Write a part whole or not at all, for its owner's eyes. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    data = sink.getvalue()
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", opener=private) as file:
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
        raise ValueError("its checksum is wrong")
    with pa.ipc.open_stream(pa.py_buffer(rows)) as stream:
        return stream.read_all()

"""Rows of tables: schemas in short notation, rows by column, and numbers that may be missing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

import pyarrow as pa

RowT = TypeVar("RowT", bound=Mapping[str, Any])


def columns(*groups: str) -> pa.Schema:
    """A schema with these columns, in order; each group is ``"type: names"``.

    >>> columns("string: run judge", "int64: step", "string[]: titles").names
    ['run', 'judge', 'step', 'titles']
    """
    fields = []
    for group in groups:
        kind, names = group.split(": ")
        each = pa.type_for_alias(kind.removesuffix("[]"))
        fields += [(name, pa.list_(each) if kind.endswith("[]") else each) for name in names.split()]
    return pa.schema(fields)


def grouped(rows: Iterable[RowT], *columns: str) -> defaultdict[Any, list[RowT]]:
    """Rows by the value of a column, or by the tuple of the values of several columns.

    >>> dict(grouped([{"task": "a", "step": 1}, {"task": "b", "step": 1}], "step"))
    {1: [{'task': 'a', 'step': 1}, {'task': 'b', 'step': 1}]}
    """
    found: defaultdict[Any, list[RowT]] = defaultdict(list)
    key = itemgetter(*columns)
    for row in rows:
        found[key(row)].append(row)
    return found


def mean(values: Iterable[float]) -> float | None:
    """The mean; None without values."""
    kept = list(values)
    return math.fsum(kept) / len(kept) if kept else None


def finite(value: float | None) -> float | None:
    """The value; None if it is missing, infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None

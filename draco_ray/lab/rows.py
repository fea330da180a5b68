"""Rows of tables: schemas in short notation, rows by column, and numbers that may be missing."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa

from draco_ray.runs.directory import RunDirectory

ItemT = TypeVar("ItemT")
RowT = TypeVar("RowT", bound=Mapping[str, Any])
ParametersT = ParamSpec("ParametersT")


def table_schema(*groups: str) -> pa.Schema:
    """A schema with these columns, in order; each group is ``"type: names"``.

    >>> table_schema("string: run judge", "int64: step", "string[]: titles").names
    ['run', 'judge', 'step', 'titles']
    """
    fields = []
    for group in groups:
        kind, names = group.split(": ")
        each = pa.type_for_alias(kind.removesuffix("[]"))
        fields += [(name, pa.list_(each) if kind.endswith("[]") else each) for name in names.split()]
    return pa.schema(fields)


def collect_table(
    *groups: str,
) -> Callable[[Callable[ParametersT, Iterable[Mapping[str, Any]]]], Callable[ParametersT, pa.Table]]:
    """Collect the rows that the decorated function yields into a table; ``groups`` are those of `table_schema`.

    A column without a value is null, as are infinite numbers and NaN; ``run`` is the name of the run directory that the
    function reads.
    """
    schema = table_schema(*groups)

    def decorated(rows_of: Callable[ParametersT, Iterable[Mapping[str, Any]]]) -> Callable[ParametersT, pa.Table]:
        @functools.wraps(rows_of)
        def collected(*given: ParametersT.args, **named: ParametersT.kwargs) -> pa.Table:
            about = {"run": given[0].path.name} if isinstance(given[0], RunDirectory) else {}
            rows = [
                about | {name: finite_or_none(cell) if isinstance(cell, float) else cell for name, cell in row.items()}
                for row in rows_of(*given, **named)
            ]
            return pa.Table.from_pylist(rows, schema=schema)

        return collected

    return decorated


def grouped(rows: Iterable[RowT], *columns: str) -> defaultdict[Any, list[RowT]]:
    """Rows by the value of a column, or by the tuple of the values of several columns.

    >>> dict(grouped([{"task": "a", "step": 1}, {"task": "b", "step": 1}], "step"))
    {1: [{'task': 'a', 'step': 1}, {'task': 'b', 'step': 1}]}
    """
    return group_by(rows, itemgetter(*columns))


def group_by(items: Iterable[ItemT], key: Callable[[ItemT], Any]) -> defaultdict[Any, list[ItemT]]:
    """Group items by key; keys in the order of their first item."""
    found: defaultdict[Any, list[ItemT]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def mean(values: Iterable[float]) -> float | None:
    """The mean; None without values."""
    kept = list(values)
    return math.fsum(kept) / len(kept) if kept else None


def finite_or_none(value: float | None) -> float | None:
    """The value; None if it is missing, infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None

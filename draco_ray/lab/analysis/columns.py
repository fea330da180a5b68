"""Short notation for schemas of the tidy tables: one string per group of columns of the same type."""

from __future__ import annotations

import pyarrow as pa


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

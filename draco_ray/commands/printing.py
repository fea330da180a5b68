"""Prints tables on a terminal: a line per measure, a column per case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from rich.table import Table

from draco_ray.terminal import console


def print_overall(title: str, table: pa.Table, left_out: Sequence[str], head: str = "phase") -> None:
    """Print the rows that summarize all steps as columns, one line per measure, with intervals.

    Args:
        left_out: columns that are not printed.
        head: the column whose values become the heads of the printed columns.
    """
    overall = [row for row in table.to_pylist() if row["training_step"] is None]
    hidden = (*left_out, head, "training_step")
    names = [name for name in table.column_names if name not in hidden and not name.endswith(("_low", "_high"))]
    cells = {
        name: [with_interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high")) for row in overall]
        for name in names
    }
    print_table(title, [head, *(row[head] for row in overall)], cells)


def with_interval(value: object, low: float | None, high: float | None) -> str:
    """A cell's text: the value, then the limits of its interval if they are known."""
    return _written(value) + ("" if low is None else f" [{_written(low)}, {_written(high)}]")


def print_table(title: str, heads: Sequence[str], cells: Mapping[str, Sequence[object]]) -> None:
    """Print ``heads``, then each name of ``cells`` in a line with its values; None is shown as a dash."""
    printed = Table(*heads, title=title, title_justify="left", box=None, pad_edge=False)
    for column in printed.columns[1:]:
        column.justify = "right"
    for name, values in cells.items():
        printed.add_row(name, *map(_written, values))
    console.print(printed)


def _written(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:z.3f}" if isinstance(value, float) else str(value)

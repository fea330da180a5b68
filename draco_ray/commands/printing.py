"""Prints tables on a terminal: a line per measure, a column per case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from draco_ray.lab.rows import grouped, mean


def print_overall(console: Console, title: str, table: pa.Table, keys: Sequence[str]) -> None:
    """Print a line per measure and a column per row over all steps, headed by its phase; intervals follow the value."""
    overall = [row for row in table.to_pylist() if row["training_step"] is None]
    bounded = {name.removesuffix("_low") for name in table.column_names if name.endswith("_low")}
    bounds = {f"{name}_{side}" for name in bounded for side in ("low", "high")}
    names = [name for name in table.column_names if name not in (*keys, "phase", "training_step", *bounds)]
    heads = [row["phase"] for row in overall]

    def shown(row: Mapping[str, object], name: str) -> object:
        if name not in bounded or row[f"{name}_low"] is None:
            return row[name]
        return f"{_written(row[name])} [{_written(row[f'{name}_low'])}, {_written(row[f'{name}_high'])}]"

    print_table(console, title, ["phase", *heads], {name: [shown(row, name) for row in overall] for name in names})


def print_means(console: Console, title: str, table: pa.Table, key: str, left_out: Iterable[str]) -> None:
    """Print a line per measure and a column per value of ``key``, with the means over that value's rows."""
    measures = [name for name in table.column_names if name != key and name not in left_out]
    groups = grouped(table.to_pylist(), key)
    cells = {
        name: [mean(float(row[name]) for row in rows if row[name] is not None) for rows in groups.values()]
        for name in measures
    }
    print_table(console, title, [key, *map(str, groups)], cells)


def print_table(console: Console, title: str, heads: Sequence[str], cells: Mapping[str, Sequence[object]]) -> None:
    """Print a line per name with its cells, under ``heads``; None is shown as a dash."""
    printed = Table(*heads, title=title, title_justify="left", box=None, pad_edge=False)
    for column in printed.columns[1:]:
        column.justify = "right"
    for name, values in cells.items():
        printed.add_row(name, *map(_written, values))
    console.print(printed)


def _written(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

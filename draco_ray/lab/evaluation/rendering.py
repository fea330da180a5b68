"""A table of numbers in text, Markdown, CSV and LaTeX. Knows nothing of what the numbers mean."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rich.cells import cell_len

NOTHING = "-"
BLOCK = "::"
"""In a row's label, between the block it stands in and its own name: rows of one block stand together under its name,
and the best value is the best of a block (the paper's tables have a block for each base model)."""


class TableFormat(StrEnum):
    """Forms a table can be written in."""

    TEXT = "text"
    MARKDOWN = "markdown"
    CSV = "csv"
    LATEX = "latex"


SUFFIXES = {
    TableFormat.TEXT: ".txt",
    TableFormat.MARKDOWN: ".md",
    TableFormat.CSV: ".csv",
    TableFormat.LATEX: ".tex",
}


class Shown(StrEnum):
    """What stands beside a mean."""

    NOTHING = "none"
    STD = "std"
    INTERVAL = "interval"


LEGENDS = {
    Shown.NOTHING: "",
    Shown.STD: "±: sample standard deviation across seeds, else checkpoints, else runs, whichever is more than one.",
    Shown.INTERVAL: "[low, high]: 95 % interval over scenarios, and over training seeds where there are several.",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of numbers."""

    path: tuple[str, ...]
    """Its headers, outermost first."""
    digits: int = 1
    best: str | None = None
    """``high`` or ``low``: which value is bold; None: none is."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One number, in the column's units."""

    mean: float
    std: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under columns."""

    name: str
    """Part of file names and of the LaTeX label."""
    title: str
    row_header: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    """Label, or ``BLOCK::LABEL``, and a cell a column."""
    notes: tuple[str, ...] = ()


def render(table: Table, form: TableFormat, shown: Shown = Shown.NOTHING) -> str:
    """The table as text that ends with a line break. CSV has every number, whatever ``shown`` says."""
    order = list(dict.fromkeys(block_and_name(label)[0] for label, _ in table.rows))
    table = replace(table, rows=tuple(sorted(table.rows, key=lambda row: order.index(block_and_name(row[0])[0]))))
    if shown in _beside(table):
        table = replace(table, notes=(*table.notes, LEGENDS[shown]))
    return {
        TableFormat.TEXT: _text,
        TableFormat.MARKDOWN: _markdown,
        TableFormat.CSV: _csv,
        TableFormat.LATEX: _latex,
    }[form](table, shown)


def _beside(table: Table) -> set[Shown]:
    """What at least one of the cells has beside its mean."""
    cells = [cell for _, row in table.rows for cell in row if cell is not None]
    found = {Shown.STD} if any(cell.std is not None for cell in cells) else set()
    return found | ({Shown.INTERVAL} if any(cell.low is not None for cell in cells) else set())


def block_and_name(label: str) -> tuple[str, str]:
    """The block of a row, empty where it stands in none, and the row's own name."""
    block, separator, name = label.partition(BLOCK)
    return (block.strip(), name.strip()) if separator else ("", label)


def best_rows(table: Table, column: int) -> set[int]:
    """Rows whose value, as it is shown, is the column's best in their block, where two at least can be compared."""
    digits, best = table.columns[column].digits, table.columns[column].best
    blocks: dict[str, dict[int, float]] = {}
    for row, (label, cells) in enumerate(table.rows):
        if (cell := cells[column]) is not None:
            blocks.setdefault(block_and_name(label)[0], {})[row] = round(cell.mean, digits)
    found: set[int] = set()
    for means in blocks.values():
        if best is None or len(means) < 2:
            continue
        wanted = max(means.values()) if best == "high" else min(means.values())
        found |= {row for row, mean in means.items() if mean == wanted}
    return found


def _blocks(table: Table) -> Iterator[tuple[str, list[tuple[int, str, tuple[Cell | None, ...]]]]]:
    """Each block's name, empty for none, and its rows: number in the table, name, cells."""
    numbered = ((index, *block_and_name(label), cells) for index, (label, cells) in enumerate(table.rows))
    for block, rows in itertools.groupby(numbered, key=lambda row: row[1]):
        yield block, [(index, name, cells) for index, _, name, cells in rows]


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def _shown(cell: Cell | None, column: Column, shown: Shown) -> str:
    if cell is None:
        return NOTHING
    text = _number(cell.mean, column.digits)
    if shown is Shown.STD and cell.std is not None:
        text += f" ±{_number(cell.std, column.digits)}"
    if shown is Shown.INTERVAL and cell.low is not None and cell.high is not None:
        text += f" [{_number(cell.low, column.digits)}, {_number(cell.high, column.digits)}]"
    return text


def _text(table: Table, shown: Shown) -> str:
    depth = max((len(column.path) for column in table.columns), default=1)
    grid = [
        [table.row_header if level == depth - 1 else "", *(_header(column, level, depth) for column in table.columns)]
        for level in range(depth)
    ]
    # An outer header is said once, above the first of its columns.
    for level in range(depth - 1):
        paths = [column.path[: level + 1] for column in table.columns]
        for index in range(len(paths) - 1, 0, -1):
            if paths[index] == paths[index - 1]:
                grid[level][index + 1] = ""
    for block, rows in _blocks(table):
        grid += [[block]] if block else []
        grid += [
            [name, *(_shown(cell, column, shown) for cell, column in zip(cells, table.columns, strict=True))]
            for _, name, cells in rows
        ]
    # Outer headers and names of blocks may run over the columns beside them, so they do not widen their own.
    full = [line for line in grid[depth - 1 :] if len(line) > 1]
    widths = [max(cell_len(line[index]) for line in full) for index in range(len(grid[0]))]
    lines = [table.title]
    for number, line in enumerate(grid):
        if len(line) == 1:
            lines.append(line[0])
            continue
        outer = number < depth - 1
        lines.append(_outer_line(line, widths) if outer else _line(line, widths))
        if number == depth - 1:
            lines.append("-" * cell_len(lines[-1]))
    return "\n".join([*lines, *table.notes]) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0] + " " * (widths[0] - cell_len(cells[0]))]
    padded += [" " * (width - cell_len(cell)) + cell for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join(padded)


def _outer_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    line, place = "", 0
    for cell, width in zip(cells, widths, strict=True):
        if cell:
            line = line + " " * max(place - cell_len(line), 1 if line else 0) + cell
        place += width + 2
    return line


def _header(column: Column, level: int, depth: int) -> str:
    place = level - (depth - len(column.path))
    return column.path[place] if place >= 0 else ""


def _flat(column: Column) -> str:
    return " ".join(part for part in column.path if part)


def _markdown(table: Table, shown: Shown) -> str:
    lines = [f"**{table.title}**", ""]
    lines.append("| " + " | ".join([table.row_header, *map(_flat, table.columns)]) + " |")
    lines.append("|---|" + "---:|" * len(table.columns))
    best = [best_rows(table, index) for index in range(len(table.columns))]
    for block, rows in _blocks(table):
        lines += ["| *" + block.replace("|", "\\|") + "* |" + " |" * len(table.columns)] if block else []
        for row, name, cells in rows:
            texts = []
            for index, (cell, column) in enumerate(zip(cells, table.columns, strict=True)):
                text = _shown(cell, column, shown)
                texts.append(f"**{text}**" if row in best[index] else text)
            lines.append("| " + " | ".join([name.replace("|", "\\|"), *texts]) + " |")
    lines += ["", *table.notes] if table.notes else []
    return "\n".join(lines) + "\n"


def _csv(table: Table, shown: Shown) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    blocks = list(_blocks(table))
    in_blocks = any(block for block, _ in blocks)
    header = ["Block"] * in_blocks + [table.row_header]
    for column in table.columns:
        header += [_flat(column), *(f"{_flat(column)} {part}" for part in ("std", "low", "high"))]
    writer.writerow(header)
    for block, rows in blocks:
        for _, name, cells in rows:
            row: list[str | float | None] = [*[block] * in_blocks, name]
            for cell in cells:
                row += [None] * 4 if cell is None else [cell.mean, cell.std, cell.low, cell.high]
            writer.writerow(row)
    return out.getvalue()


def _latex(table: Table, shown: Shown) -> str:
    depth = max((len(column.path) for column in table.columns), default=1)
    lines = [r"\begin{table*}[t]", r"\centering", r"\setlength{\tabcolsep}{4pt}", *_FIT]
    lines += [rf"\begin{{tabular}}{{l{'c' * len(table.columns)}}}", r"\toprule"]
    for level in range(depth):
        paths = [column.path[: max(level + 1 - (depth - len(column.path)), 0)] for column in table.columns]
        cells = [_escape(table.row_header) if level == depth - 1 else ""]
        rules, place = [], 2
        for path, run in itertools.groupby(paths):
            span = len(list(run))
            text = _escape(path[-1]) if path else ""
            cells.append(text if span == 1 else rf"\multicolumn{{{span}}}{{c}}{{{text}}}")
            if text and span > 1 and level < depth - 1:
                rules.append(rf"\cmidrule(lr){{{place}-{place + span - 1}}}")
            place += span
        lines.append(" & ".join(cells) + r" \\")
        if rules:
            lines.append(" ".join(rules))
    best = [best_rows(table, index) for index in range(len(table.columns))]
    for block, rows in _blocks(table):
        lines.append(r"\midrule")
        if block:
            lines.append(rf"\multicolumn{{{1 + len(table.columns)}}}{{l}}{{\texttt{{{_escape(block)}}}}} \\")
        for row, name, row_cells in rows:
            # Behind the end of a line a bracket or a star would be read as its argument.
            texts = ["{}" * name.startswith(("[", "*")) + _escape(name)]
            for index, (cell, column) in enumerate(zip(row_cells, table.columns, strict=True)):
                texts.append(_latex_cell(cell, column, shown, bold=row in best[index]))
            lines.append(" & ".join(texts) + r" \\")
    caption = " ".join(_escape(text) for text in (table.title + ".", *table.notes))
    lines += [r"\bottomrule", r"\end{tabular}%", "}}", rf"\caption{{{caption}}}"]
    return "\n".join([*lines, rf"\label{{tab:{table.name}}}", r"\end{table*}"]) + "\n"


def _latex_cell(cell: Cell | None, column: Column, shown: Shown, *, bold: bool) -> str:
    if cell is None:
        return "--"
    text = _number(cell.mean, column.digits)
    text = rf"\textbf{{{text}}}" if bold else text
    if shown is Shown.STD and cell.std is not None:
        text += rf"$_{{\pm {_number(cell.std, column.digits)}}}$"
    if shown is Shown.INTERVAL and cell.low is not None and cell.high is not None:
        text += f" [{_number(cell.low, column.digits)}, {_number(cell.high, column.digits)}]"
    return text


_FIT = (
    r"\resizebox*{!}{\ifdim\totalheight>.7\textheight.7\textheight\else\totalheight\fi}{%",
    r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
)
"""Scales a table down where it is wider or taller than the page, and only there (package graphicx)."""
_LATEX = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "τ": r"$\tau$",
    "±": r"$\pm$",
    # In the fonts that LaTeX begins with these are other signs.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _escape(text: str) -> str:
    # What the paper writes as powers stands between separators at odd places.
    parts = re.split(r"\b((?:p|pass)\^[k0-9])\b", text)
    return "".join(
        _power(part) if index % 2 else "".join(_LATEX.get(character, character) for character in part)
        for index, part in enumerate(parts)
    )


def _power(text: str) -> str:
    base, _, exponent = text.partition("^")
    return f"$p^{exponent}$" if base == "p" else rf"$\mathrm{{{base}}}^{exponent}$"

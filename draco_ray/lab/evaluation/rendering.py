"""Render a table of numbers as text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rich.cells import cell_len

from draco_ray.lab.files import escape_csv_formula

NOTHING = "-"
BLOCK = "::"
"""Separates block and name in a row's label. Rows of a block are printed together under the block's name, and best
values are marked per block (the paper's tables have a block for each base model)."""


class TableFormat(StrEnum):
    """Formats of a table."""

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


class ShownUncertainty(StrEnum):
    """What is printed beside a mean."""

    NOTHING = "none"
    STD = "std"
    INTERVAL = "interval"


LEGENDS = {
    ShownUncertainty.NOTHING: "",
    ShownUncertainty.STD: "±: sample standard deviation over seeds; with one seed over checkpoints, or else over runs.",
    ShownUncertainty.INTERVAL: "[low, high]: 95 % interval over scenarios, and over training seeds where there are "
    "several.",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of numbers."""

    path: tuple[str, ...]
    """The column's headers, outermost first."""
    digits: int = 1
    best: str | None = None
    """Which value is bold: ``high``, ``low``, or None for none."""


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
    """(label or ``BLOCK::LABEL``, one cell per column)."""
    notes: tuple[str, ...] = ()


def render(table: Table, form: TableFormat, shown: ShownUncertainty = ShownUncertainty.NOTHING) -> str:
    """The table as text that ends with a line break. CSV contains every number regardless of ``shown``."""
    order = list(dict.fromkeys(block_and_name(label)[0] for label, _ in table.rows))
    table = replace(table, rows=tuple(sorted(table.rows, key=lambda row: order.index(block_and_name(row[0])[0]))))
    cells = [cell for _, row in table.rows for cell in row if cell is not None]
    beside = {
        ShownUncertainty.STD: [cell.std for cell in cells],
        ShownUncertainty.INTERVAL: [cell.low for cell in cells],
    }
    if any(number is not None for number in beside.get(shown, ())):
        table = replace(table, notes=(*table.notes, LEGENDS[shown]))
    form_of = {TableFormat.TEXT: _text, TableFormat.MARKDOWN: _markdown, TableFormat.CSV: _csv}
    return form_of.get(form, _latex)(table, shown)


def block_and_name(label: str) -> tuple[str, str]:
    """The block of a row (empty if it has none) and the row's own name."""
    block, separator, name = label.partition(BLOCK)
    return (block.strip(), name.strip()) if separator else ("", label)


def best_rows(table: Table, column: int) -> set[int]:
    """Rows whose value, as printed, is the column's best in their block, if the block has at least two values."""
    digits, best = table.columns[column].digits, table.columns[column].best
    blocks: dict[str, dict[int, float]] = {}
    for row, (label, cells) in enumerate(table.rows):
        if (cell := cells[column]) is not None:
            blocks.setdefault(block_and_name(label)[0], {})[row] = round(cell.mean, digits)
    found: set[int] = set()
    for means in blocks.values():
        if best is not None and len(means) > 1:
            wanted = max(means.values()) if best == "high" else min(means.values())
            found |= {row for row, mean in means.items() if mean == wanted}
    return found


def _headers(table: Table) -> list[list[tuple[str, int]]]:
    """Header lines as lists of (text, number of columns it spans); the first entry is above the labels."""
    depth = max((len(column.path) for column in table.columns), default=1)
    lines = []
    for level in range(1, depth + 1):
        paths = [column.path[: max(level - (depth - len(column.path)), 0)] for column in table.columns]
        groups = [(path, len(list(same))) for path, same in itertools.groupby(paths)]
        if level == depth:
            groups = [(path, 1) for path in paths]
        first = table.row_header if level == depth else ""
        lines.append([(first, 1), *((path[-1] if path else "", span) for path, span in groups)])
    return lines


def _body(table: Table, show: Callable[[Cell | None, Column, bool], str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Each block's name (empty if none) and its rows as texts; ``show`` formats (cell, column, whether bold)."""
    best = [best_rows(table, index) for index in range(len(table.columns))]
    for block, rows in itertools.groupby(enumerate(table.rows), key=lambda row: block_and_name(row[1][0])[0]):
        lines = []
        for number, (label, cells) in rows:
            shown = zip(cells, table.columns, best, strict=True)
            texts = [show(cell, column, number in of_column) for cell, column, of_column in shown]
            lines.append([block_and_name(label)[1], *texts])
        yield block, lines


def _shown(cell: Cell, digits: int, shown: ShownUncertainty, mean: str = "{}", std: str = " ±{}") -> str:
    text = mean.format(f"{cell.mean:z,.{digits}f}")
    if shown is ShownUncertainty.STD and cell.std is not None:
        text += std.format(f"{cell.std:z,.{digits}f}")
    if shown is ShownUncertainty.INTERVAL and cell.low is not None:
        text += f" [{cell.low:z,.{digits}f}, {cell.high:z,.{digits}f}]"
    return text


def _text(table: Table, shown: ShownUncertainty) -> str:
    *outer, inner = _headers(table)
    header = [text for text, _ in inner]
    body = list(_body(table, lambda cell, column, _: _shown(cell, column.digits, shown) if cell else NOTHING))
    columns = zip(header, *(row for _, rows in body for row in rows), strict=True)
    widths = [max(map(cell_len, column)) for column in columns]
    lines = [table.title]
    for level in outer:
        # An outer header is printed once, above its first column, and may be wider than this column.
        line, place = "", 0
        left = list(widths)
        for text, span in level:
            if text:
                line += " " * max(place - cell_len(line), 1 if line else 0) + text
            place += sum(width + 2 for width in left[:span])
            del left[:span]
        lines.append(line)
    lines.append(_line(header, widths))
    lines.append("-" * cell_len(lines[-1]))
    for block, rows in body:
        lines += [*[block] * bool(block), *(_line(row, widths) for row in rows)]
    return "\n".join([*lines, *table.notes]) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pads = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([cells[0] + pads[0], *(pad + cell for cell, pad in zip(cells[1:], pads[1:], strict=True))])


def _flat(column: Column) -> str:
    return " ".join(part for part in column.path if part)


def _escaped_bar(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(table: Table, shown: ShownUncertainty) -> str:
    def show(cell: Cell | None, column: Column, bold: bool) -> str:
        text = _shown(cell, column.digits, shown) if cell else NOTHING
        return f"**{text}**" if bold else text

    lines = [f"**{table.title}**", "", f"| {' | '.join([table.row_header, *map(_flat, table.columns)])} |"]
    lines.append("|---|" + "---:|" * len(table.columns))
    for block, rows in _body(table, show):
        lines += ["| *" + _escaped_bar(block) + "* |" + " |" * len(table.columns)] if block else []
        lines += [f"| {' | '.join([_escaped_bar(name), *texts])} |" for name, *texts in rows]
    lines += ["", *table.notes] if table.notes else []
    return "\n".join(lines) + "\n"


def _csv(table: Table, shown: ShownUncertainty) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    in_blocks = any(block_and_name(label)[0] for label, _ in table.rows)
    names = [f"{_flat(column)}{part}" for column in table.columns for part in ("", " std", " low", " high")]
    writer.writerow([*["Block"] * in_blocks, table.row_header, *names])
    for label, cells in table.rows:
        numbers = [
            each for cell in cells for each in ((cell.mean, cell.std, cell.low, cell.high) if cell else [None] * 4)
        ]
        writer.writerow([*map(escape_csv_formula, block_and_name(label)[not in_blocks :]), *numbers])
    return out.getvalue()


def _latex(table: Table, shown: ShownUncertainty) -> str:
    def show(cell: Cell | None, column: Column, bold: bool) -> str:
        if cell is None:
            return "--"
        return _shown(cell, column.digits, shown, r"\textbf{{{}}}" if bold else "{}", r"$_{{\pm {}}}$")

    lines = [r"\begin{table*}[t]", r"\centering", r"\setlength{\tabcolsep}{4pt}", *_FIT]
    lines += [rf"\begin{{tabular}}{{l{'c' * len(table.columns)}}}", r"\toprule"]
    for level in _headers(table):
        cells, rules, place = [], [], 1
        for text, span in level:
            cells.append(_escape(text) if span == 1 else rf"\multicolumn{{{span}}}{{c}}{{{_escape(text)}}}")
            rules += [rf"\cmidrule(lr){{{place}-{place + span - 1}}}"] if text and span > 1 else []
            place += span
        lines += [" & ".join(cells) + r" \\", *[" ".join(rules)] * bool(rules)]
    for block, rows in _body(table, show):
        lines.append(r"\midrule")
        if block:
            lines.append(rf"\multicolumn{{{1 + len(table.columns)}}}{{l}}{{\texttt{{{_escape(block)}}}}} \\")
        for name, *texts in rows:
            # LaTeX would read a bracket or a star at the start of a row as an argument of the line break before.
            first = "{}" * name.startswith(("[", "*")) + _escape(name)
            lines.append(" & ".join([first, *texts]) + r" \\")
    caption = " ".join(_escape(text) for text in (table.title + ".", *table.notes))
    lines += [r"\bottomrule", r"\end{tabular}%", "}}", rf"\caption{{{caption}}}"]
    return "\n".join([*lines, rf"\label{{tab:{table.name}}}", r"\end{table*}"]) + "\n"


_FIT = (
    r"\resizebox*{!}{\ifdim\totalheight>.7\textheight.7\textheight\else\totalheight\fi}{%",
    r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
)
"""LaTeX code that scales a table down if it is taller or wider than the page (package graphicx)."""
_LATEX = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "τ": r"$\tau$",
    "±": r"$\pm$",
    # LaTeX's default fonts have other glyphs at these codes.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _escape(text: str) -> str:
    # Parts with odd index are p^k and pass^k, which the paper writes as powers.
    parts = re.split(r"\b((?:p|pass)\^[k0-9])\b", text)
    return "".join(
        _power(part) if index % 2 else "".join(_LATEX.get(character, character) for character in part)
        for index, part in enumerate(parts)
    )


def _power(text: str) -> str:
    base, _, exponent = text.partition("^")
    return f"$p^{exponent}$" if base == "p" else rf"$\mathrm{{{base}}}^{exponent}$"

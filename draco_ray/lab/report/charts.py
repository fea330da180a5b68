"""The kinds of charts of the report and the figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from draco_ray.lab.report.drawing import (
    GRID,
    MUTED,
    OTHER_COLOR,
    Drawing,
    palette,
    shortened,
    text_width,
)

WIDTH, HEIGHT = 320.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 10.0, 24.0, 30.0
_MOST_DOTS = 60
_LEGEND_LINE, _LABEL_LINE = 11.0, 8.5
_MOST_LABEL_LINES = 4
_WIDER = 1.15
"""Factor on text widths, which are Helvetica's, to allow for wider fonts."""
_HEAT = ((226, 128, 142), (236, 196, 110), (88, 180, 145))
SOLVED = "#dcefe7"
"""Background of a check mark in a heat map."""

Number = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """Values over training steps; None if a step has no value."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    limits: Sequence[tuple[float, float] | None] = ()
    """Interval of each value, drawn as a bar, or None; empty if no value has one."""


def percent(value: float) -> str:
    """Write a share in [0, 1].

    >>> percent(0.256)
    '26%'
    """
    return f"{value:.0%}"


def format_compact(value: float) -> str:
    """A number in few characters.

    >>> [format_compact(v) for v in (0.0, 0.00012, 0.25, 3.0, 15200, 2.5e6)]
    ['0', '0.00012', '0.25', '3', '15k', '2.5M']
    """
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.2g}{letter}" if abs(value) < 100 * unit else f"{value / unit:.0f}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    bounds: tuple[float, float] | None = None,
    number: Number = format_compact,
) -> Drawing:
    """Lines over training steps.

    Args:
        bounds: smallest and largest value of the y axis; None takes them from the data.
        number: formats a value.
    """
    drawing = _titled(title, WIDTH, HEIGHT)
    values = [value for line in series for value in line.values if value is not None]
    values += [limit for line in series for limits in line.limits if limits is not None for limit in limits]
    steps = [step for line in series for step in line.steps]
    if not values:
        return _empty(drawing)
    low, high, ticks = _axis(*(bounds or (min(*values, 0.0), max(*values, 0.0))))
    top = _legend(drawing, [line.name for line in series]) if len(series) > 1 else 0.0
    frame = _Frame(drawing, min(steps), max(steps), low, high, top)
    frame.y_axis(ticks, number)
    frame.x_axis()
    for index, line in enumerate(series):
        color = palette(index)
        intervals = dict(zip(line.steps, line.limits, strict=True)) if line.limits else {}
        for run in _unbroken(line):
            points = tuple((frame.x(step), frame.y(value)) for step, value in run)
            if len(points) > 1:
                drawing.line(points, color, 1.6)
            radius = 2.2 if len(line.steps) <= _MOST_DOTS else 1.0
            for (x, y), (step, value) in zip(points, run, strict=True):
                hint = f"{line.name}, step {step}: {number(value)}"
                if (limits := intervals.get(step)) is not None:
                    low, high = limits
                    hint += f" [{number(low)}, {number(high)}]"
                    drawing.line(((x, frame.y(low)), (x, frame.y(high))), color, 0.8)
                drawing.dot(x, y, radius, color, hint)
    return drawing


def stacked_bars(
    title: str,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    number: Number = format_compact,
    whole: float | None = None,
    axis: str = "training step",
    all_labels: bool = False,
    colors: Mapping[str, str] | None = None,
) -> Drawing:
    """One bar per label, stacked from parts.

    Args:
        labels: one per bar.
        parts: name of a part -> its value in every bar, >= 0.
        whole: the top of the y axis; None takes the tallest bar.
        colors: part name -> color; None takes the palette in order.
        all_labels: show every label, in several lines if needed; otherwise show every second, third... that fits.
    """
    drawing = _titled(title, WIDTH, HEIGHT)
    tallest = max((sum(values) for values in zip(*parts.values(), strict=True)), default=0.0)
    if not tallest:
        return _empty(drawing)
    low, high, ticks = _axis(0.0, whole or tallest)
    color = [palette(index) if colors is None else colors.get(name, OTHER_COLOR) for index, name in enumerate(parts)]
    frame = _Frame(drawing, 0, len(labels), low, high, _legend(drawing, list(parts), color))
    frame.y_axis(ticks, number)
    slot = (frame.right - frame.left) / len(labels)
    bar = min(slot * 0.8, 46.0) if len(labels) <= _MOST_DOTS else slot
    every = math.ceil(len(labels) * max(text_width(label, 7) + 6 for label in labels) / (frame.right - frame.left))
    lines = min(every, _MOST_LABEL_LINES) if all_labels else 1
    drawing.height += (lines - 1) * _LABEL_LINE
    for place, label in enumerate(labels):
        middle, floor = frame.left + (place + 0.5) * slot, frame.bottom
        for index, (name, values) in enumerate(parts.items()):
            tall = frame.bottom - frame.y(values[place])
            if tall > 0:
                floor -= tall
                hint = f"{name}, {label}: {number(values[place])}"
                drawing.box(middle - bar / 2, floor, bar, tall, color[index], hint)
        if all_labels or place % every == 0:
            shown = shortened(label, 7, slot * (lines if all_labels else every))
            half = text_width(shown, 7) / 2
            across = min(max(middle, half + 2), drawing.width - half - 2)
            drawing.label(across, frame.bottom + 10 + place % lines * _LABEL_LINE, shown)
    frame.x_label(axis, below=(lines - 1) * _LABEL_LINE)
    return drawing


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    marks: Mapping[tuple[int, int], str] | None = None,
    width: float = 2 * WIDTH,
) -> Drawing:
    """Shares in [0, 1] as colours, red over amber to green.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        values: ``values[row][column]``; None is no colour.
        marks: (row, column) without a value -> meaning of its check mark.
    """
    names, line = 190.0, 14.0
    drawing = _titled(title, width, _TOP + len(rows) * line + _BOTTOM)
    if not rows or not columns:
        return _empty(drawing)
    cell = min((width - names - _RIGHT) / len(columns), 40.0)
    for place, (name, shares) in enumerate(zip(rows, values, strict=True)):
        y = _TOP + place * line
        drawing.text(names - 6, y + 9.5, shortened(name, 8, (names - 12) / _WIDER), 8, "end")
        for column, share in enumerate(shares):
            mark = (marks or {}).get((place, column))
            if share is None and mark is None:
                continue
            x = names + column * cell
            said, color = (mark, SOLVED) if share is None else (percent(share), heat_color(share))
            hint = f"{name}, training step {columns[column]}: {said}"
            drawing.box(x, y, max(cell - 1, 0.6), line - 1.5, color, hint)
            if cell >= (8 if share is None else 24):
                shown = "✓" if share is None else percent(share)
                drawing.text(x + (cell - 1) / 2, y + 9, shown, 7, "middle", "#1a1d21")
    every = math.ceil(len(columns) * (text_width(columns[-1], 7) + 8) / (cell * len(columns)))
    floor = _TOP + len(rows) * line
    for column in range(0, len(columns), every):
        drawing.label(names + (column + 0.5) * cell, floor + 9, columns[column])
    drawing.text(names, floor + 20, "training step", 7, "start", MUTED)
    return drawing


def timeline(
    title: str,
    lanes: Mapping[str, Sequence[tuple[float, float]]],
    *,
    colors: Mapping[str, str],
    width: float,
) -> Drawing:
    """Timeline of work: one lane per kind, with its (start, end) intervals in seconds, stacked if they overlap.

    ``colors`` maps lanes to colors; other lanes are grey.
    """
    line = 20.0
    drawing = _titled(title, width, _TOP + len(lanes) * line + _BOTTOM)
    ends = [end for intervals in lanes.values() for _, end in intervals]
    if not ends:
        return _empty(drawing)
    left = 60.0
    scale = (width - left - _RIGHT) / (max(ends) or 1.0)
    floor = _TOP + len(lanes) * line
    for tick in _ticks(0.0, max(ends)):
        x = left + tick * scale
        drawing.line(((x, _TOP - 2), (x, floor)), GRID, 0.6)
        drawing.label(x, floor + 10, format_compact(tick))
    for place, (name, intervals) in enumerate(lanes.items()):
        y = _TOP + place * line
        drawing.text(left - 6, y + line / 2 + 3, name, 8, "end")
        tracks: list[float] = []
        placed = []
        for start, end in sorted(intervals):
            track = next((index for index, free in enumerate(tracks) if free <= start), len(tracks))
            tracks[track : track + 1] = [end]
            placed.append((start, end, track))
        tall = (line - 4) / max(1, len(tracks))
        for start, end, track in placed:
            x, wide = left + start * scale, max((end - start) * scale, 0.8)
            drawing.box(x, y + 2 + track * tall, wide, tall * 0.9, colors.get(name, OTHER_COLOR))
    drawing.label((left + width - _RIGHT) / 2, floor + 21, "seconds")
    return drawing


def heat_color(share: float) -> str:
    """The colour of a share in [0, 1].

    >>> heat_color(0.0), heat_color(1.0)
    ('#e2808e', '#58b491')
    """
    place = min(max(share, 0.0), 1.0) * 2
    first = min(int(place), 1)
    mix = [round(a + (b - a) * (place - first)) for a, b in zip(_HEAT[first], _HEAT[first + 1], strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mix)


class _Frame:
    """The axes of a chart, which map data to points. ``legend`` is the height of the legend below the title."""

    def __init__(self, drawing: Drawing, first: float, last: float, low: float, high: float, legend: float) -> None:
        self.drawing = drawing
        self.first, self.last, self.low, self.high = first, last, low, high
        self.left, self.right = _LEFT, drawing.width - _RIGHT
        self.top, self.bottom = _TOP + legend, drawing.height - _BOTTOM

    def x(self, step: float) -> float:
        if self.first == self.last:
            return (self.left + self.right) / 2
        return self.left + 6 + (step - self.first) / (self.last - self.first) * (self.right - self.left - 12)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def y_axis(self, ticks: Sequence[float], number: Number) -> None:
        for tick in ticks:
            y = self.y(tick)
            self.drawing.line(((self.left, y), (self.right, y)), GRID, 0.6)
            self.drawing.text(self.left - 5, y + 2.5, number(tick), 7, "end", MUTED)

    def x_axis(self) -> None:
        span = self.last - self.first
        every = max(1, round(_nice(span / 8))) if span else 1
        start = self.first if span < 8 else math.ceil(self.first / every) * every
        for step in range(round(start), round(self.last) + 1, every):
            self.drawing.label(self.x(step), self.bottom + 10, str(step))
        self.x_label("training step")

    def x_label(self, label: str, below: float = 0.0) -> None:
        self.drawing.label((self.left + self.right) / 2, self.bottom + 21 + below, label)


def _titled(title: str, width: float, height: float) -> Drawing:
    drawing = Drawing(width, height, title)
    drawing.text(6, 12, title, 9.5)
    return drawing


def _empty(drawing: Drawing) -> Drawing:
    drawing.text(drawing.width / 2, drawing.height / 2, "nothing recorded", 8, "middle", MUTED)
    return drawing


def _legend(drawing: Drawing, names: Sequence[str], colors: Sequence[str] | None = None) -> float:
    """Draw a legend under the title; returns its height. Each line after the first makes the drawing taller."""
    x, y = _LEFT, _TOP
    for index, name in enumerate(names):
        name = shortened(name, 7.5, drawing.width - _LEFT - 30)
        wide = 12 + _WIDER * text_width(name, 7.5) + 10
        if x + wide > drawing.width and x > _LEFT:
            x, y = _LEFT, y + _LEGEND_LINE
        color = palette(index) if colors is None else colors[index]
        drawing.box(x, y - 5, 8, 6, color)
        drawing.text(x + 11, y, name, 7.5)
        x += wide
    drawing.height += y - _TOP
    return y - _TOP + 10


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    if low == high:
        low, high = min(low, 0.0), high if high > 0 else 1.0
    ticks = _ticks(low, high)
    return min(low, ticks[0]), max(high, ticks[-1]), ticks


def _ticks(low: float, high: float) -> list[float]:
    step = _nice((high - low) / 5) or 1.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _nice(value: float) -> float:
    """The smallest number of the form 1, 2, 2.5 or 5 times a power of ten that is not below ``value``."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= value * (1 - 1e-9))


def _unbroken(line: Series) -> Iterator[list[tuple[int, float]]]:
    """The (step, value) points of a line, split where a step has no value."""
    values = zip(line.steps, line.values, strict=True)
    for known, run in itertools.groupby(values, key=lambda each: each[1] is not None):
        if known:
            yield [(step, value) for step, value in run if value is not None]

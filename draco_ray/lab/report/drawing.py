"""A drawing: shapes in points, y downwards; `draco_ray.lab.report.svg` makes SVG of it, `figures` writes files."""

from __future__ import annotations

from dataclasses import dataclass, field

INK, MUTED, GRID, PAPER = "ink", "muted", "grid", "paper"
"""Colours by role: a page in dark mode shows them differently from paper. Other colours are ``#rrggbb``."""

ON_PAPER = {INK: "#22272e", MUTED: "#5f6b78", GRID: "#dfe3e8", PAPER: "#ffffff"}
"""What the roles are on paper."""

PALETTE = ("#3b73c8", "#e08a2e", "#2f9e77", "#c9485b", "#8a63c4", "#7a8794", "#b79a1f", "#2aa3b8", "#d86fa8", "#6b8e23")
"""Colours of series, in order; past the end it begins again."""
OTHER = "#9aa4af"
"""Of a kind that has no colour of its own."""


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline through (x, y) points."""

    points: tuple[tuple[float, float], ...]
    color: str = INK
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``hint`` is shown under the pointer where there is one."""

    x: float
    y: float
    width: float
    height: float
    color: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    color: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; ``y`` is its baseline, ``anchor`` one of ``start``, ``middle``, ``end``."""

    x: float
    y: float
    string: str
    size: float = 8.0
    anchor: str = "start"
    color: str = INK


Shape = Line | Box | Dot | Text


@dataclass(slots=True)
class Drawing:
    """What is drawn, back to front."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draw on top of what is there."""
        self.shapes.extend(shapes)

    def _repr_svg_(self) -> str:
        # What a notebook shows.
        from draco_ray.lab.report.svg import to_image

        return to_image(self)


def palette(index: int) -> str:
    """The colour of series ``index``."""
    return PALETTE[index % len(PALETTE)]

"""SVG drawings; coordinates are in points, and y grows downwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape
from rich.cells import cell_len

INK, MUTED, GRID, PAPER = "ink", "muted", "grid", "paper"
"""Colours by role, which a page in dark mode changes. Other colours are ``#rrggbb``."""

ON_PAPER = {INK: "#22272e", MUTED: "#5f6b78", GRID: "#dfe3e8", PAPER: "#ffffff"}
"""Role -> colour where no page sets it, e.g. in a standalone image."""

PALETTE = ("#3b73c8", "#e08a2e", "#2f9e77", "#c9485b", "#8a63c4", "#7a8794", "#b79a1f", "#2aa3b8", "#d86fa8", "#6b8e23")
"""Colours of series, in order; repeated if there are more series."""
OTHER_COLOR = "#9aa4af"
"""Colour of items without a colour of their own."""


@dataclass(slots=True)
class Drawing:
    """SVG elements, back to front."""

    width: float
    height: float
    title: str
    elements: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], color: str = INK, width: float = 1.0) -> None:
        """Draw a polyline through (x, y) points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f'stroke="{_svg(color)}" stroke-width="{width:g}"'
        self.elements.append(f'<polyline points="{path}" fill="none" {stroke} stroke-linejoin="round"/>')

    def box(self, x: float, y: float, width: float, height: float, color: str, hint: str = "") -> None:
        """Draw a filled rectangle; ``hint`` is its tooltip."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.2f}"'
        self._filled("rect", place, color, hint)

    def dot(self, x: float, y: float, radius: float, color: str, hint: str = "") -> None:
        """Draw a filled circle; ``hint`` is its tooltip."""
        self._filled("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', color, hint)

    def text(self, x: float, y: float, string: str, size: float = 8.0, anchor: str = "start", color: str = INK) -> None:
        """Write a line of text; ``y`` is its baseline, ``anchor`` one of ``start``, ``middle``, ``end``."""
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"'
        self.elements.append(f'<text {place} fill="{_svg(color)}">{escape(escape_bidi(string))}</text>')

    def label(self, x: float, y: float, string: str) -> None:
        """Write a small, muted, centred text for an axis."""
        self.text(x, y, string, 7, "middle", MUTED)

    def _filled(self, element: str, place: str, color: str, hint: str) -> None:
        end = f"><title>{escape(escape_bidi(hint))}</title></{element}>" if hint else "/>"
        self.elements.append(f'<{element} {place} fill="{_svg(color)}"{end}')

    def _repr_svg_(self) -> str:
        # Jupyter notebooks call this method.
        return to_image(self)


def palette(index: int) -> str:
    """The colour of series ``index``."""
    return PALETTE[index % len(PALETTE)]


_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")


def escape_bidi(text: str) -> str:
    """``text`` with characters that change the writing direction spelled out.

    >>> escape_bidi("a\u202eb")
    'a⟨U+202E⟩b'
    """
    return _DIRECTION.sub(lambda found: f"⟨U+{ord(found[0]):X}⟩", text)


def to_svg(drawing: Drawing) -> Markup:
    """An ``<svg>`` element; colours by role are CSS variables of the page, for light and dark mode.

    Outside such a page, the colours of `ON_PAPER` apply.
    """
    title = escape(escape_bidi(drawing.title))
    head = f'<svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img" aria-label="{title}">'
    return Markup("".join([head, *drawing.elements, "</svg>"]))


def to_image(drawing: Drawing) -> Markup:
    """`to_svg` as a standalone image with a white background."""
    about = f'xmlns="http://www.w3.org/2000/svg" width="{drawing.width:g}" height="{drawing.height:g}"'
    head, _, rest = str(to_svg(drawing)).partition(">")
    paper = f'<rect width="100%" height="100%" fill="{ON_PAPER[PAPER]}"/>'
    return Markup(f'{head} {about} font-family="Helvetica, Arial, sans-serif">{paper}{rest}')


def text_width(string: str, size: float) -> float:
    """Approximate width of a text, in points: that of a digit in Helvetica per letter, two for a Chinese character.

    >>> round(text_width("00", 10), 1)
    11.2
    """
    return 0.56 * size * cell_len(string)


def shortened(string: str, size: float, width: float) -> str:
    """The text, truncated with an ellipsis to fit ``width`` points."""
    room, fitting = width - text_width("…", size), 0
    for place, character in enumerate(string):
        room -= text_width(character, size)
        if room >= 0:
            fitting = place + 1
        elif room + text_width("…", size) < 0:
            return string[:fitting].rstrip() + "…"
    return string


def _svg(color: str) -> str:
    return f"var(--{color}, {ON_PAPER[color]})" if color in ON_PAPER else color

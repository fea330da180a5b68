"""A drawing as SVG (for the page), PDF and PNG (for a paper).

The PDF is vector graphics set in Helvetica, which every viewer has: no font is embedded.
"""

from __future__ import annotations

import io
import re
import zlib

from markupsafe import Markup, escape
from PIL import Image, ImageDraw, ImageFont

from draco_ray.lab.report.drawing import GRID, INK, MUTED, PAPER, Box, Dot, Drawing, Line, Shape, Text

_ON_PAPER = {INK: "#22272e", MUTED: "#5f6b78", GRID: "#dfe3e8", PAPER: "#ffffff"}

# Advance widths of Helvetica's printable ASCII, in thousandths of the size; it places centred and right-aligned text.
_WIDTHS = [
    *(278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278),
    *(556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556),
    *(1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778),
    *(667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556),
    *(333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556),
    *(556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584),
]
_OTHER_WIDTH = 556
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """``text`` with the characters spelled out that change the direction of what follows them on a page.

    >>> visible("a\u202eb")
    'a⟨U+202E⟩b'
    """
    return _DIRECTION.sub(lambda found: f"⟨U+{ord(found[0]):X}⟩", text)


def to_svg(drawing: Drawing) -> Markup:
    """An ``<svg>`` element; colours by role are CSS variables of the page, so that it follows light and dark."""
    title = escape(visible(drawing.title))
    parts = [f'<svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img" aria-label="{title}">']
    parts += [_svg_shape(shape) for shape in drawing.shapes]
    return Markup("".join(parts) + "</svg>")


def to_png(drawing: Drawing, dots_per_inch: int = 220) -> bytes:
    """A PNG on white."""
    scale = dots_per_inch / 72
    # Drawn twice as large and reduced: Pillow's lines and circles are not anti-aliased.
    fine = 2 * scale
    size = (round(drawing.width * fine), round(drawing.height * fine))
    image = Image.new("RGB", size, _ON_PAPER[PAPER])
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        match shape:
            case Line():
                points = [(x * fine, y * fine) for x, y in shape.points]
                pen.line(points, fill=_paper(shape.color), width=max(1, round(shape.width * fine)), joint="curve")
            case Box():
                corner = ((shape.x + shape.width) * fine, (shape.y + shape.height) * fine)
                if shape.width > 0 and shape.height > 0:
                    pen.rectangle((shape.x * fine, shape.y * fine, *corner), fill=_paper(shape.color))
            case Dot():
                pen.circle((shape.x * fine, shape.y * fine), shape.radius * fine, fill=_paper(shape.color))
            case Text():
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                font = ImageFont.load_default(shape.size * fine)
                pen.text((shape.x * fine, shape.y * fine), shape.string, _paper(shape.color), font, anchor)
    image = image.resize((round(drawing.width * scale), round(drawing.height * scale)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", dpi=(dots_per_inch, dots_per_inch))
    return buffer.getvalue()


def to_pdf(drawing: Drawing) -> bytes:
    """A one-page PDF of the drawing's size. Characters outside Windows-1252 become question marks."""
    # One transform turns y downwards, the text matrix turns the letters upright again.
    commands = [f"1 0 0 -1 0 {drawing.height:g} cm 1 J 1 j"]
    commands += [_pdf_shape(shape) for shape in drawing.shapes]
    stream = zlib.compress("\n".join(commands).encode("cp1252", "replace"))
    box = f"[0 0 {drawing.width:g} {drawing.height:g}]"
    title = drawing.title.encode("cp1252", "replace").decode("cp1252")
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox {box} /Contents 5 0 R "
        "/Resources << /Font << /F 4 0 R >> >> >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        f"<< /Length {len(stream)} /Filter /FlateDecode >>\nstream\n".encode() + stream + b"\nendstream",
        f"<< /Title ({_pdf_string(title)}) >>".encode("cp1252"),
    ]
    document = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(document))
        document += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = len(document)
    document += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    document += b"".join(f"{offset:010d} 00000 n \n".encode() for offset in offsets)
    document += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R /Info 6 0 R >>\nstartxref\n{table}\n%%EOF\n".encode()
    return bytes(document)


def text_width(string: str, size: float) -> float:
    """Points a text is wide in Helvetica.

    >>> text_width("00", 10)
    11.12
    """
    units = (_WIDTHS[ord(c) - 32] if 32 <= ord(c) < 127 else _OTHER_WIDTH for c in string)
    return sum(units) * size / 1000


def shortened(string: str, size: float, width: float) -> str:
    """The text, cut with an ellipsis to fit ``width`` points."""
    room, fitting = width - text_width("…", size), 0
    for place, character in enumerate(string):
        room -= text_width(character, size)
        if room >= 0:
            fitting = place + 1
        elif room + text_width("…", size) < 0:
            return string[:fitting].rstrip() + "…"
    return string


def _svg_shape(shape: Shape) -> str:
    match shape:
        case Line():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            stroke = f'stroke="{_svg(shape.color)}" stroke-width="{shape.width:g}"'
            return f'<polyline points="{points}" fill="none" {stroke} stroke-linejoin="round"/>'
        case Box():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
            return f'<rect {place} fill="{_svg(shape.color)}"{_svg_hint(shape.hint, "rect")}'
        case Dot():
            place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
            return f'<circle {place} fill="{_svg(shape.color)}"{_svg_hint(shape.hint, "circle")}'
        case Text():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
            return f'<text {place} fill="{_svg(shape.color)}">{escape(visible(shape.string))}</text>'


def _svg_hint(hint: str, element: str) -> str:
    return f"><title>{escape(visible(hint))}</title></{element}>" if hint else "/>"


def _svg(color: str) -> str:
    return f"var(--{color})" if color in _ON_PAPER else color


def _paper(color: str) -> str:
    return _ON_PAPER.get(color, color)


def _pdf_shape(shape: Shape) -> str:
    color = _pdf_color(shape.color)
    match shape:
        case Line():
            first, *rest = (f"{x:.2f} {y:.2f}" for x, y in shape.points)
            path = " ".join([f"{first} m", *(f"{point} l" for point in rest)])
            return f"{color} RG {shape.width:g} w {path} S"
        case Box():
            return f"{color} rg {shape.x:.2f} {shape.y:.2f} {shape.width:.2f} {shape.height:.2f} re f"
        case Dot():
            # A line of no length with round ends is a disc.
            place = f"{shape.x:.2f} {shape.y:.2f}"
            return f"{color} RG {2 * shape.radius:g} w {place} m {place} l S"
        case Text():
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor] * text_width(shape.string, shape.size)
            place = f"1 0 0 -1 {shape.x - shift:.2f} {shape.y:.2f} Tm"
            return f"{color} rg BT /F {shape.size:g} Tf {place} ({_pdf_string(shape.string)}) Tj ET"


def _pdf_color(color: str) -> str:
    value = _paper(color).removeprefix("#")
    return " ".join(f"{int(value[place : place + 2], 16) / 255:.3f}" for place in (0, 2, 4))


def _pdf_string(string: str) -> str:
    line = " ".join(string.split())
    return line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")

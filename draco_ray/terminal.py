"""Terminal output that escapes control sequences in the printed text."""

from __future__ import annotations

import re
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal interprets: control characters except line feed and tab, bidirectional controls, Unicode
line separators, and lone surrogates."""


def escape_control(text: str) -> str:
    r"""``text`` with control characters escaped, e.g. ``\x1b``."""
    return _ORDERS.sub(lambda found: ascii(found[0])[1:-1], text)


class PlainConsole(Console):
    """Prints names, paths and untrusted texts without markup and control characters."""

    def __init__(self, **options: Any) -> None:
        """``options`` are those of `rich.console.Console`."""
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, "soft_wrap": True} | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text printable; called for every text, also in the cells of tables."""
        return super().render_str(escape_control(text), **options)


console = PlainConsole(width=None if sys.stdout and sys.stdout.isatty() else 140)
"""The console that commands print to. Tables are at most as wide as the terminal, or 140 columns without a terminal."""


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 group``, ``2 groups``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""Extracts the code of a turn, truncates long outputs, and lists the results of several calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

_OPENING = re.compile(r"<think>|<code>")


def extract_code(text: str, *, thinking: bool = False, complete: bool = True) -> str | None:
    """The first ``<code>`` block of a turn outside its reasoning; later blocks are ignored.

    Args:
        text: the turn as sampled.
        thinking: whether the turn begins inside a ``<think>`` that the chat template opened.
        complete: whether the policy ended the turn itself. If so, an unclosed block ends with the turn; if a length
            limit cut the turn, it is incomplete and ignored.
    Returns: the code without the line breaks around it, or None.

    >>> extract_code("<think>not <code>a</code></think>Now <code>\\nb\\n</code>")
    'b'
    """
    position = 0
    if thinking:
        position = _after(text, "</think>", 0)
    while opening := _OPENING.search(text, position):
        if opening[0] == "<think>":
            position = _after(text, "</think>", opening.end())
            continue
        end = text.find("</code>", opening.end())
        if end < 0 and not complete:
            return None
        return text[opening.end() : end if end >= 0 else len(text)].strip("\r\n")
    return None


def cut_output(output: str, limit: int) -> str:
    """A tool output as the policy sees it: truncated to ``limit`` characters, with a note of how many are missing."""
    # Lone surrogates cannot be encoded.
    readable = output.encode("utf-8", "replace").decode("utf-8")
    if len(readable) <= limit:
        return readable
    return f"{readable[:limit]}\n[output cut: {len(readable) - limit} more characters]"


def number_tool_results(names: Sequence[str], results: Sequence[str]) -> str:
    """The results of a turn's calls as one text; several are listed by number and name.

    >>> number_tool_results(["add", "sub"], ["3", "1"])
    '(1) add: 3\\n(2) sub: 1'
    """
    if len(results) == 1:
        return results[0]
    lines = enumerate(zip_longest(names[: len(results)], results, fillvalue="tool"), start=1)
    return "\n".join(f"({number}) {name}: {result}" for number, (name, result) in lines)


def _after(text: str, tag: str, start: int) -> int:
    found = text.find(tag, start)
    # Unclosed reasoning extends to the end of the turn.
    return len(text) if found < 0 else found + len(tag)

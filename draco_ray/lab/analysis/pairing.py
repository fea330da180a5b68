"""Find which criteria of two judges are the same check: a third model pairs them one to one.

The model is not told which judge wrote which list, and a checksum of the texts decides which list comes first, so that
neither judge always has the same position. A reply is accepted only if every index exists and is in at most one pair.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draco_ray.config.load import project_file
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.completion import Completer, Request
from draco_ray.judging.reply import Entry, Integer, check_finish, read_entries
from draco_ray.judging.structured import reply_schema
from draco_ray.records import Criterion, Message

PROMPT = Path("prompts/pair_criteria.txt")
_PLACEHOLDER = re.compile(r"\{\{ (first_criteria|second_criteria) \}\}")

Pairs = tuple[tuple[int, int], ...]
"""(index in the first list, index in the second), both 0-based, sorted by the first."""


class _Pair(Entry):
    decides = ("first", "second")
    if_asked = ("shared_check",)
    shared_check: str = ""
    first: Integer
    second: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The third model's answer on two lists."""

    pairs: Pairs
    dollars: float = 0.0
    error: str | None = None
    """Why there is no usable reply; ``pairs`` is empty then."""


def pairing_template() -> str:
    """The text of `PROMPT`.

    Raises:
        ConfigError: it is missing.
    """
    return project_file(PROMPT).read_text(encoding="utf-8")


def pairing_prompt(first: Sequence[Criterion], second: Sequence[Criterion], template: str) -> str:
    """The prompt of the third model; ``template`` is the text of `PROMPT`."""
    values = {"first_criteria": render.rubrics(first), "second_criteria": render.rubrics(second)}
    # Replace both in one pass, so that a placeholder inside a criterion stays text.
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def parse_pairs(text: str, first: int, second: int) -> Pairs:
    """Parse the pairs of two lists of ``first`` and ``second`` criteria.

    Raises:
        ReplyError: not exactly one answer, an index that does not exist, or an index in two pairs.
    """
    entries = read_entries(text, _Pair).value
    if len(entries) > min(first, second):
        raise ReplyError(f"{len(entries)} pairs of {first} and {second} criteria; a criterion has one partner at most")
    for side, count in (("first", first), ("second", second)):
        indices = [int(getattr(entry, side)) for entry in entries]
        if beyond := [index for index in indices if not 0 <= index < count]:
            raise ReplyError(f"{side} {beyond[0]} does not exist; that list is numbered 0 to {count - 1}")
        if twice := sorted({index for index in indices if indices.count(index) > 1}):
            raise ReplyError(f"{side} {twice[0]} stands in two pairs; a criterion has one partner at most")
    return tuple(sorted((entry.first, entry.second) for entry in entries))


async def pair_criteria(
    complete: Completer, one: Sequence[Criterion], other: Sequence[Criterion], template: str, reasks: int = 1
) -> Pairing:
    """Let ``complete`` pair the criteria of two lists; if one list is empty, no call is made.

    Args:
        complete: the third model.
        one: the first list.
        other: the second list.
        template: the text of `PROMPT`.
        reasks: how often to ask again after an unusable reply, quoting the error.

    Returns: pairs of indices into ``one`` and ``other``.
    Raises:
        JudgeUnavailable: the model answers no call at all.
    """
    if not one or not other:
        return Pairing(pairs=())
    swapped = zlib.crc32(render.rubrics(one).encode()) > zlib.crc32(render.rubrics(other).encode())
    first, second = (other, one) if swapped else (one, other)
    messages: tuple[Message, ...] = (Message(role="user", content=pairing_prompt(first, second, template)),)
    requests: list[Request] = []
    dollars = 0.0
    error = ""
    for _ in range(1 + reasks):
        requests.append(Request(messages=messages, schema=reply_schema(_Pair, template)))
        completion = await complete(requests[-1])
        dollars += completion.dollars
        if completion.error is not None:
            return Pairing(pairs=(), dollars=dollars, error=completion.error)
        try:
            check_finish(completion.text, completion.finish_reason)
            pairs = parse_pairs(completion.text, len(first), len(second))
        except ReplyError as problem:
            error = str(problem)
            again = f"Your reply could not be used: {error}\n\nAnswer the first message again with the JSON only."
            messages = (
                *messages,
                Message(role="assistant", content=completion.text or "(empty)"),
                Message(role="user", content=again),
            )
            continue
        if swapped:
            pairs = tuple(sorted((index, partner) for partner, index in pairs))
        return Pairing(pairs=pairs, dollars=dollars)
    for request in requests:
        await complete.forget(request)
    return Pairing(pairs=(), dollars=dollars, error=error)

"""Fields of a record that did not become part of a trace.

A record is read through a view that remembers which fields were looked up. A field is reported if no reader looked it
up, it contains prose or a tool call, and its content appears in none of the traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draco_ray.traces.model import Trace, escape_surrogates

MIN_PROSE = 40
"""Minimum length of text that counts as prose, in characters."""
COMPARED_CHARACTERS = 60
"""Number of leading characters of a text that are searched for in the traces."""
_NAMES = ("name", "tool", "toolName", "tool_name", "function_name", "function")
_ARGUMENTS = ("arguments", "args", "input", "parameters", "tool_input", "action_input")
MAX_REPORTED = 3


class TrackedRecord(dict[str, Any]):
    """A JSON object that remembers which of its fields were looked up."""

    __slots__ = ("read",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict.get`; marks the field as read."""
        self.read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        """See `dict.items`; marks all fields as read."""
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        """See `dict.values`; marks all fields as read."""
        self.read.update(self)
        return super().values()


def track_fields(value: Any) -> Any:
    """A JSON value whose objects are `TrackedRecord`."""
    if isinstance(value, dict):
        return TrackedRecord({key: track_fields(each) for key, each in value.items()})
    return [track_fields(each) for each in value] if isinstance(value, list) else value


def unused_fields(record: Any, traces: Sequence[Trace], repeated: Sequence[str] = ()) -> tuple[str, ...]:
    """Paths of fields with prose or tool calls that no reader looked up and no trace shows; at most `MAX_REPORTED`.

    Args:
        record: a `track_fields` record, after it was read.
        traces: the traces built from it.
        repeated: fields whose content was also read from another field.
    """
    shown = "\n".join(_texts_of(traces))
    lost = dict.fromkeys(
        path
        for path, texts in _evidence(record, "", repeated)
        for text in texts
        if escape_surrogates(text.strip())[:COMPARED_CHARACTERS] not in shown
    )
    return tuple(lost)[:MAX_REPORTED]


def _texts_of(traces: Sequence[Trace]) -> Iterator[str]:
    for trace in traces:
        yield from (message.content for message in trace.prompt)
        for turn in trace.turns:
            yield turn.text
            yield turn.observation or ""


def _evidence(value: Any, path: str, repeated: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Path and texts of each field below ``value`` that no reader looked up."""
    if isinstance(value, list):
        for each in value:
            yield from _evidence(each, path, repeated)
    elif isinstance(value, TrackedRecord):
        for key in value:
            below = f"{path}.{key}".lstrip(".")
            inner = dict.__getitem__(value, key)
            if key in value.read:
                yield from _evidence(inner, below, repeated)
            elif key not in repeated:
                yield below, list(_texts(inner))


def _texts(value: Any) -> Iterator[str]:
    """Prose in a value, and the names of tool calls."""
    if isinstance(value, str):
        if len(value) >= MIN_PROSE and " " in value.strip():
            yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        name = next((dict.get(value, each) for each in _NAMES if isinstance(dict.get(value, each), str)), None)
        if name and any(each in value for each in _ARGUMENTS):
            yield name
        for key in value:
            yield from _texts(dict.__getitem__(value, key))

"""The common form of a conversation: a list of entries, independent of the source format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draco_ray.traces.model import escape_surrogates

AGENT = "assistant"
EARLIER_AGENT = "earlier assistant"
"""Role of an agent's messages in a prompt: the policy did not sample them."""
MAX_SHOWN = 2_000
"""Maximum length of a part of an unknown kind, in characters."""
MIN_ENCODED = 200
"""Minimum length of text that counts as base64 or ciphertext, in characters."""
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_ENCODED = re.compile(rf"(?:data:([\w.+-]+/[\w.+-]+)[\w;=.+-]*,)?([A-Za-z0-9+/_=-]{{{MIN_ENCODED},}})")
"""The start of a data URL, and text that may be base64."""
_SIGNATURES = ("iVBOR", "/9j/", "R0lGOD", "JVBERi", "UklGR", "UEsDB", "H4sI")
"""First characters of PNG, JPEG, GIF, PDF, WebP or WAV, ZIP and gzip in base64."""
_CIPHERTEXT = ("encrypted_content", "signature", "thoughtSignature", "thought_signature")


class BadTrace(ValueError):
    """A record that does not fit its format; the message says what was expected."""


class MissingTaskId(BadTrace):
    """A record without the field that ``group_by`` names, whatever its format."""


UNREADABLE_ERRORS = (BadTrace, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""Exceptions that a reader may raise for a record that does not fit its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Any = None
    call_id: str = ""

    def __str__(self) -> str:
        """The call as the judge sees it: ``search({"from": "JFK"})``; multi-line text keeps its line breaks."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                return f"{self.name}({escape_surrogates(arguments)})"
        if isinstance(arguments, Mapping) and any(isinstance(v, str) and "\n" in v for v in arguments.values()):
            return "\n".join([f"{self.name}(", *(_argument(*item) for item in arguments.items()), ")"])
        return f"{self.name}({compact_json({} if arguments is None else arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event of a conversation."""

    role: str
    """``assistant`` for the agent, ``tool`` for a result; anything else is another speaker."""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    code: str | None = None
    """Code that the agent ran in this turn, if its format says so."""
    call_id: str = ""
    """For a result: id of its call; empty if the trace does not state it."""
    name: str = ""
    """For a result: name of the tool; empty if the trace does not state it."""
    tokens: int | None = None
    item: bool = False
    """Whether the format may spread a turn over several entries, such as the items of the Responses API."""


def compact_json(value: object) -> str:
    """JSON on one line, without ASCII escapes; encoded data is described."""
    return escape_surrogates(json.dumps(strip_base64(value), ensure_ascii=False, default=str))


def truncated_json(value: object) -> str:
    """JSON on one line, truncated to `MAX_SHOWN` characters."""
    text = compact_json(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... {len(text)} characters in all"


def strip_base64(value: object) -> object:
    """A JSON value with base64 and ciphertext replaced by a description."""
    if isinstance(value, str):
        return _ENCODED.sub(_described, value)
    if isinstance(value, Mapping):
        return {
            key: f"[ciphertext, {decoded_size(each)}]"
            if key in _CIPHERTEXT and isinstance(each, str)
            else strip_base64(each)
            for key, each in value.items()
        }
    return [strip_base64(each) for each in value] if isinstance(value, list | tuple) else value


def _described(found: re.Match[str]) -> str:
    """The replacement for a match that is encoded data; any other match unchanged."""
    head, data = found.groups()
    start = data[:4096]
    mixed = len(set(start)) > 24 and all(re.search(each, start) for each in ("[a-z]", "[A-Z]", "[0-9]"))
    known = head or mixed or start.startswith(_SIGNATURES)
    return f"[{head or 'base64'}, {decoded_size(data)}]" if known else found[0]


def decoded_size(base64: str) -> str:
    """The size of the data that base64 text encodes, as text with a unit, e.g. ``12 kB``."""
    count = len(base64) * 3 // 4
    units = ((1e6, "MB", ".1f"), (1e3, "kB", ".0f"))
    return next((f"{count / unit:{form}} {name}" for unit, name, form in units if count >= unit), f"{count} bytes")


def decode_if_json(value: Any, starts: str = "[{") -> Any:
    """Decode JSON text that begins with one of the characters ``starts``; return anything else unchanged."""
    if not isinstance(value, str) or value[:1] not in tuple(starts):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def text_of(holder: Mapping[str, Any], *names: str) -> str:
    """Text of the first of these fields that has text; empty if none has."""
    return next(
        (escape_surrogates(holder[name]) for name in names if isinstance(holder.get(name), str) and holder[name]), ""
    )


def first_of(holder: Mapping[str, Any], *names: str) -> Any:
    """Value of the first of these fields that is not None; None if there is no such field."""
    return next((holder[name] for name in names if holder.get(name) is not None), None)


def object_of(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in a field; an empty object if the field has none."""
    value = holder.get(name)
    return value if isinstance(value, Mapping) else {}


def wrap_thinking(text: str) -> str:
    """Reasoning in ``<think>`` tags; empty text stays empty."""
    text = escape_surrogates(text).strip()
    return text if not text or text.startswith("<think>") else f"<think>{text}</think>"


def strip_thinking(text: str) -> str:
    """A turn's text without its reasoning, which a chat template may have opened before the turn.

    >>> strip_thinking("<think>a</think> b"), strip_thinking("a</think> b"), strip_thinking("<think>a")
    (' b', ' b', '')
    """
    opened, closed, rest = text.partition("</think>")
    return _THOUGHT.sub("", rest if closed and "<think>" not in opened else text)


def json_type_name(value: object) -> str:
    """The JSON type of a value in words.

    >>> json_type_name([1])
    'a list'
    """
    if value is None:
        return "nothing"
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list"}
    return "an object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def _argument(name: object, value: object) -> str:
    return (
        f"  {name} =\n{escape_surrogates(value)}"
        if isinstance(value, str) and "\n" in value
        else f"  {name} = {compact_json(value)}"
    )

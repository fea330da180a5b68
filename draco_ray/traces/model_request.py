"""The request of a model call, in the form of any provider's API: its messages, system prompt and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.traces.entry import Entry, decode_if_json, first_of
from draco_ray.traces.formats import get_field, path_value
from draco_ray.traces.messages import AGENT_ROLES, entries, is_message, unwrapped
from draco_ray.traces.templates import parse_chat_template

REQUEST_PATHS = (
    *("request.body", "request.postData.text", "request", "request_body", "body", "params", "input.inputBodyJson"),
    *("values", "chat", "", "channel_values", "artifact", "message.artifact", "kwargs"),
)
"""Possible paths of the request, or of a state with messages, in a record; the empty path is the record itself."""
HISTORIES = (
    "messages",
    "messages_and_choices",
    "contents",
    "conversations",
    "conversation",
    "input",
    "inputs",
    "prompt",
    "automatic_function_calling_history",
    "trajectory",
    "text",
    "llm_context",
)
"""Fields of a record or request that may contain its messages."""
SYSTEM = (
    "system",
    "instructions",
    "systemInstruction",
    "system_instruction",
    "config.system_instruction",
    "config.systemInstruction",
    "developer",
)
"""Possible paths of the system prompt in a request that does not have it among the messages."""
TOOLS = ("tools", "functions", "toolConfig.tools", "tool_config.tools", "config.tools")


def request_in(record: object, paths: Sequence[str] = REQUEST_PATHS) -> tuple[Mapping[str, Any], str, Any] | None:
    """The request in a record, the field with its messages, and the messages; None if there are none."""
    for path in paths:
        request = decode_if_json(path_value(record, path)) if path else record
        if isinstance(request, Mapping) and (name := history_name(request)) is not None:
            # A prompt that is text may contain the messages as JSON.
            history = (
                decode_if_json(request[name]) if _is_history(decode_if_json(request[name]), name) else request[name]
            )
            history = history.get("messages", [history]) if isinstance(history, Mapping) else history
            return request, name, history
    return None


def request_entries(record: object) -> list[Entry]:
    """The system prompt and the messages of a record that is a request; empty if it has no messages.

    Raises:
        BadTrace: it contains something that is not a message.
    """
    if (found := request_in(record, ("", *REQUEST_PATHS))) is None:
        return []
    request, _, history = found
    if isinstance(history, list):
        history = [{"role": "user", "content": each} if isinstance(each, str) else each for each in history]
    return system_entries(first_path_value([request], SYSTEM)) + entries(history)


def system_entries(system: Any) -> list[Entry]:
    """The system prompt, in the form of any provider's API; empty if there is none."""
    content = system.get("parts", system) if isinstance(system, Mapping) else system
    known = isinstance(content, str | list | Mapping)
    return entries([{"role": "system", "content": content}]) if known else []


def first_path_value(holders: Sequence[Any], paths: Sequence[str]) -> Any:
    """The value at the first of these paths that one of the objects has; None if none has it."""
    return next((value for path in paths for each in holders if (value := path_value(each, path))), None)


def history_name(request: Mapping[str, Any]) -> str | None:
    """The field of a request that contains its messages."""
    # Use a copy, since a lookup in the record itself marks the field as read.
    fields = dict(request)
    read = (
        (name, value) for name in HISTORIES if name in fields for value in (decode_if_json(fields[name]), fields[name])
    )
    known = (name for name, value in read if _is_history(value, name))
    columns = _is_conversations(fields.get("messages"))
    if (name := next(known, None)) or ("messages" in fields and not columns):
        return name or "messages"
    others = {name: value for name, value in fields.items() if _is_dialogue(value)}
    first: list[Any] = next(iter(others.values()), [])
    # Several fields may contain the same conversation, with and without its calls.
    whole = [name for name, value in others.items() if _contents(first) <= _contents(value)]
    return max(whole, key=lambda name: len(others[name]), default=None)


def _contents(messages: list[Any]) -> set[str]:
    names = ("content", "parts", "message", "text", "value")
    return {repr(first_of(each, *names)) for each in messages if isinstance(each, Mapping)}


def _is_conversations(value: object) -> bool:
    """Whether the value is a list of conversations, such as a column of a table."""
    return isinstance(value, list) and bool(value) and all(map(is_messages, value[:3]))


def _is_history(value: object, name: str) -> bool:
    if isinstance(value, Mapping):
        value = value.get("messages", [value])
    if isinstance(value, str):
        return name in ("input", "prompt", "contents") or (name == "text" and bool(parse_chat_template(value)))
    return is_messages(value)


def _is_dialogue(value: Any) -> bool:
    """Whether the value is a list of messages with at least one from an agent."""
    return is_messages(value) and any(
        str(get_field(unwrapped(each), "role")).casefold() in AGENT_ROLES or each.get("kind") == "response"
        for each in value
        # Elements of `choices` belong to a response.
        if isinstance(each, Mapping) and not isinstance(each.get("message"), Mapping)
    )


def is_messages(value: object) -> bool:
    """Whether the value is a list of chat messages or items, in any dialect."""
    return isinstance(value, list) and bool(value) and all(map(is_message, value[:3]))

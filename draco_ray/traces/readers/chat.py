"""Records that hold a list of messages or items, and logs of requests to a model with their responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.records import EpisodeEnd
from draco_ray.traces.calls import ModelCall, threads
from draco_ray.traces.entry import AGENT, Entry
from draco_ray.traces.formats import Reading, build, field, number, path_value
from draco_ray.traces.messages import LANGCHAIN, entries, reply_entries
from draco_ray.traces.model import Trace, clean

ITEM = re.compile(r"message|reasoning|item_reference|compaction|mcp_\w+|\w+_call|\w+_output")
"""Types of the items of OpenAI's responses."""
HISTORIES = (
    "messages",
    "messages_and_choices",
    "contents",
    "conversations",
    "conversation",
    "input",
    "inputs",
    "prompt",
)
"""Fields that hold the messages of a record or a request."""
REPLIES = ("response", "response_body", "completion", "output", "outputs", "choices", "candidates", "generations")
"""Fields that hold what the model answered to them."""
ANTHROPIC_BLOCKS = {"tool_use", "tool_result", "thinking", "server_tool_use", "redacted_thinking"}
RESPONSE_ITEMS = {"function_call", "function_call_output", "reasoning", "custom_tool_call", "mcp_call"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a record that holds a conversation."""

    request: Mapping[str, Any]
    """The record, or the request in it."""
    history: Any
    reply: Any
    """None where the history is the whole conversation."""


def _parts(record: object) -> _Parts | None:
    """Where in a record the conversation is; None: there is none."""
    if isinstance(record, list):
        return _Parts(request={}, history=record, reply=None) if is_messages(record) else None
    if not isinstance(record, Mapping):
        return None
    inner = next((value for name in ("request", "body") if isinstance(value := field(record, name), Mapping)), record)
    if isinstance(body := field(inner, "body"), Mapping):
        inner = body
    broken = "messages" if "messages" in inner else None
    name = next((name for name in HISTORIES if _is_history(inner.get(name), name)), broken)
    if name is None:
        return None
    history = inner[name].get("messages", inner[name]) if isinstance(inner[name], Mapping) else inner[name]
    replies = [
        value for each in REPLIES if each != name and (value := record.get(each, inner.get(each))) not in (None, "", [])
    ]
    return _Parts(request=inner, history=history, reply=replies[0] if replies else None)


def _is_history(value: object, name: str) -> bool:
    if isinstance(value, Mapping):
        value = value.get("messages")
    return is_messages(value) or (isinstance(value, str) and name in ("input", "prompt"))


def is_messages(value: object) -> bool:
    """Whether it is a list of chat messages or items, in any dialect."""
    return isinstance(value, list) and bool(value) and all(map(is_message, value[:3]))


def is_message(value: object) -> bool:
    """Whether it is a chat message or an item, in any dialect."""
    if not isinstance(value, Mapping):
        return False
    if "role" in value or ("from" in value and "value" in value) or ("source" in value and "content" in value):
        return True
    choice = isinstance(value.get("message"), Mapping) and ("finish_reason" in value or "index" in value)
    return choice or _is_langchain(value) or bool(ITEM.fullmatch(str(value.get("type"))))


def _is_langchain(value: Mapping[str, Any]) -> bool:
    if value.get("type") == "constructor":
        return isinstance(value.get("kwargs"), Mapping)
    short = str(value.get("type")).removesuffix("Chunk").removesuffix("Message").casefold()
    return short in LANGCHAIN and ("content" in value or isinstance(value.get("data"), Mapping))


def _types(messages: object) -> set[str]:
    """The types of messages, items and of the parts of their contents."""
    found: set[str] = set()
    for message in messages if isinstance(messages, list) else ():
        content = field(message, "content")
        found |= {str(field(each, "type")) for each in [message, *(content if isinstance(content, list) else ())]}
    return found


def is_anthropic(record: object) -> bool:
    """Whether a record holds Anthropic messages."""
    known = _parts(record)
    return (
        known is not None
        and is_messages(known.history)
        and all("role" in each for each in known.history if isinstance(each, Mapping))
        and (bool(_types(known.history) & ANTHROPIC_BLOCKS) or "system" in known.request)
    )


def is_items(record: object) -> bool:
    """Whether a record holds items of OpenAI's responses."""
    known = _parts(record)
    if known is None:
        return field(record, "object") == "response"
    if {"messages", "contents"} & known.request.keys():
        return False
    listed = _types(known.history) | _types(known.reply)
    return bool(listed & RESPONSE_ITEMS) or field(record, "object") == "response" or "input" in known.request


def is_chat(record: object) -> bool:
    """Whether a record holds OpenAI's chat messages."""
    known = _parts(record)
    if known is None or not is_messages(known.history):
        return known is not None and "messages" in known.request
    return all("role" in each for each in known.history[:3] if isinstance(each, Mapping))


def is_other(record: object) -> bool:
    """Whether a record holds messages in another dialect (LangChain, AutoGen, Gemini, ...)."""
    return _parts(record) is not None


def session(record: Any, file: str) -> str | None:
    """The file, for records that are a request with its response: later requests repeat earlier ones."""
    known = _parts(record)
    return None if known is None or known.reply is None else file


def reader(name: str) -> Callable[[Any, str, Reading], Iterator[Trace]]:
    """The reader of messages, as those of the format ``name``."""

    def read(record: Any, where: str, reading: Reading) -> Iterator[Trace]:
        records = record if isinstance(record, Gathered) else [record]
        calls = [_call(each) for each in records]
        for thread in threads(calls):
            last = records[thread.calls[-1]]
            place = f"{where} record {thread.calls[0] + 1}" if len(records) > 1 else where
            yield _trace(name, last, thread.entries, place, reading)

    return read


class Gathered(list[Any]):
    """The records of one session."""


def _trace(name: str, record: Any, said: Sequence[Entry], where: str, reading: Reading) -> Trace:
    known = _parts(record) or _Parts(request=record, history=[], reply=record)
    named = ("tools", "functions", "toolConfig.tools", "tool_config.tools", "config.tools")
    stopped = path_value(record, "incomplete_details.reason") == "max_output_tokens"
    return build(
        said,
        record=record,
        where=where,
        format_=name,
        reading=reading,
        tools=next(
            (tools for each in named if (tools := path_value(known.request, each) or path_value(record, each))), None
        ),
        outcome=number(field(record, "reward")),
        ended=EpisodeEnd.RESPONSE_LIMIT if stopped else None,
    )


def _call(record: Any) -> ModelCall:
    """A record as the history and what followed it."""
    known = _parts(record)
    if known is None:
        # A response of OpenAI's alone: its input was not logged.
        return ModelCall(inputs=[], outputs=reply_entries(record))
    inputs = entries(known.history, "item" if "input" in known.request else "message")
    names = ("system", "instructions", "systemInstruction", "system_instruction", "developer")
    told = next((value for each in names if (value := known.request.get(each, field(record, each)))), None)
    if told is not None:
        inner = told.get("parts", told) if isinstance(told, Mapping) else told
        inputs = [
            *(Entry(role="system", text=each.text) for each in entries([{"role": "system", "content": inner}])),
            *inputs,
        ]
    outputs = reply_entries(known.reply)
    if isinstance(known.reply, list) and _types(known.reply) & LANGCHAIN.keys():
        outputs = entries(known.reply)
    # Some logs hold the history again in front of what was answered.
    if len(outputs) >= len(inputs) > 0 and outputs[: len(inputs)] == inputs:
        outputs = outputs[len(inputs) :]
    return ModelCall(
        inputs=inputs,
        outputs=[each if each.role != "" else Entry(role=AGENT, text=clean(each.text)) for each in outputs],
    )

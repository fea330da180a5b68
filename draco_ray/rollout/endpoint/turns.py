"""A request for a turn of the policy and the reply, in one form for all dialects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from draco_ray.engine.tool_calls import ToolCall

Json: TypeAlias = dict[str, Any]
Conversations: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Id of an earlier response -> the messages up to it."""


class Refused(Exception):
    """A refused request. The agent receives the message as an API error in its dialect.

    Raised with a message of one line, the HTTP status, and OpenAI's error code.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for the policy's next turn."""

    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation as chat messages: ``role``, ``content`` (a text), and for turns of the policy
    ``tool_calls``, their arguments as objects."""
    tools: str = "[]"
    """A JSON array of function schemas."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    model: str = ""
    """The agent's name for the policy."""
    side_call: bool = False
    """Whether ``metadata`` marks this as a side call, e.g. a request for a title, which gets no credit."""
    reasoning_shown: bool = True
    """Whether the client accepts the reasoning before the answer."""
    call_forms: Mapping[str, Json] = field(default_factory=dict)
    """Tool -> fields of a call's item that differ from those of a plain function call. Only for OpenAI's Responses."""
    conversation: tuple[Mapping[str, Any], ...] = ()
    """The conversation stored with the response, for later requests with its id. Only for OpenAI's Responses."""
    session: str = ""
    """Header ``X-Session-ID`` of requests to the shared URL; a request never continues a turn of another session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReply:
    """The policy's turn."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, ToolCall], ...]
    """The turn's tool calls, each with its id."""
    finish_reason: str
    """``stop``, ``tool_calls`` or ``length``."""
    stopped_by: str
    """The stop text that ended the turn and is not part of ``content``; empty if there was none."""
    prompt_tokens: int
    cached_tokens: int
    """Number of the ``prompt_tokens`` that were already recorded by an earlier turn."""
    completion_tokens: int

    def message(self) -> Json:
        """The reply as a chat message."""
        return {
            "role": "assistant",
            "content": self.content,
            "tool_calls": [
                {"id": each, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for each, call in self.calls
            ],
        }


def arguments_json(call: ToolCall) -> str:
    """The arguments of a call as OpenAI's APIs send them."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def is_side_call(rules: Iterable[str], told: Sequence[str]) -> bool:
    """Whether one of ``agent.side_calls`` matches the first or the last of the system and user messages."""
    return any(re.search(rule, text) for rule in rules for text in (*told[:1], *told[-1:]))


def message_key(message: Mapping[str, Any]) -> str:
    """The key by which messages are compared: role, text and calls.

    Call ids are ignored, and so is white space around the policy's text, because many agents trim it. 1 and 1.0 are
    equal, because not every language keeps the decimal point.

    >>> said = {"role": "assistant", "content": "Done.", "tool_calls": []}
    >>> message_key(said) == message_key({"role": "assistant", "content": " Done. "})
    True
    """
    content = message.get("content") or ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if calls:
        # Convert through JSON rather than by recursion, because arguments may be nested deeply.
        calls = json.loads(json.dumps(calls), parse_float=_number)
    if message["role"] == "assistant":
        content = content.strip()
    return json.dumps([message["role"], content, calls], sort_keys=True, ensure_ascii=False)


def _number(written: str) -> float:
    value = float(written)
    return int(value) if value.is_integer() else value

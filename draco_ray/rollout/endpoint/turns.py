"""What a request asks of the policy and what it gets, in one form for both of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.tool_calls import ToolCall


class Refused(Exception):
    """A request that is not answered; what it says goes to the agent, as OpenAI's errors look.

    Raised with a message of one line, the HTTP status, and OpenAI's name of the error.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def no_turn_left(config: AgentConfig) -> Refused:
    """Why an episode that has had its turns gets no other."""
    return Refused(f"this episode has had its agent.max_turns={config.max_turns} turns", code="turn_limit")


def room_left(config: AgentConfig, tokens: int) -> int:
    """What a sequence of so many tokens may grow by. Raises: Refused where that is nothing."""
    most = config.max_prompt_length + config.max_response_length
    if tokens >= most:
        raise Refused(
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens.",
            code="context_length_exceeded",
        )
    return most - tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation as chat messages: ``role``, ``content`` a text, and of the policy's turns ``tool_calls``
    with their arguments as objects."""
    tools: str = "[]"
    """A JSON array of function schemas."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    model: str = ""
    """What the agent calls the policy."""
    side_call: bool = False
    """Its ``metadata`` names it a side call: a title or a summary, say, that nobody is told."""
    instructed: bool = False
    """The first message is of this request alone, and not of those that go on from its answer by an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAsk:
    """One request in tokens."""

    token_ids: list[int]
    """The whole sequence so far."""
    max_tokens: int | None
    stop_token_ids: frozenset[int]
    """The turn ends with the first of these, or where the policy's own ends."""
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's turn."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, ToolCall], ...]
    """Each with its id."""
    finish_reason: str
    """``stop``, ``tool_calls`` or ``length``."""
    prompt_tokens: int
    cached_tokens: int
    """The part of ``prompt_tokens`` that was recorded before."""
    completion_tokens: int

    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        return {
            "role": "assistant",
            "content": self.content,
            "tool_calls": [
                {"id": each, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for each, call in self.calls
            ],
        }


def identity(message: Mapping[str, Any]) -> str:
    """What makes two messages the same: role, text and calls.

    The ids of calls do not, nor does white space around what the policy said: many agents trim it. A whole number is
    the same with and without a point: not every language keeps it.

    >>> said = {"role": "assistant", "content": "Done.", "tool_calls": []}
    >>> identity(said) == identity({"role": "assistant", "content": " Done. "})
    True
    """
    content = message.get("content") or ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if calls:
        # Not by a function that calls itself: arguments may be nested as deeply as JSON is read.
        calls = json.loads(json.dumps(calls), parse_float=_number)
    if message["role"] == "assistant":
        content = content.strip()
    return json.dumps([message["role"], content, calls], sort_keys=True, ensure_ascii=False)


def _number(written: str) -> float:
    value = float(written)
    return int(value) if value.is_integer() else value

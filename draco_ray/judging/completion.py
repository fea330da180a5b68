"""Requests to the judge model, their completions, and the interface of clients that complete requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from draco_ray.records import Message, OriginalCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One chat request. Model, temperature and the like belong to the `Completer`."""

    messages: tuple[Message, ...]
    vote: int = 0
    """Index of this call among k independent scoring calls, so that equal prompts are sent k times."""
    scope: str = ""
    """Scope, such as a group, to which reuse of the stored answer is limited; empty: no limit."""
    schema: Mapping[str, object] | None = field(default=None, hash=False)
    """JSON schema that constrains the reply if the endpoint supports it; not a part of the cache key."""
    phase: str | None = None
    """Phase of the request; requests of one phase have the same priority and replies of similar length."""
    group: str = ""
    """Requests of one group share a prefix and are best answered by the same machine."""
    shared: tuple[int, ...] = ()
    """Character offsets in the first message where prefixes shared with other requests end
    (`draco_ray.judging.endpoint`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, or the reason there is none."""

    text: str
    finish_reason: str
    """``stop``, ``length``, ``content_filter``, ``refusal``, ``tool_calls``, ``reasoning`` if no answer followed the
    reasoning, ``error`` if the request was refused, ``unavailable`` if it was not answered, or the provider's own name
    for the interruption of a reply (``abort``)."""
    model: str
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Number of output tokens, reasoning included."""
    dollars: float = 0.0
    """Cost, including earlier requests of the call that may have been billed; 0 if neither the configuration nor
    LiteLLM knows the model's price."""
    started_at: float
    seconds: float
    """Time from the first request to the answer, including waits between attempts."""
    requests: int = 1
    """HTTP requests made; 0 when the answer came from the durable reply cache."""
    error: str | None = None
    """Why this request has no answer, even if the judge may answer others."""
    reasoning_tokens: int = 0
    """Reasoning part of ``output_tokens``."""
    estimated_dollars: float = 0.0
    """The part of ``dollars`` for requests without a reply or without stated usage, at their maximum cost."""
    call_id: str = ""
    """Unique id; empty for a reply from the durable cache."""
    paid: OriginalCost | None = None
    """What a reply from the durable cache cost when it was made, if known."""
    waited_seconds: float = 0.0
    """The part of ``seconds`` spent waiting for the pool's limits or for a judge that was down."""
    usage_known: bool = True
    """Whether the reply stated its usage; if not, the token counts are upper bounds."""

    @property
    def cut(self) -> bool:
        """Whether the text ends early: at a limit, or interrupted."""
        return self.finish_reason not in _ENDED


@runtime_checkable
class Completer(Protocol):
    """Interface of clients that answer requests, such as `draco_ray.judging.client.LiteLLMClient`."""

    async def __call__(self, request: Request) -> Completion:
        """Answer ``request``.

        Raises:
            JudgeUnavailable: no request can succeed: unreachable, key refused, model unknown.
        """
        ...

    async def forget(self, request: Request) -> None:
        """Drop the stored answer to ``request``, because its phase failed: a retry must ask again."""
        ...

    async def check(self) -> None:
        """Send a tiny request.

        Raises:
            JudgeUnavailable: the judge does not answer.
        """
        ...


_ENDED = ("stop", "content_filter", "refusal", "tool_calls", "reasoning")
_BROKEN_OFF = re.compile(
    r"error|abort|cancel|fail|length|limit|malformed|unexpected|too_many|missing|timeout|repetition|incomplete"
)
"""Finish reasons of providers that mean an interruption; LiteLLM reports every unknown reason as ``stop``."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking_blocks")
"""Fields of a message that hold reasoning."""


def reply_of(choice: Any) -> tuple[str, str]:
    """Text and finish reason of a chat completion's choice (None: there is none).

    A refusal, a tool call, and reasoning without an answer are named in the finish reason. The text is then the
    refusal, the calls, or empty.
    """
    if choice is None:
        return "", "stop"
    text, reason = _said(choice.message, _ended(choice))
    # JSON may hold lone surrogates; files and further requests cannot.
    return text.encode("utf-8", "replace").decode("utf-8"), reason


def _ended(choice: Any) -> str:
    """LiteLLM's finish reason, or the provider's if that one says that the reply was interrupted."""
    reason = str(choice.finish_reason or "stop")
    native = str((getattr(choice, "provider_specific_fields", None) or {}).get("native_finish_reason")).lower()
    return native if reason == "stop" and _BROKEN_OFF.search(native) else reason


def _said(message: Any, reason: str) -> tuple[str, str]:
    text = message.content or ""
    # LiteLLM keeps provider-specific fields in a separate place.
    further = getattr(message, "provider_specific_fields", None) or {}
    if refusal := getattr(message, "refusal", None) or further.get("refusal"):
        return text or str(refusal), "refusal"
    if (calls := getattr(message, "tool_calls", None)) and not text.strip():
        return "\n".join(_tool_call(call) for call in calls), "tool_calls"
    if not text.strip() and reason == "stop" and any(getattr(message, name, None) for name in _THOUGHTS):
        return "", "reasoning"
    return text, "stop" if reason in ("tool_calls", "function_call") and text.strip() else reason


def _tool_call(call: Any) -> str:
    function = getattr(call, "function", None)
    return f"{getattr(function, 'name', None) or 'a tool'}({getattr(function, 'arguments', None) or ''})"

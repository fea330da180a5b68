"""The seam between the judge and whatever answers it: a request, a completion, and who turns one into the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from draco_ray.records import Message, Paid


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One chat request. Everything else that is sent (model, temperature, ...) belongs to who completes it."""

    messages: tuple[Message, ...]
    vote: int = 0
    """Which of k independent scoring calls this is, so that equal prompts are asked k times."""
    scope: str = ""
    """What the answer is kept for; empty: for whoever asks the same again."""
    schema: Mapping[str, object] | None = field(default=None, hash=False)
    """JSON schema to hold the reply to where the endpoint can; it does not change what is asked."""
    phase: str | None = None
    """What it is for, which says how large it will be and how urgent it is; None: like any other of no phase."""
    group: str = ""
    """Requests of one group begin alike, and are best answered by the same machine."""
    shared: tuple[int, ...] = ()
    """Where in the first message beginnings end that other requests share (`draco_ray.judging.prompt_cache`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, or the reason there is none."""

    text: str
    finish_reason: str
    """``stop``, ``length``, ``content_filter``, ``refusal``, ``tool_calls``, ``reasoning`` where nothing followed it,
    ``error`` where the request was refused, ``unavailable`` where no answer came to it, or the provider's own name for
    what broke the reply off (``abort``)."""
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    """Reasoning included."""
    dollars: float
    """Earlier requests of the call that may have been billed included; 0 where neither the configuration nor LiteLLM
    knows the model's price."""
    started_at: float
    seconds: float
    """From the first request to the answer, waits between attempts included."""
    requests: int
    """HTTP requests made; 0 when the answer came from the durable reply cache."""
    error: str | None = None
    """Why this request has no answer although the judge as a whole may be well."""
    reasoning_tokens: int = 0
    """The part of ``output_tokens`` that was thought and not said."""
    estimated_dollars: float = 0.0
    """The part of ``dollars`` that no reply states: the most that those requests may have cost."""
    call_id: str = ""
    """Unique; of a reply from the durable cache empty."""
    paid: Paid | None = None
    """Of a reply from the durable cache: how it was paid for, where that is known."""
    waited_seconds: float = 0.0
    """The part of ``seconds`` that passed before requests might be sent: the limits of the whole pool, and pauses of a
    judge that is not there."""
    usage_known: bool = True
    """Whether the reply said its usage; the tokens are the most that there can be where it did not."""

    @property
    def cut(self) -> bool:
        """Whether the text stops before its end: at a limit, or broken off."""
        return self.finish_reason not in _ENDED


class Completer(Protocol):
    """Answers requests; `draco_ray.judging.client.LiteLLMClient` in production, a script in tests."""

    async def __call__(self, request: Request) -> Completion:
        """Answer ``request``.

        Raises:
            JudgeUnavailable: no request can succeed: unreachable, key refused, model unknown.
        """
        ...

    async def forget(self, request: Request) -> None:
        """Drop a stored answer to ``request``: the phase it served failed, so that asking again must ask anew."""
        ...

    async def check(self) -> None:
        """Ask something tiny.

        Raises:
            JudgeUnavailable: the judge does not answer.
        """
        ...


_ENDED = ("stop", "content_filter", "refusal", "tool_calls", "reasoning")
_BROKEN_OFF = re.compile(
    r"error|abort|cancel|fail|length|limit|malformed|unexpected|too_many|missing|timeout|repetition|incomplete"
)
"""In the name of a way to end that LiteLLM calls ``stop``, as it does with every one that it does not know."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking_blocks")
"""Where a message holds what was thought."""


def reply_of(choice: Any) -> tuple[str, str]:
    """Text and finish reason of a chat completion's choice (None: there is none).

    A refusal, a call of a tool and reasoning that no answer follows are named in the finish reason; their text is the
    refusal's, the calls', and none: what a judge thinks is not what it says.
    """
    if choice is None:
        return "", "stop"
    text, reason = _said(choice.message, _ended(choice))
    # JSON may hold halves of surrogate pairs; no file and no further request can.
    return text.encode("utf-8", "replace").decode("utf-8"), reason


def _ended(choice: Any) -> str:
    """LiteLLM's finish reason, or the provider's where that one is no end of a whole reply."""
    reason = str(choice.finish_reason or "stop")
    native = str((getattr(choice, "provider_specific_fields", None) or {}).get("native_finish_reason")).lower()
    return native if reason == "stop" and _BROKEN_OFF.search(native) else reason


def _said(message: Any, reason: str) -> tuple[str, str]:
    text = message.content or ""
    # LiteLLM keeps what only some providers send apart.
    further = getattr(message, "provider_specific_fields", None) or {}
    if refusal := getattr(message, "refusal", None) or further.get("refusal"):
        return text or str(refusal), "refusal"
    calls = getattr(message, "tool_calls", None) or filter(None, [getattr(message, "function_call", None)])
    tools = [_called(call) for call in calls]
    if tools and not text.strip():
        return "\n".join(tools), "tool_calls"
    if not text.strip() and reason == "stop" and any(getattr(message, name, None) for name in _THOUGHTS):
        return "", "reasoning"
    return text, "stop" if reason in ("tool_calls", "function_call") and text.strip() else reason


def _called(call: Any) -> str:
    """A call of a tool, of whichever kind, as text."""
    kind = next((kind for kind in ("function", "custom") if getattr(call, kind, None)), None)
    tool = call if kind is None else getattr(call, kind)
    said = next(filter(None, (getattr(tool, name, None) for name in ("arguments", "input"))), "")
    return f"{getattr(tool, 'name', None) or 'a tool without a name'}({said})"

"""The seam between the judge and whatever answers it: a request, a completion, and who turns one into the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from draco_ray.records import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One chat request. Everything else that is sent (model, temperature, ...) belongs to who completes it."""

    messages: tuple[Message, ...]
    vote: int = 0
    """Which of k independent scoring calls this is, so that equal prompts are asked k times."""
    scope: str = ""
    """What the answer is kept for; empty: for whoever asks the same again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, or the reason there is none."""

    text: str
    finish_reason: str
    """``stop``, ``length``, ``content_filter``, or ``error`` where no answer came."""
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    dollars: float
    """0 where neither the configuration nor LiteLLM knows the model's price."""
    started_at: float
    seconds: float
    """From the first request to the answer, waits between attempts included."""
    requests: int
    """HTTP requests made; 0 when the answer came from the durable reply cache."""
    error: str | None = None
    """Why this request has no answer although the judge as a whole may be well."""


class Complete(Protocol):
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

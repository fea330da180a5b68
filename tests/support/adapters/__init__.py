"""Scripts that use an adapter with its real framework, in an environment that has it; each prints JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from draco_ray.judging.completion import Completion, Request
from tests.support import canned_judge

ASK = "Find the cheapest flight from JFK to SFO and book it."


class CannedCompleter:
    """The canned judge, in this process."""

    async def __call__(self, request: Request) -> Completion:
        """Answer by the prompt."""
        return Completion(
            text=canned_judge.answer(request.messages[0].content),
            finish_reason="stop",
            model="canned",
            input_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            dollars=0.0,
            started_at=0.0,
            seconds=0.0,
            requests=1,
        )

    async def forget(self, request: Request) -> None:
        """Do nothing: no reply is stored."""

    async def check(self) -> None:
        """Do nothing: the judge always answers."""


class PartlyFailingCompleter(CannedCompleter):
    """The canned judge; scoring fails for runs that contain the text ``unscored``."""

    def __init__(self, unscored: str) -> None:
        self.unscored = unscored

    async def __call__(self, request: Request) -> Completion:
        """Answer by the prompt."""
        prompt = request.messages[0].content
        answer = await super().__call__(request)
        if prompt.startswith("You grade one run") and self.unscored in prompt:
            return replace(answer, text="", finish_reason="error", error="no answer")
        return answer


def call(name: str, number: int, **arguments: str) -> dict[str, Any]:
    """A tool call as OpenAI's chat has it."""
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def booking_messages(flight: str) -> list[dict[str, Any]]:
    """A run that searches, books this flight and says so: three steps."""
    return [
        {"role": "assistant", "content": "I search.", "tool_calls": [call("search", 1, to="SFO")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "UA1 420 USD, DL9 380 USD"},
        {"role": "assistant", "content": "", "tool_calls": [call("book", 2, flight=flight)]},
        {"role": "tool", "tool_call_id": "call_2", "content": f"booked {flight}"},
        {"role": "assistant", "content": f"Booked {flight}."},
    ]


def missing_verdict_error(call: Any, *arguments: Any) -> str:
    """The message of the error that this call raises for a trajectory without a verdict."""
    from draco_ray.adapters.verdicts import MissingVerdict

    try:
        call(*arguments)
    except MissingVerdict as error:
        return str(error)
    raise AssertionError("a stale sample was not noticed")


def emit(value: Any) -> None:
    """Print the result on the last line."""
    print("\n" + json.dumps(value))

"""What a chat completion's choice says, and how it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.judging.completion import Completion, reply_of

CALL = SimpleNamespace(function=SimpleNamespace(name="search", arguments='{"q": 1}'))


def choice(content: str | None, reason: str | None = "stop", native: object = None, **message: Any) -> Any:
    fields: dict[str, Any] = {"finish_reason": reason, "message": SimpleNamespace(content=content, **message)}
    if native is not None:
        fields["provider_specific_fields"] = {"native_finish_reason": native}
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, ("", "stop")),
        (choice("yes"), ("yes", "stop")),
        (choice("yes", None), ("yes", "stop")),
        (choice(None, None), ("", "stop")),
        (choice("ye", "length"), ("ye", "length")),
        (choice("a\ud83d"), ("a?", "stop")),
        (choice(None, refusal="I will not"), ("I will not", "refusal")),
        (choice("No.", refusal="I will not"), ("No.", "refusal")),
        (choice(None, provider_specific_fields={"refusal": "nor I"}), ("nor I", "refusal")),
        (choice("yes", refusal=None, provider_specific_fields={"refusal": None}), ("yes", "stop")),
        (choice("yes", provider_specific_fields=None), ("yes", "stop")),
        (choice(None, "tool_calls", tool_calls=[CALL, CALL]), ('search({"q": 1})\nsearch({"q": 1})', "tool_calls")),
        (choice(" ", "stop", tool_calls=[CALL]), ('search({"q": 1})', "tool_calls")),
        (choice(None, tool_calls=[SimpleNamespace()]), ("a tool()", "tool_calls")),
        (choice("yes", "tool_calls", tool_calls=[CALL]), ("yes", "stop")),
        (choice("yes", "function_call"), ("yes", "stop")),
        (choice(" ", "tool_calls"), (" ", "tool_calls")),
        (choice(None, tool_calls=None, function_call=None), ("", "stop")),
        (choice(None, reasoning_content="hm"), ("", "reasoning")),
        (choice("\n", reasoning="hm"), ("", "reasoning")),
        (choice(None, thinking_blocks=[{"thinking": "hm"}]), ("", "reasoning")),
        (choice("yes", reasoning_content="hm"), ("yes", "stop")),
        (choice(None, "length", reasoning_content="hm"), ("", "length")),
        (choice(None, reasoning_content=""), ("", "stop")),
    ],
)
def test_what_a_choice_says_and_how_it_ended(found: Any, said: tuple[str, str]) -> None:
    assert reply_of(found) == said


@pytest.mark.parametrize(
    "native", ["abort", "ERROR", "model_length", "network_error", "MALFORMED_RESPONSE", "repetition"]
)
def test_an_end_that_is_none_keeps_the_providers_name(native: str) -> None:
    assert reply_of(choice("yes", "stop", native)) == ("yes", native.lower())


@pytest.mark.parametrize("native", ["eos_token", "end_turn", "done", "COMPLETE", "", None, 7])
def test_an_end_by_another_name_is_one(native: object) -> None:
    assert reply_of(choice("yes", "stop", native)) == ("yes", "stop")


def test_litellms_own_reason_goes_before_the_providers_name() -> None:
    assert reply_of(choice("ye", "length", "model_length")) == ("ye", "length")
    assert reply_of(SimpleNamespace(finish_reason="stop", message=SimpleNamespace(content="yes"))) == ("yes", "stop")
    bare = SimpleNamespace(finish_reason="stop", provider_specific_fields=None, message=SimpleNamespace(content="yes"))
    assert reply_of(bare) == ("yes", "stop")


ENDED = ("stop", "refusal", "content_filter", "tool_calls", "reasoning")


@pytest.mark.parametrize("reason", [*ENDED, "length", "abort", "error"])
def test_a_text_is_cut_where_it_stops_before_its_end(reason: str) -> None:
    completion = Completion(
        text="", finish_reason=reason, model="m", input_tokens=1, cached_tokens=0, output_tokens=1, dollars=0.0,
        started_at=0.0, seconds=0.0, requests=1,
    )  # fmt: skip
    assert completion.cut is (reason not in ENDED)

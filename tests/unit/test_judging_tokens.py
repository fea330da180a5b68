"""How many tokens a text takes, and what an error says of a prompt that was too long."""

from __future__ import annotations

import base64
import random
import socket
import subprocess
import sys

import pytest

from draco_ray.judging.tokens import SHORTER, TokenEstimate, is_too_long, part_to_keep, tokenizer

ENGLISH = "The agent looked for a free room on Friday, found none, and asked the user for another day. " * 400
CHINESE = "周五四号会议室空闲，助手预订后把结果告诉了用户。" * 1_500
RUSSIAN = "Помощник искал свободную комнату на пятницу и ничего не нашёл. " * 600
HINDI = "शुक्रवार को कमरा नंबर चार खाली है और सहायक ने उसे बुक कर दिया। " * 500
EMOJI = "🙂🚀🏠🎉" * 4_000
DIGITS = base64.b64encode(random.Random(0).randbytes(30_000)).decode()


def count(text: str) -> int:
    counted = tokenizer("openai/gpt-4o")
    assert counted is not None
    return counted(text)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, RUSSIAN, HINDI], ids=["English", "Chinese", "Russian", "Hindi"])
def test_the_first_estimate_is_no_less_than_what_a_tokenizer_counts(text: str) -> None:
    estimate = TokenEstimate()
    assert count(text) <= estimate.tokens(text)
    assert estimate.tokens(text) == pytest.approx(len(text.encode()) / 3)


def test_rates_are_learned_by_script() -> None:
    texts = (ENGLISH, CHINESE, RUSSIAN, ENGLISH + CHINESE, RUSSIAN + ENGLISH[:500])
    learned = TokenEstimate()
    for _ in range(3):
        for text in texts:
            learned = learned.learned(text, count(text))
    for text in (ENGLISH, CHINESE, RUSSIAN, ENGLISH + CHINESE):
        assert count(text) * 0.95 < learned.tokens(text) < count(text) * 1.35
    # Chinese alone says nothing of English.
    chinese = TokenEstimate().learned(CHINESE, count(CHINESE))
    assert chinese.tokens(ENGLISH) == TokenEstimate().tokens(ENGLISH)
    assert chinese.tokens(CHINESE) == pytest.approx(1.05 * count(CHINESE), rel=0.01)


def test_dense_text_is_learned_as_dense() -> None:
    learned = TokenEstimate().learned(DIGITS, count(DIGITS)).learned(EMOJI, count(EMOJI))
    assert count(DIGITS) > TokenEstimate().tokens(DIGITS) * 1.5
    assert count(DIGITS) <= learned.tokens(DIGITS) <= len(DIGITS)


@pytest.mark.parametrize("tokens", [0, 10, len(ENGLISH), 2 * len(ENGLISH)])
def test_usage_that_cannot_be_true_teaches_nothing(tokens: int) -> None:
    estimate = TokenEstimate()
    assert estimate.learned(ENGLISH, tokens) is estimate


def test_a_short_text_teaches_little() -> None:
    estimate = TokenEstimate()
    short = estimate.learned(ENGLISH[:400], 70).rates[0]
    long = estimate.learned(ENGLISH[:40_000], 7_000).rates[0]
    assert estimate.rates[0] * 0.98 < short < estimate.rates[0]
    assert long < estimate.rates[0] * 0.8


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("openai/gpt-4o", True),
        ("gpt-4", True),
        ("openrouter/openai/gpt-5.4", True),
        ("azure/gpt-4o-mini", True),
        ("anthropic/claude-sonnet-4-5", False),
        ("hosted_vllm/Qwen/Qwen3-32B", False),
        ("openai/no-such", False),
        # Their tokenizers would be downloaded.
        ("openrouter/openai/gpt-oss-120b", False),
        ("replicate/meta/llama-3-70b", False),
        ("openai/gpt2", False),
    ],
)
def test_a_tokenizer_is_used_where_it_comes_with_litellm(
    model: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    tokenizer.cache_clear()
    assert (tokenizer(model) is not None) is known


def test_a_run_of_one_character_takes_no_quadratic_time() -> None:
    code = "from draco_ray.judging.tokens import tokenizer; print(tokenizer('openai/gpt-4o')('a' * 2_000_000))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == 250_000


TOO_LONG = [
    (
        "litellm.ContextWindowExceededError: litellm.BadRequestError: OpenAIException - This model's maximum context "
        "length is 128000 tokens. However, your messages resulted in 150123 tokens.",
        140_000,
        128_000 / 150_123,
    ),
    (
        "litellm.BadRequestError: AnthropicException - prompt is too long: 213462 tokens > 200000 maximum",
        190_000,
        0.937,
    ),
    (
        "input length and `max_tokens` exceed context limit: 198000 + 8192 > 200000, decrease input length",
        190_000,
        0.99,
    ),
    (
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8000 in the messages, "
        "1000 in the completion).",
        8_300,
        1,
    ),
    ("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", 1_100_000, 0.874),
    ("Request too large for gpt-4o on tokens per min (TPM): Limit 30,000, Requested 45,000.", 40_000, 0.667),
    ("Der Prompt hat 45000 Token, erlaubt sind 32768.", 44_000, 0.728),
    ("engine E-0: prompt of 9000 tokens leaves no room to generate; expected fewer than 8192; shorten it", 8_500, 0.91),
    ("a prompt of 8,000 tokens is too long: it left 192 of judge.max_tokens=2,000 for the reply", 7_500, 1),
    # These state no numbers, or none that tell.
    ("Your input exceeds the context window of this model. Please adjust your input and try again.", 90_000, 1),
    ("litellm.ContextWindowExceededError: Input is too long for requested model.", 90_000, 1),
    ("The decoder prompt is longer than the model's context length", 90_000, 1),
]


@pytest.mark.parametrize(("error", "estimate", "stated"), TOO_LONG)
def test_too_long_is_recognized_in_every_providers_words(error: str, estimate: float, stated: float) -> None:
    assert is_too_long(error, estimate)
    assert part_to_keep(error, estimate, 0) == pytest.approx(min(0.9, 0.97 * stated), abs=0.01)
    kept = [part_to_keep(error, estimate, tries) for tries in range(len(SHORTER))]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0.5


@pytest.mark.parametrize(
    "error",
    [
        "litellm.ContentPolicyViolationError: The response was filtered (request 2026-11-27T08:00:00, 7f1234-9912)",
        "litellm.BadRequestError: Unsupported parameter: 'temperature'",
        "litellm.BadRequestError: The prompt was flagged. Code 10234.",
        "no answer within 600 s",
        "max_tokens is too large: 16384. This model supports at most 8192 completion tokens.",
    ],
)
@pytest.mark.parametrize("estimate", [300, 9_000, 150_000])
def test_other_refusals_are_not_too_long(error: str, estimate: float) -> None:
    assert not is_too_long(error, estimate)

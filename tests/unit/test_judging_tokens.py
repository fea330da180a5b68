"""How many tokens a text takes, and what an error says of a prompt that was too long."""

from __future__ import annotations

import base64
import random

import pytest

from draco_ray.judging.prompt_fitter import (
    BYTES_PER_TOKEN,
    SHORTENING_FRACTIONS,
    is_too_long,
    part_to_keep,
    update_tokens_per_byte,
)
from tests.support.token_counts import count_tokens

ENGLISH = "The agent looked for a free room on Friday, found none, and asked the user for another day. " * 400
CHINESE = "周五四号会议室空闲，助手预订后把结果告诉了用户。" * 1_500
RUSSIAN = "Помощник искал свободную комнату на пятницу и ничего не нашёл. " * 600
HINDI = "शुक्रवार को कमरा नंबर चार खाली है और सहायक ने उसे बुक कर दिया। " * 500
DIGITS = base64.b64encode(random.Random(0).randbytes(30_000)).decode()


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, RUSSIAN, HINDI], ids=["English", "Chinese", "Russian", "Hindi"])
def test_the_first_estimate_is_no_less_than_what_a_tokenizer_counts(text: str) -> None:
    assert count_tokens(text) <= len(text.encode()) / BYTES_PER_TOKEN


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, RUSSIAN, DIGITS], ids=["English", "Chinese", "Russian", "digits"])
def test_the_rate_of_a_long_text_is_learned_at_once(text: str) -> None:
    size, tokens = len(text.encode()), count_tokens(text)
    assert update_tokens_per_byte(1 / BYTES_PER_TOKEN, size, tokens) == pytest.approx(max(1.05 * tokens / size, 0.2))


@pytest.mark.parametrize("tokens", [0, 10, 20_000, 40_000])
def test_usage_that_cannot_be_true_teaches_nothing(tokens: int) -> None:
    assert update_tokens_per_byte(0.25, 20_000, tokens) == 0.25


def test_a_short_text_teaches_little() -> None:
    rate = 1 / BYTES_PER_TOKEN
    assert rate * 0.98 < update_tokens_per_byte(rate, 400, 70) < rate
    assert update_tokens_per_byte(rate, 40_000, 7_000) < rate * 0.8


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
    (
        "a prompt of 8,000 tokens is too long: it leaves 192 tokens for the reply, expected judge.max_tokens=2,000",
        7_500,
        1,
    ),
    # These state no numbers, or none that tell.
    ("Your input exceeds the context window of this model. Please adjust your input and try again.", 90_000, 1),
    ("litellm.ContextWindowExceededError: Input is too long for requested model.", 90_000, 1),
    ("The decoder prompt is longer than the model's context length", 90_000, 1),
]


@pytest.mark.parametrize(("error", "estimate", "stated"), TOO_LONG)
def test_too_long_is_recognized_in_every_providers_words(error: str, estimate: float, stated: float) -> None:
    assert is_too_long(error, estimate)
    assert part_to_keep(error, estimate, 0) == pytest.approx(min(0.9, 0.97 * stated), abs=0.01)
    kept = [part_to_keep(error, estimate, tries) for tries in range(len(SHORTENING_FRACTIONS))]
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

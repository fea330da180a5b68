"""What a request may cost at most, and where prices come from."""

from __future__ import annotations

import random

import pytest

from draco_ray.config.schema import JudgeConfig, Price, PriceTier
from draco_ray.judging.pricing import find_price, known_price, most_of, price_of
from draco_ray.records import Message


def message(text: str) -> Message:
    return Message(role="user", content=text)


def test_litellms_prices_hold_where_none_is_configured() -> None:
    judge = JudgeConfig(prices={"gpt-4o": Price(input=1.0, output=2.0)})
    assert known_price(judge, "openai/gpt-4o") == Price(input=1.0, output=2.0)
    found = known_price(judge, "anthropic/claude-sonnet-4-5")
    assert found is not None
    assert (found.input, found.cached_input, found.cache_write, found.output) == pytest.approx((3.0, 0.3, 3.75, 15.0))
    long = known_price(judge, "gemini/gemini-2.5-pro")
    assert long is not None
    assert [(tier.above, tier.input, tier.output) for tier in long.tiers] == [(200_000, 2.5, 15.0)]


def test_a_reference_price_is_completed_by_what_the_provider_asks_for_cached_and_long_input() -> None:
    reference = find_price("openai/gpt-5.4", JudgeConfig().prices)
    price = known_price(JudgeConfig(), "openai/gpt-5.4")
    assert reference is not None
    assert price is not None
    assert (price.input, price.output) == pytest.approx((reference.input, reference.output))
    assert price.cached_input is not None
    assert price.cached_input < price.input
    assert price_of(price, 300_000, 0, 1) > price_of(reference, 300_000, 0, 1)
    # Whoever says anything else is taken at his word.
    for own in (Price(input=2.5, output=14.0), Price(input=2.5, cached_input=2.5, output=15.0)):
        assert known_price(JudgeConfig(prices={"gpt-5.4": own}), "openai/gpt-5.4") == own


@pytest.mark.parametrize("model", ["openai/nobody-knows", "hosted_vllm/own", "gemini/gemini-3-pro-preview"])
def test_a_model_that_is_not_listed_or_listed_as_free_has_no_known_price(model: str) -> None:
    assert known_price(JudgeConfig(), model) is None


def test_a_service_tier_has_its_own_price() -> None:
    price = known_price(JudgeConfig(prices={}, extra_body={"service_tier": "flex"}), "openai/gpt-5.4")
    assert price is not None
    assert (price.input, price.output) == pytest.approx((1.25, 7.5))


TEXTS = {
    "chinese": "评分标准：是否完成了任务。",
    "rare": "𠮷𡈽齉龘",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "digits": "31415926535897932384626433832795",
    "thai": "ประเมินผลการทำงานของตัวแทน",
    "code": "print(apis.venmo.show_transactions(page_index=0))\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_no_tokenizer_makes_more_tokens_than_a_lease_holds(text: str) -> None:
    """A byte-level tokenizer without any merge, the worst there is, makes one token of each byte."""
    messages = (message(text * 50), message(text))
    most = most_of(None, messages, 100, {})
    assert most.input_tokens >= 51 * len(text.encode())
    assert (most.output_tokens, most.dollars) == (100, 0.0)


def test_a_lone_surrogate_has_a_length() -> None:
    assert most_of(None, (message("\ud800"),), 1, {}).input_tokens > 0


def test_what_is_sent_beside_the_messages_counts() -> None:
    plain = most_of(None, (message("a"),), 1, {})
    assert most_of(None, (message("a"),), 1, {"schema": "x" * 1000}).input_tokens >= plain.input_tokens + 1000


PRICE = Price(
    input=2.0,
    cached_input=0.2,
    cache_write=2.5,
    output=10.0,
    tiers=(PriceTier(above=5_000, input=4.0, output=15.0), PriceTier(above=50_000, input=1.0, output=1.0)),
)


def test_no_reply_costs_more_than_the_most() -> None:
    dice = random.Random(0)
    for _ in range(2_000):
        text = "a" * dice.randint(0, 60_000)
        limit = dice.randint(1, 3_000)
        most = most_of(PRICE, (message(text),), limit, {})
        prompt = dice.randint(1, most.input_tokens)
        cached = dice.randint(0, prompt)
        written = dice.randint(0, prompt - cached)
        dollars = price_of(PRICE, prompt, cached, dice.randint(0, limit), written)
        assert 0 <= dollars <= most.dollars + 1e-12

"""What a request may cost at most, and where prices come from."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price, PriceTier
from draco_ray.errors import ConfigError
from draco_ray.judging.pricing import (
    CREDIBLE_MORE,
    CREDIBLE_TIMES,
    MESSAGE_TOKENS,
    REQUEST_TOKENS,
    CostBound,
    TokenUsage,
    bound_request_cost,
    check_budget,
    find_price,
    known_price,
    read_usage,
    reply_cost,
    reported_cost,
)
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
    assert reply_cost(price, 300_000, 0, 1) > reply_cost(reference, 300_000, 0, 1)
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


def test_a_reference_price_is_not_that_of_another_tier() -> None:
    usual = known_price(JudgeConfig(), "openai/gpt-5.4")
    assert usual is not None
    for tier, factor in (("priority", 2.0), ("flex", 0.5)):
        price = known_price(JudgeConfig.model_validate({"service_tier": tier}), "openai/gpt-5.4")
        assert price is not None
        assert (price.input, price.output) == pytest.approx((factor * usual.input, factor * usual.output))
    # Listed, but not under the tier that is asked for.
    assert known_price(JudgeConfig(), "anthropic/claude-sonnet-4-5") is not None
    assert known_price(JudgeConfig(service_tier="priority"), "anthropic/claude-sonnet-4-5") is None


def test_prices_that_stand_in_a_list_by_length_are_tiers() -> None:
    price = known_price(JudgeConfig(), "dashscope/qwen3-max")
    assert price is not None
    assert (price.input, price.output) == pytest.approx((1.2, 6.0))
    tiers = [(tier.above, tier.input, tier.output) for tier in price.tiers]
    assert tiers == [(32_000, pytest.approx(2.4), pytest.approx(12.0)), (128_000, pytest.approx(3.0), 15.0)]


def test_a_token_that_was_thought_may_be_the_dearer_one() -> None:
    price = known_price(JudgeConfig(), "dashscope/qwen-plus-latest")
    assert price is not None
    assert (price.output, price.tiers[0].output) == pytest.approx((4.0, 12.0))


def test_what_litellm_lists_is_read_to_the_last_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds are numbers; what a tier does not say is as below it; what costs nothing costs that."""
    listed = {
        "input_cost_per_token": 1e-6,
        "cache_read_input_token_cost": 0,
        "output_cost_per_token": 3e-6,
        "input_cost_per_token_above_1000k_tokens": 4e-6,
        "input_cost_per_token_above_200k_tokens": 2e-6,
        "output_cost_per_token_above_200k_tokens": 5e-6,
    }
    table = SimpleNamespace(
        model_cost={"key": listed, "half": {"input_cost_per_token": 1e-6}, "free": {"output_cost_per_token": 1e-6}},
        get_model_info=lambda model: {"key": model},
    )
    monkeypatch.setattr("draco_ray.judging.tokens.import_litellm_quietly", lambda: table)
    judge = JudgeConfig(prices={})
    price = known_price(judge, "key")
    assert price is not None
    assert (price.input, price.cached_input, price.cache_write, price.output) == (1.0, 0.0, None, 3.0)
    assert [(tier.above, tier.input, tier.cached_input, tier.output) for tier in price.tiers] == [
        (200_000, pytest.approx(2.0), 0.0, pytest.approx(5.0)),
        (1_000_000, pytest.approx(4.0), 0.0, 3.0),
    ]
    assert known_price(judge, "half") is known_price(judge, "free") is known_price(judge, "nobody") is None


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
    most = bound_request_cost(None, messages, 100, {})
    assert most.input_tokens >= 51 * len(text.encode())
    assert (most.output_tokens, most.dollars) == (100, 0.0)


def test_a_lone_surrogate_has_a_length() -> None:
    most = bound_request_cost(None, (message("\ud800"), message("a\u00e4")), 7, {"a": 1})
    assert most == CostBound(
        input_tokens=3 + 3 + 2 * MESSAGE_TOKENS + len('{"a": 1}') + REQUEST_TOKENS, output_tokens=7, dollars=0.0
    )


def test_what_is_sent_beside_the_messages_counts() -> None:
    plain = bound_request_cost(None, (message("a"),), 1, {})
    assert (
        bound_request_cost(None, (message("a"),), 1, {"schema": "x" * 1000}).input_tokens >= plain.input_tokens + 1000
    )


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
        most = bound_request_cost(PRICE, (message(text),), limit, {})
        prompt = dice.randint(1, most.input_tokens)
        cached = dice.randint(0, prompt)
        written = dice.randint(0, prompt - cached)
        dollars = reply_cost(PRICE, prompt, cached, dice.randint(0, limit), written)
        assert 0 <= dollars <= most.dollars + 1e-12


@pytest.mark.parametrize(
    ("tokens", "dollars"),
    [
        ((1_000_000, 0, 0, 0), 1.0),
        ((5_000, 0, 0, 0), 0.010),
        ((5_001, 0, 0, 0), 0.020_004),
        ((50_000, 0, 0, 0), 0.2),
        ((4_000, 1_000, 100, 0), (3_000 * 2.0 + 1_000 * 0.2 + 100 * 10.0) / 1e6),
        ((4_000, 1_000, 100, 500), (2_500 * 2.0 + 1_000 * 0.2 + 500 * 2.5 + 100 * 10.0) / 1e6),
        # A tier that says nothing of the cache takes its input's price.
        ((6_000, 1_000, 100, 500), (6_000 * 4.0 + 100 * 15.0) / 1e6),
    ],
)
def test_the_highest_tier_that_the_input_exceeds_holds_for_the_whole_reply(
    tokens: tuple[int, int, int, int], dollars: float
) -> None:
    assert reply_cost(PRICE, *tokens) == pytest.approx(dollars, rel=1e-9)
    if not tokens[3]:
        assert reply_cost(PRICE, *tokens[:3]) == reply_cost(PRICE, *tokens)


def test_the_most_is_exact_where_nothing_is_open() -> None:
    def most(price: Price, size: int) -> float:
        return bound_request_cost(price, (message("a" * (size - REQUEST_TOKENS - MESSAGE_TOKENS)),), 100, {}).dollars

    flat = Price(input=2.0, output=10.0)
    assert most(flat, 4_000) == pytest.approx((4_000 * 2.0 + 100 * 10.0) / 1e6, rel=1e-9)
    assert most(Price(input=0.1, output=0.2), 4_000) == pytest.approx((4_000 * 0.1 + 100 * 0.2) / 1e6, rel=1e-9)
    assert bound_request_cost(flat, (message("a"),), 100, {}).output_tokens == 100
    # Whichever way of paying is the dearest: writing to the cache here, reading from it there.
    assert most(PRICE, 5_000) == pytest.approx((5_000 * 2.5 + 100 * 10.0) / 1e6)
    odd = flat.model_copy(update={"cached_input": 3.0})
    assert most(odd, 4_000) == pytest.approx((4_000 * 3.0 + 100 * 10.0) / 1e6)
    assert most(PRICE, 5_001) == pytest.approx((5_001 * 4.0 + 100 * 15.0) / 1e6)
    # Fewer tokens than bytes may leave a reply in a dearer tier below.
    assert most(PRICE, 50_001) == pytest.approx((50_001 * 4.0 + 100 * 15.0) / 1e6)


def test_a_budget_wants_a_price_and_says_how_to_give_one() -> None:
    judge = JudgeConfig(prices={}, limits=JudgeLimits(dollars=2.5))
    with pytest.raises(ConfigError) as problem:
        check_budget(judge, "openai/org/nobody-knows")
    assert str(problem.value) == (
        "judge.limits.dollars=2.5: the price of openai/org/nobody-knows is unknown; set it, in dollars per million "
        "tokens, as judge.prices={nobody-knows: {input: 2.5, output: 15.0}}"
    )


@pytest.mark.parametrize(
    "said", [{"n": 5}, {"max_tokens": 400_000}, {"max_completion_tokens": 9}, {"model": "gpt-5-pro"}, {"models": ["x"]}]
)
def test_under_a_budget_nothing_else_says_what_a_call_may_cost(said: dict[str, object]) -> None:
    judge = JudgeConfig(extra_body={"think": True, **said}, limits=JudgeLimits(dollars=2.5))
    with pytest.raises(ConfigError, match=rf"^judge\.limits\.dollars=2\.5: judge\.extra_body's {next(iter(said))} "):
        check_budget(judge, judge.model)
    check_budget(judge.model_copy(update={"extra_body": {"think": True}}), judge.model)


def test_without_a_budget_no_price_is_wanted() -> None:
    check_budget(JudgeConfig(prices={}, extra_body={"n": 5}), "openai/org/nobody-knows")


def test_a_price_of_the_full_name_goes_before_one_of_its_last_part() -> None:
    full, short = Price(input=1.0, output=1.0), Price(input=2.0, output=2.0)
    prices = {"a/b/model": full, "model": short}
    assert find_price("a/b/model", prices) == full
    assert find_price("c/d/model", prices) == find_price("c/model", prices) == find_price("model", prices) == short
    assert find_price("a/b", prices) is find_price("nobody", prices) is None


# --- what a reply says it took ----------------------------------------------------------------------------------------

MOST = CostBound(input_tokens=1_000, output_tokens=100, dollars=0.0)


def reply(content: str = "yes", **usage: Any) -> SimpleNamespace:
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        if name in usage:
            usage[name] = SimpleNamespace(**usage[name])
    choice = SimpleNamespace(message=SimpleNamespace(content=content))
    return SimpleNamespace(usage=SimpleNamespace(**usage), choices=[choice])


def used(**usage: Any) -> tuple[int, ...] | None:
    found = read_usage(reply(**usage), MOST)
    # Input, cached, written, output, reasoning.
    return None if found is None else dataclasses.astuple(found)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5}, (10, 0, 0, 5, 0)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 40}, (10, 0, 0, 30, 0)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 12}, (10, 0, 0, 5, 0)),
        (
            {"prompt_tokens": 10, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}},
            (10, 0, 0, 5, 3),
        ),
        (
            {"prompt_tokens": 10, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 9}},
            (10, 0, 0, 9, 9),
        ),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 6, "cache_creation_tokens": 2},
            },
            (10, 6, 2, 5, 0),
        ),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 6, "cache_creation_tokens": 4},
            },
            (10, 6, 4, 5, 0),
        ),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 30},
                "cache_creation_input_tokens": 7,
            },
            None,
        ),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 6},
                "cache_creation_input_tokens": 7,
            },
            None,
        ),
        ({"prompt_tokens": 0, "completion_tokens": 5}, None),
        ({"prompt_tokens": 3, "completion_tokens": 1}, (3, 0, 0, 1, 0)),
        ({"prompt_tokens": 2, "completion_tokens": 1}, None),
        ({"prompt_tokens": 10, "completion_tokens": 0}, None),
        ({"prompt_tokens": 10, "completion_tokens": 0, "content": ""}, (10, 0, 0, 0, 0)),
        ({"prompt_tokens": 10.0, "completion_tokens": 5}, None),
        ({"prompt_tokens": True, "completion_tokens": 5}, None),
        ({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": -1}, None),
        ({}, None),
    ],
)
def test_what_a_reply_says_it_took(usage: dict[str, Any], counts: tuple[int, ...] | None) -> None:
    assert used(**usage) == counts


def test_fewer_tokens_than_the_longest_ones_would_make_are_not_true() -> None:
    """A budget of dollars would not be kept where an endpoint says 1 and 1 of whatever it read and wrote."""
    most = CostBound(input_tokens=20_000 + REQUEST_TOKENS, output_tokens=9_000, dollars=0.0)
    for written, prompt, completion, true in (
        ("w" * 6_400, 156, 50, True),
        ("w" * 6_400, 155, 50, False),
        ("w" * 6_400, 156, 49, False),
        ("\u8bc4" * 3_200, 156, 74, False),
        ("", 156, 0, True),
    ):
        found = read_usage(reply(written, prompt_tokens=prompt, completion_tokens=completion), most)
        assert (found is not None) is true, (written[:1], prompt, completion)


@pytest.mark.parametrize(
    "besides",
    [
        {"reasoning_content": "t" * 6_400},
        {"refusal": "r" * 6_400},
        {"tool_calls": [SimpleNamespace(function=SimpleNamespace(name="f", arguments="a" * 6_400))]},
    ],
    ids=["thought", "refused", "called a tool"],
)
def test_what_is_no_answer_was_written_as_well(besides: dict[str, Any]) -> None:
    most = CostBound(input_tokens=20_000 + REQUEST_TOKENS, output_tokens=9_000, dollars=0.0)
    for completion, true in ((0, False), (49, False), (50, True)):
        said = reply("", prompt_tokens=156, completion_tokens=completion)
        vars(said.choices[0].message).update(besides)
        assert (read_usage(said, most) is not None) is true, completion


def test_even_of_the_shortest_prompt_something_was_read() -> None:
    most = CostBound(input_tokens=REQUEST_TOKENS + 100, output_tokens=100, dollars=0.0)
    found = [read_usage(reply(prompt_tokens=read, completion_tokens=5), most) for read in (0, 1)]
    assert [usage is not None for usage in found] == [False, True]


def test_a_usage_is_credible_up_to_a_bound() -> None:
    highest = CREDIBLE_TIMES * MOST.input_tokens + CREDIBLE_MORE
    assert used(prompt_tokens=highest, completion_tokens=5) == (highest, 0, 0, 5, 0)
    assert used(prompt_tokens=highest + 1, completion_tokens=5) is None
    highest = CREDIBLE_TIMES * MOST.output_tokens + CREDIBLE_MORE
    assert used(prompt_tokens=10, completion_tokens=highest) == (10, 0, 0, highest, 0)
    assert used(prompt_tokens=10, completion_tokens=highest + 1) is None


def test_a_reply_without_choices_or_usage_says_nothing_that_breaks() -> None:
    assert read_usage(SimpleNamespace(), MOST) is None
    bare = SimpleNamespace(usage=SimpleNamespace(prompt_tokens=3, completion_tokens=0), choices=None)
    assert read_usage(bare, MOST) == TokenUsage(
        input_tokens=3, cached_tokens=0, written_tokens=0, output_tokens=0, reasoning_tokens=0
    )
    bare.choices = [SimpleNamespace(message=None)]
    assert read_usage(bare, MOST) is not None
    # Nothing was said, in however many choices: no tokens of output are true.
    bare.choices = 2 * [SimpleNamespace(message=SimpleNamespace(content=""))]
    assert read_usage(bare, MOST) is not None


@pytest.mark.parametrize(
    ("cost", "read"),
    [(0.25, 0.25), (2, 2.0), (0, None), (-1.0, None), (float("nan"), None), (float("inf"), None), ("1", None)],
)
def test_litellms_own_figure_counts_where_it_is_one(cost: object, read: float | None) -> None:
    assert reported_cost(SimpleNamespace(_hidden_params={"response_cost": cost})) == read


def test_no_figure_is_none() -> None:
    for response in (SimpleNamespace(), SimpleNamespace(_hidden_params=None), SimpleNamespace(_hidden_params={})):
        assert reported_cost(response) is None

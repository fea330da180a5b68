"""The maximum cost of a judge request, the actual cost of a reply, and the prices of models.

The price of a model is the one in ``judge.prices``, or LiteLLM's if none is configured (exceptions: `known_price`). If
a reply states no usage, or an implausible one, the maximum cost of the request is booked. So the budget holds,
whatever usage an endpoint reports.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.config.schema import FILES_PREFIX, JudgeConfig, Price, TokenPrices
from draco_ray.errors import ConfigError
from draco_ray.judging.tokens import litellm_model_info
from draco_ray.records import Message

REQUEST_TOKENS = 512
"""Allowance for tokens of the chat template and of a system prompt that an endpoint adds."""
MESSAGE_TOKENS = 16
CREDIBLE_TIMES, CREDIBLE_MORE = 4, 10_000
"""Plausible usage is at most this factor times the expected maximum, plus this many tokens: some endpoints add a
prompt, and some do not count reasoning towards ``max_tokens``."""
LONGEST_TOKEN_BYTES = 128
"""Length of the longest token in common vocabularies, a run of spaces. Usage is implausible if it states fewer tokens
than one per this many bytes of text."""
OTHERS_SAY = ("model", "models", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
"""Keys that ``judge.extra_body`` must not contain under a budget: they change the price or the length of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of one reply."""

    input_tokens: int
    cached_tokens: int = 0
    """The part of the input that was read from the provider's prompt cache."""
    written_tokens: int = 0
    """The part of the input that was written to the provider's prompt cache."""
    output_tokens: int
    """Tokens of the reply, reasoning included."""
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBound:
    """Upper bounds on the tokens and the cost of one request."""

    input_tokens: int
    output_tokens: int
    dollars: float = 0.0
    """Maximum cost in dollars; 0 if the price is unknown."""


def find_price(model: str, prices: Mapping[str, Price]) -> Price | None:
    """The configured price of ``model``: by its full name, else by its name without provider and organisation."""
    return prices.get(model) or prices.get(model.rpartition("/")[2])


def known_price(judge: JudgeConfig, model: str) -> Price | None:
    """The configured price of ``model``, or LiteLLM's if none is configured; None if there is neither.

    If both exist, LiteLLM's price is used in two cases. One is the service tier ``flex`` or ``priority``, since the
    configured price is for the standard tier. The other is a configured price that states the same input and output
    prices as LiteLLM's and nothing else: LiteLLM's price may also cover cached input and long prompts.
    """
    if model.startswith(FILES_PREFIX):
        return Price(input=0.0, output=0.0)
    sent = judge.extra_body if judge.service_tier is None else {"service_tier": judge.service_tier}
    configured, listed = find_price(model, judge.prices), _litellm_price(model, sent)
    if configured is None or listed is None:
        return configured or listed
    # A configured price is for the standard tier.
    other_tier = sent.get("service_tier") in ("flex", "priority")
    return listed if other_tier or _says_more(listed, configured) else configured


def _says_more(listed: Price, configured: Price) -> bool:
    same = math.isclose(listed.input, configured.input) and math.isclose(listed.output, configured.output)
    return same and configured == Price(input=configured.input, output=configured.output)


def check_budget(judge: JudgeConfig, model: str) -> None:
    """Check that a budget in dollars can be enforced.

    Raises:
        ConfigError: there is a budget but no price of ``model``, or ``judge.extra_body`` changes the model or the
            length of replies: the maximum cost of a call is then unknown.
    """
    dollars = judge.limits.dollars
    if dollars is not None and (said := [name for name in OTHERS_SAY if name in judge.extra_body]):
        raise ConfigError(
            f"judge.limits.dollars={dollars:g}: judge.extra_body's {', '.join(said)} would change the cost of a call; "
            "use judge.model, judge.max_tokens and judge.score_votes instead"
        )
    if dollars is not None and known_price(judge, model) is None:
        name = model.rpartition("/")[2]
        raise ConfigError(
            f"judge.limits.dollars={dollars:g}: the price of {model} is unknown; set it, in dollars per million "
            f"tokens, as judge.prices={{{name}: {{input: 2.5, output: 15.0}}}}"
        )


def reply_cost(
    price: Price, input_tokens: int, cached_tokens: int, output_tokens: int, written_tokens: int = 0
) -> float:
    """Dollars for one answer.

    Args:
        price: the model's price. The tier with the largest ``above`` that the input exceeds applies to all tokens.
        input_tokens: the whole input.
        cached_tokens: the part of the input at the cached price.
        output_tokens: including reasoning.
        written_tokens: the part of the input at the price of writing to the prompt cache.
    """
    rates = _rates(price, input_tokens)
    fresh = input_tokens - cached_tokens - written_tokens
    return (
        fresh * rates.input
        + cached_tokens * (rates.input if rates.cached_input is None else rates.cached_input)
        + written_tokens * (rates.input if rates.cache_write is None else rates.cache_write)
        + output_tokens * rates.output
    ) / 1e6


def bound_request_cost(
    price: Price | None, messages: Sequence[Message], max_tokens: int, sent: Mapping[str, Any]
) -> CostBound:
    """Upper bounds of a request.

    No tokenizer makes more tokens than there are bytes in UTF-8.

    Args:
        price: price of the model; None if unknown.
        messages: messages of the request.
        max_tokens: maximum length of the reply.
        sent: further arguments that the endpoint may count as input, such as a JSON schema.
    """
    text = sum(len(message.content.encode("utf-8", "surrogatepass")) + MESSAGE_TOKENS for message in messages)
    more = len(json.dumps(sent, default=str)) if sent else 0
    input_tokens = text + more + REQUEST_TOKENS
    if price is None:
        return CostBound(input_tokens=input_tokens, output_tokens=max_tokens)
    rates: list[TokenPrices] = [price, *(tier for tier in price.tiers if tier.above < input_tokens)]
    # The provider decides how much of the input is cached, or written to the cache.
    inputs = [max(rate.input, rate.cached_input or 0.0, rate.cache_write or 0.0) for rate in rates]
    dollars = max(
        (input_tokens * dearest + max_tokens * rate.output) / 1e6 for dearest, rate in zip(inputs, rates, strict=True)
    )
    return CostBound(input_tokens=input_tokens, output_tokens=max_tokens, dollars=dollars)


def read_usage(response: Any, most: CostBound) -> TokenUsage | None:
    """The usage that a reply states; None if it states none, or an implausible one.

    Args:
        response: the response object of LiteLLM.
        most: upper bounds of the request.
    """
    usage = getattr(response, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    thought = getattr(usage, "completion_tokens_details", None)
    input_tokens, output_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    total, reasoning = _count(usage, "total_tokens"), _count(thought, "reasoning_tokens")
    cached = _count(details, "cached_tokens")
    written = _count(details, "cache_creation_tokens") or _count(usage, "cache_creation_input_tokens")
    counts = (input_tokens, output_tokens, total, reasoning, cached, written)
    if None in counts:
        return None
    input_tokens, output_tokens, total, reasoning, cached, written = (count or 0 for count in counts)
    # Some endpoints count reasoning in the total only.
    output_tokens = max(output_tokens, total - input_tokens, reasoning)
    said = "".join(_written(choice.message) for choice in getattr(response, "choices", None) or ())
    least = (most.input_tokens - REQUEST_TOKENS, len(said.encode("utf-8", "surrogatepass")))
    if input_tokens == 0 or (said and output_tokens == 0) or cached + written > input_tokens:
        return None
    if any(
        count < size // LONGEST_TOKEN_BYTES for count, size in zip((input_tokens, output_tokens), least, strict=True)
    ):
        return None
    for count, expected in ((input_tokens, most.input_tokens), (output_tokens, most.output_tokens)):
        if count > CREDIBLE_TIMES * expected + CREDIBLE_MORE:
            return None
    return TokenUsage(
        input_tokens=input_tokens,
        cached_tokens=cached,
        written_tokens=written,
        output_tokens=output_tokens,
        reasoning_tokens=min(reasoning, output_tokens),
    )


def reported_cost(response: Any) -> float | None:
    """LiteLLM's cost of a reply, in dollars; None if there is none.

    It includes service tiers and the like; for OpenRouter it is the cost that OpenRouter states, if any.
    """
    cost = (getattr(response, "_hidden_params", None) or {}).get("response_cost")
    return float(cost) if isinstance(cost, int | float) and math.isfinite(cost) and cost > 0 else None


def _written(message: Any) -> str:
    """All output text of a message, including reasoning and tool calls."""
    calls = (getattr(call, "function", None) for call in getattr(message, "tool_calls", None) or ())
    parts = [getattr(message, name, None) for name in ("content", "reasoning_content", "refusal")]
    return "".join(
        part for part in (*parts, *(getattr(call, "arguments", None) for call in calls)) if isinstance(part, str)
    )


def _count(holder: Any, name: str) -> int | None:
    """A number of tokens; 0 if missing, None if invalid."""
    value = getattr(holder, name, None)
    if value is None:
        return 0
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _rates(price: Price, input_tokens: int) -> TokenPrices:
    tiers = [tier for tier in price.tiers if tier.above < input_tokens]
    return max(tiers, key=lambda tier: tier.above) if tiers else price


def _litellm_price(model: str, extra_body: Mapping[str, object]) -> Price | None:
    listed = litellm_model_info(model)
    tier = extra_body.get("service_tier")
    if tier == "priority" and "input_cost_per_token_priority" not in listed:
        return None

    def per_million(table: Mapping[str, Any], name: str) -> float | None:
        value = table.get(f"{name}_{tier}") or table.get(name)
        return float(value) * 1e6 if isinstance(value, int | float) and value >= 0 else None

    def rates(table: Mapping[str, Any], suffix: str = "") -> dict[str, float | None]:
        names = {
            "input": "input_cost_per_token",
            "cached_input": "cache_read_input_token_cost",
            "cache_write": "cache_creation_input_token_cost",
            "output": "output_cost_per_token",
        }
        found = {field: per_million(table, f"{name}{suffix}") for field, name in names.items()}
        # Some providers charge more for reasoning tokens.
        thought = per_million(table, f"output_cost_per_reasoning_token{suffix}")
        if found["output"] is not None and thought is not None:
            found["output"] = max(found["output"], thought)
        return found

    # LiteLLM states prices for long inputs in a list, or under keys that contain the length.
    by_length = listed.get("tiered_pricing") or [listed]
    base = rates(by_length[0])
    # LiteLLM lists models with unknown prices as free.
    if not base["input"] or base["output"] is None:
        return None
    thresholds = {
        match[1] for name in listed if (match := re.fullmatch(r"input_cost_per_token_above_(\d+)k_tokens", name))
    }
    tiers = [
        {"above": int(threshold) * 1000} | _filled(rates(listed, f"_above_{threshold}k_tokens"), base)
        for threshold in sorted(thresholds, key=int)
    ]
    tiers += [{"above": int(part["range"][0])} | _filled(rates(part), base) for part in by_length[1:]]
    return Price.model_validate(base | {"tiers": tiers})


def _filled(rates: Mapping[str, float | None], base: Mapping[str, float | None]) -> dict[str, float | None]:
    return {field: base[field] if rate is None else rate for field, rate in rates.items()}

"""Token estimates, parameters that models refuse, and LiteLLM's table of model limits, read without network access.

Tokens are estimated from the length in bytes, at first as one per three bytes. The rate is learned from the usage that
providers report.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from draco_ray.config.schema import FILES, RULES


def import_litellm_quietly() -> Any:
    """Import LiteLLM, which takes seconds, without its downloads of a price list and of Anthropic's headers."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"):
        os.environ.setdefault(name, "True")
    import litellm

    # Setting a level is slow: it clears the caches of all loggers.
    if "LITELLM_LOG" not in os.environ and litellm.verbose_logger.level != logging.CRITICAL:
        # Errors are also raised, and reported in our own words.
        litellm.verbose_logger.setLevel(logging.CRITICAL)
    # LiteLLM would ask huggingface.co for a model's context length.
    litellm.utils._get_max_position_embeddings = lambda model_name: None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def refused_parameters(model: str, api_base: str | None, **parameters: Any) -> str | None:
    """Why LiteLLM would refuse a request with these parameters; None if it would not, or does not know the model.

    Args:
        model: LiteLLM's name of the model, provider prefix included.
        api_base: endpoint; None: the provider's own.
        parameters: the parameters of the request.
    """
    litellm = import_litellm_quietly()
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
        litellm.utils.get_optional_params(model=name, custom_llm_provider=provider, **parameters)
    except litellm.UnsupportedParamsError as error:
        return str(error)
    except litellm.BadRequestError:
        return None  # The request itself will fail with this error.
    return None


def model_limit(model: str, kind: Literal["max_input_tokens", "max_output_tokens"]) -> int | None:
    """A limit of an API model, in tokens; None for a model that the table does not have.

    Args:
        model: LiteLLM's name of the model, provider prefix included.
        kind: limit of prompts or of replies.
    """
    known = litellm_model_info(model).get(kind)
    return known if isinstance(known, int) and known > 0 else None


def litellm_model_info(model: str) -> Mapping[str, Any]:
    """The row of LiteLLM's price table for a model; empty for a model that is not listed.

    The file is read without LiteLLM, whose import takes seconds and is only needed for names that it rewrites.
    """
    if model == RULES or model.startswith(FILES):
        return {}
    if os.environ.get("LITELLM_LOCAL_MODEL_COST_MAP", "True").lower() == "true":
        table = _table()
        provider, _, name = model.partition("/")
        if (row := table.get(model)) or (
            (row := table.get(name)) and str(row.get("litellm_provider")).startswith(provider)
        ):
            return row
    litellm = import_litellm_quietly()
    try:
        key = litellm.get_model_info(model)["key"]
    except Exception:  # LiteLLM raises a plain Exception for an unknown model.
        return {}
    listed: Mapping[str, Any] = litellm.model_cost.get(key, {})
    return listed


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    spec = importlib.util.find_spec("litellm")
    folder = Path(spec.origin or "").parent if spec else Path()
    file = folder / "model_prices_and_context_window_backup.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


BYTES_PER_TOKEN = 3
"""Bytes per token assumed before a provider reports usage: fewer than is usual for English, Chinese or JSON, but more
than for hexadecimal digits and base64."""
MAX_BYTES_PER_TOKEN = 16
"""Largest plausible number of bytes per token: a provider that reports fewer tokens has not counted the prompt."""
MARGIN = 1.05
"""Safety factor on the reported rate, because texts differ."""
LEARNED_BYTES = 20_000
"""A text of this length or more sets the rate at once; a shorter one changes it in proportion."""
SHORTER = (0.9, 0.75, 0.7, 0.6, 0.6, 0.5)
"""Largest fraction that each further attempt keeps of a too long prompt: 9 % after six attempts."""
CLOSE = 2.5
"""A number in an error counts the prompt's tokens if it differs from the estimate by less than this factor."""
_TOO_LONG = re.compile(r"context[ _](length|window|size|limit)|too long|(request|entity|payload|input) too large", re.I)
_NUMBER = re.compile(r"(?<![\w.:=-])\d[\d,]{2,12}(?![\w:-])")


def update_tokens_per_byte(rate: float, size: int, tokens: int) -> float:
    """Tokens per byte after a provider reported ``tokens`` for a text; ``rate`` if that number is implausible.

    Args:
        rate: tokens per byte so far.
        size: length of the text in bytes.
        tokens: number that the provider reported.
    """
    if not size / MAX_BYTES_PER_TOKEN <= tokens < size:
        return rate
    ratio = MARGIN * tokens / (size * rate)
    # Keep the rate between 0.2 tokens per byte (easy prose) and 1.
    return min(max(rate * ratio ** min(1.0, size / LEARNED_BYTES), 0.2), 1.0)


def is_too_long(error: str, estimate: float) -> bool:
    """Whether an error says that a prompt of about ``estimate`` tokens is too long.

    LiteLLM names the errors of most providers. Others are recognised by the usual words, or by two numbers: a count
    close to the estimate, and a limit below it.
    """
    named = "ContextWindowExceededError" in error or _TOO_LONG.search(error) is not None
    # An error about the length of the reply names its parameter.
    return named or (estimate > 1000 and "max_" not in error and _stated(error, estimate) < 1)


def part_to_keep(error: str, estimate: float, tries: int) -> float:
    """The fraction to keep of a prompt that was too long, 0 to 1.

    Args:
        error: the provider's error.
        estimate: estimated tokens of the prompt.
        tries: how often the prompt was shortened before.
    """
    return min(0.97 * _stated(error, estimate), SHORTER[tries])


def _stated(error: str, estimate: float) -> float:
    """The limit that an error states, as a fraction of the stated count; 1 if it does not state both."""
    stated = {int(each.replace(",", "")) for each in _NUMBER.findall(error)}
    # Some providers state prompt, reply and their sum; ignore the sum.
    numbers = sorted(stated - {sum(pair) for pair in itertools.combinations(stated, 2)})
    counts = [each for each in numbers if estimate / CLOSE < each < estimate * CLOSE]
    limits = [each for each in numbers if counts and counts[-1] / 10 < each < counts[-1]]
    return limits[-1] / counts[-1] if limits else 1.0

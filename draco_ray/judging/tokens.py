"""How many tokens a text takes: counted by the model's tokenizer where LiteLLM ships it, else estimated.

The estimate counts characters by their width in UTF-8, a rough measure of script: 1 byte (ASCII), 2 (Cyrillic, Greek,
Arabic), 3 (Chinese, Japanese, Korean, Indic), 4 (emoji). It starts at one token for three bytes, and learns the rate of
each width from what a provider reports.

Also LiteLLM's table of models' limits, read without network access.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draco_ray.config.schema import FILES, RULES


def quiet_litellm() -> Any:
    """Import LiteLLM: it takes seconds, and would fetch its price list and Anthropic's headers unless told not to."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"):
        os.environ.setdefault(name, "True")
    import litellm

    if "LITELLM_LOG" not in os.environ:
        # What goes wrong is raised as well, and said in our words.
        litellm.verbose_logger.setLevel(logging.CRITICAL)
    # It would ask huggingface.co how much a model reads.
    litellm.utils._get_max_position_embeddings = lambda model_name: None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


@functools.cache
def refuses_temperature(model: str, api_base: str | None, temperature: float) -> bool:
    """Whether LiteLLM knows a model to take no such temperature; told to, it leaves it out without a word.

    Args:
        model: LiteLLM's name of it, provider prefix included.
        api_base: endpoint; None: the provider's own.
        temperature: that would be sent.
    """
    litellm = quiet_litellm()
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
        litellm.utils.get_optional_params(model=name, custom_llm_provider=provider, temperature=temperature)
    except litellm.UnsupportedParamsError:
        return True
    except litellm.BadRequestError:
        return False  # It does not know the provider; the request will say so.
    return False


def model_limit(model: str, kind: Literal["max_input_tokens", "max_output_tokens"]) -> int | None:
    """A limit of an API model, tokens; None for a model that the table does not have.

    Args:
        model: LiteLLM's name of it, provider prefix included.
        kind: of prompts or of replies.
    """
    known = listed_model(model).get(kind)
    return known if isinstance(known, int) and known > 0 else None


def listed_model(model: str) -> Mapping[str, Any]:
    """The row of LiteLLM's price table for a model; empty for one that it does not have.

    The file is read without importing LiteLLM, which takes seconds, and is only needed for names that it rewrites.
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
    litellm = quiet_litellm()
    try:
        key = litellm.get_model_info(model)["key"]
    except Exception:  # It raises a plain one for a model it does not know.
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
"""Fewer than tokenizers take of English, Chinese or JSON; hexadecimal digits and base64 take fewer still."""
MOST_BYTES_PER_TOKEN = 16
"""A provider that reports fewer tokens has not counted the prompt."""
MARGIN = 1.05
"""By which a learned rate is higher than what was reported: texts differ."""
WIDTHS_4 = np.array((1, 2, 3, 4))
LEARNED_CHARACTERS = 20_000
"""A text of this length or more teaches its rate at once, a shorter one in proportion."""
SHORTER = (0.9, 0.75, 0.7, 0.6, 0.6, 0.5)
"""The most that each further try keeps of a prompt that was too long: 9 % after six of them."""
CLOSE = 2.5
"""A number in an error counts the prompt's tokens if it differs from the estimate by less than this factor."""
_TOO_LONG = re.compile(r"context[ _](length|window|size|limit)|too long|(request|entity|payload|input) too large", re.I)
_NUMBER = re.compile(r"(?<![\w.:=-])\d[\d,]{2,12}(?![\w:-])")


@dataclass(frozen=True, slots=True)
class TokenEstimate:
    """Tokens of a text by its characters."""

    rates: tuple[float, ...] = tuple((WIDTHS_4 / BYTES_PER_TOKEN).tolist())
    """Tokens of a character of 1, 2, 3 and 4 bytes."""

    def tokens(self, text: str) -> float:
        """The estimate for ``text``."""
        return float(np.dot(self.rates, _by_width(text)))

    def learned(self, text: str, tokens: int) -> TokenEstimate:
        """The estimate after a provider reported ``tokens`` for ``text``; the same where that cannot be a count of it.

        Each rate moves by its share of the text, so that Chinese does not change what is known of English.
        """
        width_4 = _by_width(text)
        size = float(np.dot(width_4, WIDTHS_4))
        if not size / MOST_BYTES_PER_TOKEN <= tokens < size:
            return self
        part_4 = np.multiply(self.rates, width_4)
        share_4 = part_4 / part_4.sum() * min(1.0, len(text) / LEARNED_CHARACTERS)
        new_4 = np.multiply(self.rates, (MARGIN * tokens / part_4.sum()) ** share_4)
        # From five bytes a token, of easy prose, to one.
        return replace(self, rates=tuple(np.clip(new_4, WIDTHS_4 / 5, WIDTHS_4).tolist()))


def _by_width(text: str) -> np.typing.NDArray[np.int64]:
    """Characters of 1, 2, 3 and 4 bytes in UTF-8; shape [4]."""
    if text.isascii():
        return np.array((len(text), 0, 0, 0))
    # The first four bits of a character's first byte say its width.
    first = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) >> 4
    counts = np.bincount(first, minlength=16)
    return np.array((counts[:8].sum(), counts[12] + counts[13], counts[14], counts[15]))


@functools.cache
def tokenizer(model: str) -> Callable[[str], int] | None:
    """What counts a model's tokens, from the files that come with LiteLLM; None where they hold no tokenizer of it.

    Args:
        model: LiteLLM's name of it, provider prefix included.
    """
    quiet_litellm()
    import tiktoken
    from litellm.litellm_core_utils.default_encoding import filename as shipped

    try:
        name = tiktoken.encoding_name_for_model(model.rsplit("/", 1)[-1])
    except KeyError:
        return None
    # Importing the above makes tiktoken read those files; it would download others.
    if name not in ("cl100k_base", "o200k_base") or os.environ.get("TIKTOKEN_CACHE_DIR") != shipped:
        return None
    encoding = tiktoken.get_encoding(name)
    # In pieces: the time that tiktoken takes for a run of equal characters grows with the square of its length.
    return lambda text: sum(len(each) for each in map(encoding.encode_ordinary, re.findall(r"(?s).{1,10000}", text)))


def is_too_long(error: str, estimate: float) -> bool:
    """Whether an error says that a prompt of about ``estimate`` tokens is too long.

    LiteLLM names the errors of most providers; of others two numbers tell, a count that may be the prompt's and a limit
    below it, or the usual words.
    """
    named = "ContextWindowExceededError" in error or _TOO_LONG.search(error) is not None
    # A reply that may be too long is named with its parameter.
    return named or (estimate > 1000 and "max_" not in error and _stated(error, estimate) < 1)


def part_to_keep(error: str, estimate: float, tries: int) -> float:
    """How much to keep of a prompt that was too long, 0 to 1.

    Args:
        error: what the provider said.
        estimate: tokens of the prompt.
        tries: how often it was shortened before.
    """
    return min(0.97 * _stated(error, estimate), SHORTER[tries])


def _stated(error: str, estimate: float) -> float:
    """The limit in an error as a part of the count beside it; 1 where it does not state both."""
    stated = {int(each.replace(",", "")) for each in _NUMBER.findall(error)}
    # Some add the reply to the prompt, and state all three.
    numbers = sorted(stated - {sum(pair) for pair in itertools.combinations(stated, 2)})
    counts = [each for each in numbers if estimate / CLOSE < each < estimate * CLOSE]
    limits = [each for each in numbers if counts and counts[-1] / 10 < each < counts[-1]]
    return limits[-1] / counts[-1] if limits else 1.0

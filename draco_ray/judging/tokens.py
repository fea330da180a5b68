"""How many tokens a text takes: counted by the model's tokenizer where LiteLLM ships it, else estimated.

The estimate counts characters by their width in UTF-8, a rough measure of script: 1 byte (ASCII), 2 (Cyrillic, Greek,
Arabic), 3 (Chinese, Japanese, Korean, Indic), 4 (emoji). It starts at one token for three bytes, and learns the rate of
each width from what a provider reports.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from draco_ray.judging.model_limits import quiet_litellm

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

"""Fit a question into the judge's context: estimate the prompt's tokens, and truncate it as far as necessary.

Tokens are estimated from the length in bytes, at first as one per three bytes. The rate is learned from the usage that
providers report.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging.judge_context import max_judge_prompt_tokens
from draco_ray.judging.phases import Question
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.shortening import LENGTHS, MAX_LEVEL
from draco_ray.records import Judged

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

ValueT = TypeVar("ValueT")

BYTES_PER_TOKEN = 3
"""Bytes per token assumed before a provider reports usage: fewer than is usual for English, Chinese or JSON, but more
than for hexadecimal digits and base64."""
MAX_BYTES_PER_TOKEN = 16
"""Largest plausible number of bytes per token: a provider that reports fewer tokens has not counted the prompt."""
MARGIN = 1.05
"""Safety factor on the reported rate, because texts differ."""
LEARNED_BYTES = 20_000
"""Length in bytes from which the reported usage of a single prompt replaces the rate. The shorter a prompt is, the less
its usage changes the rate."""
SHORTENING_FRACTIONS = (0.9, 0.75, 0.7, 0.6, 0.6, 0.5)
"""Largest fraction that each further attempt keeps of a too long prompt: 9 % after six attempts."""
MAX_COUNT_RATIO = 2.5
"""A number in an error message is taken for the prompt's number of tokens if it differs from the estimate by less than
this factor."""
_TOO_LONG = re.compile(r"context[ _](length|window|size|limit)|too long|(request|entity|payload|input) too large", re.I)
_NUMBER = re.compile(r"(?<![\w.:=-])\d[\d,]{2,12}(?![\w:-])")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt(Generic[ValueT]):
    """A question and its prompt, truncated to the judge's context."""

    question: Question[ValueT]
    whole: str
    """The prompt before it was truncated."""
    level: int = 0
    """How far the prompt was truncated (`draco_ray.judging.shortening`)."""
    prompt: str
    shown: Question[ValueT]
    """The truncated question."""

    @property
    def left_out(self) -> int:
        """Characters that were left out of the prompt."""
        return len(self.whole) - len(self.prompt)


class PromptFitter:
    """Fits prompts into the context of one judge; learns from its replies and from prompts that it refuses."""

    def __init__(self, config: JudgeConfig, prompts: Prompts, replies: ReplyCache | None = None) -> None:
        """``replies``: where the judge's replies are stored; None: nowhere."""
        self._config, self._prompts, self._replies = config, prompts, replies
        self.room = self._first_room = max_judge_prompt_tokens(config)
        """Maximum length of a prompt, in tokens; None if it is unknown."""
        self._rate = 1 / BYTES_PER_TOKEN
        """Tokens per byte."""

    @property
    def reads(self) -> str:
        """Phrase for messages: how many tokens the judge accepts."""
        return "fewer tokens" if self.room is None else f"about {self.room:,} tokens"

    async def too_long(self, question: Question[Any]) -> bool:
        """Whether a prompt exceeds the judge's known context, by a fixed estimate that a resumed run repeats."""
        if self._first_room is None:
            return False
        prompt = await asyncio.to_thread(question.prompt, self._prompts)
        return _bytes(prompt) > BYTES_PER_TOKEN * self._first_room

    async def fit(self, question: Question[ValueT]) -> FittedPrompt[ValueT]:
        """The longest version of a question that fits.

        Raises:
            ReplyError: it is too long even with every text truncated.
        """
        whole = await asyncio.to_thread(question.prompt, self._prompts)
        fitted = FittedPrompt(question=question, whole=whole, prompt=whole, shown=question)
        if self._replies is not None and _bytes(whole) > (self._first_room or 0):
            known = await self._replies.get(self._key(whole))
            if known is not None and isinstance(level := known.get("level"), int) and 0 <= level <= MAX_LEVEL:
                return await asyncio.to_thread(self._at, fitted, level)
        if self.room is None or _bytes(whole) <= self.room:
            return fitted
        return await asyncio.to_thread(self._cut, fitted, self.room)

    async def shorter(
        self, fitted: FittedPrompt[ValueT], judged: Judged[ValueT], tries: int
    ) -> FittedPrompt[ValueT] | None:
        """The question truncated further if the judge found it too long; None if it did not, or no text is left to cut.

        Args:
            fitted: the question as it was asked.
            judged: the result.
            tries: how often it has already been truncated further.
        """
        errors = [call.error for call in judged.calls if call.error is not None and call.finish_reason == "error"]
        if not errors or tries == len(SHORTENING_FRACTIONS):
            return None
        tokens = self._tokens(fitted.prompt)
        error = next((each for each in errors if is_too_long(each, tokens)), None)
        if error is None:
            return None
        found = await asyncio.to_thread(self._search, fitted, tokens * part_to_keep(error, tokens, tries))
        return found if len(found.prompt) < len(fitted.prompt) else None

    async def answered(self, fitted: FittedPrompt[ValueT], judged: Judged[ValueT], tries: int) -> None:
        """Learn from the usage that the reply states, and store how far the prompt was truncated for it."""
        if self._replies is not None and (fitted.level or _bytes(fitted.whole) > (self._first_room or math.inf)):
            await self._replies.put(self._key(fitted.whole), {"level": fitted.level})
        used = judged.calls[0].input_tokens
        learned = update_tokens_per_byte(self._rate, _bytes(fitted.prompt), used)
        if learned != self._rate and tries:
            self.room = max(min(self.room or used, used), (self._first_room or 0) // 4)
        self._rate = learned

    def _cut(self, fitted: FittedPrompt[ValueT], room: int) -> FittedPrompt[ValueT]:
        tokens = self._tokens(fitted.whole)
        if tokens <= room:
            return fitted
        found = self._search(fitted, room)
        if self._tokens(found.prompt) <= room:
            return found
        raise ReplyError(
            f"the prompt has about {tokens:,.0f} tokens, but the judge accepts about {room:,}; it is too long even "
            f"with every text cut to {LENGTHS[-1]} characters. Use a judge with a longer context (judge.context_tokens)"
        )

    def _key(self, whole: str) -> str:
        from draco_ray.judging.reply_cache import request_key

        return request_key({"cut of": whole, "model": self._config.model, "tokens": self._first_room})

    def _tokens(self, prompt: str) -> float:
        return self._rate * _bytes(prompt)

    def _search(self, fitted: FittedPrompt[ValueT], room: float) -> FittedPrompt[ValueT]:
        """The least truncation with which the prompt takes at most ``room`` tokens; the strongest if none does."""
        return self._at(
            fitted,
            bisect_left(range(MAX_LEVEL), True, key=lambda level: self._tokens(self._at(fitted, level).prompt) <= room),
        )

    def _at(self, fitted: FittedPrompt[ValueT], level: int) -> FittedPrompt[ValueT]:
        shown = fitted.question.shortened(level)
        return replace(fitted, level=level, prompt=shown.prompt(self._prompts), shown=shown)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


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
    # An error with "max_" names a parameter such as max_tokens: the reply is too long, not the prompt.
    return named or (estimate > 1000 and "max_" not in error and _stated(error, estimate) < 1)


def part_to_keep(error: str, estimate: float, tries: int) -> float:
    """The fraction to keep of a prompt that was too long, 0 to 1.

    Args:
        error: the provider's error.
        estimate: estimated tokens of the prompt.
        tries: how often the prompt was shortened before.
    """
    return min(0.97 * _stated(error, estimate), SHORTENING_FRACTIONS[tries])


def _stated(error: str, estimate: float) -> float:
    """The limit that an error states, as a fraction of the stated count; 1 if it does not state both."""
    stated = {int(each.replace(",", "")) for each in _NUMBER.findall(error)}
    # Some providers state prompt, reply and their sum; ignore the sum.
    numbers = sorted(stated - {sum(pair) for pair in itertools.combinations(stated, 2)})
    counts = [each for each in numbers if estimate / MAX_COUNT_RATIO < each < estimate * MAX_COUNT_RATIO]
    limits = [each for each in numbers if counts and counts[-1] / 10 < each < counts[-1]]
    return limits[-1] / counts[-1] if limits else 1.0

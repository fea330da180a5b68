"""Truncate questions to the judge's context: the longest prompt that fits, and a shorter one if the judge refuses it.

How far a prompt was truncated is stored beside the replies, so that a resumed run sends the same prompt.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging.judge_context import judge_room
from draco_ray.judging.phases import Question
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.shortening import LENGTHS, LEVELS
from draco_ray.judging.tokens import BYTES_PER_TOKEN, SHORTER, is_too_long, learned_rate, part_to_keep
from draco_ray.records import Judged

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[ValueT]):
    """A question with the prompt that is sent."""

    question: Question[ValueT]
    whole: str
    """The prompt before it was truncated."""
    level: int = 0
    """How far it was truncated (`draco_ray.judging.shortening`)."""
    prompt: str
    shown: Question[ValueT]
    """The truncated question."""

    @property
    def left_out(self) -> int:
        """Characters that were left out of the prompt."""
        return len(self.whole) - len(self.prompt)


class Fitting:
    """Fits prompts into the context of one judge; learns from its replies and from prompts that it refuses."""

    def __init__(self, config: JudgeConfig, prompts: Prompts, replies: ReplyCache | None = None) -> None:
        """``replies``: where the judge's replies are stored; None: nowhere."""
        self._config, self._prompts, self._replies = config, prompts, replies
        self.room = self._first_room = judge_room(config)
        """Maximum length of a prompt, in tokens; None: not known."""
        self._rate = 1 / BYTES_PER_TOKEN
        """Tokens per byte."""

    @property
    def reads(self) -> str:
        """How much the judge reads, for messages."""
        return "fewer tokens" if self.room is None else f"about {self.room:,} tokens"

    async def too_long(self, question: Question[Any]) -> bool:
        """Whether a prompt exceeds the judge's known context; the rate is fixed, so that a resumed run agrees."""
        if self._first_room is None:
            return False
        prompt = await asyncio.to_thread(question.prompt, self._prompts)
        return _bytes(prompt) > BYTES_PER_TOKEN * self._first_room

    async def fit(self, question: Question[ValueT]) -> Fitted[ValueT]:
        """The longest version of a question that fits.

        Raises:
            ReplyError: it is too long even with every text truncated.
        """
        whole = await asyncio.to_thread(question.prompt, self._prompts)
        fitted = Fitted(question=question, whole=whole, prompt=whole, shown=question)
        if self._replies is not None and _bytes(whole) > (self._first_room or 0):
            known = await self._replies.get(self._key(whole))
            if known is not None and isinstance(level := known.get("level"), int) and 0 <= level <= LEVELS:
                return await asyncio.to_thread(self._at, fitted, level)
        if self.room is None or _bytes(whole) <= self.room:
            return fitted
        return await asyncio.to_thread(self._cut, fitted, self.room)

    async def shorter(self, fitted: Fitted[ValueT], judged: Judged[ValueT], tries: int) -> Fitted[ValueT] | None:
        """The question truncated further if the judge found it too long; None if it did not, or no text is left to cut.

        Args:
            fitted: the question as it was asked.
            judged: the result.
            tries: how often the question was truncated further before.
        """
        errors = [call.error for call in judged.calls if call.error is not None and call.finish_reason == "error"]
        if not errors or tries == len(SHORTER):
            return None
        tokens = self._tokens(fitted.prompt)
        error = next((each for each in errors if is_too_long(each, tokens)), None)
        if error is None:
            return None
        found = await asyncio.to_thread(self._search, fitted, tokens * part_to_keep(error, tokens, tries))
        return found if len(found.prompt) < len(fitted.prompt) else None

    async def answered(self, fitted: Fitted[ValueT], judged: Judged[ValueT], tries: int) -> None:
        """Learn from the usage that the reply states, and store how far the prompt was truncated for it."""
        if self._replies is not None and (fitted.level or _bytes(fitted.whole) > (self._first_room or math.inf)):
            await self._replies.put(self._key(fitted.whole), {"level": fitted.level})
        used = judged.calls[0].input_tokens
        learned = learned_rate(self._rate, _bytes(fitted.prompt), used)
        if learned != self._rate and tries:
            self.room = max(min(self.room or used, used), (self._first_room or 0) // 4)
        self._rate = learned

    def _cut(self, fitted: Fitted[ValueT], room: int) -> Fitted[ValueT]:
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

    def _search(self, fitted: Fitted[ValueT], room: float) -> Fitted[ValueT]:
        """The least truncation with which the prompt takes at most ``room`` tokens; the strongest if none does."""
        return self._at(
            fitted,
            bisect_left(range(LEVELS), True, key=lambda level: self._tokens(self._at(fitted, level).prompt) <= room),
        )

    def _at(self, fitted: Fitted[ValueT], level: int) -> Fitted[ValueT]:
        shown = fitted.question.shortened(level)
        return Fitted(
            question=fitted.question, whole=fitted.whole, level=level, prompt=shown.prompt(self._prompts), shown=shown
        )


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))

"""Questions cut to what the judge reads: the longest prompt that fits, and a shorter one where the judge refuses it.

How far a prompt was cut is kept beside the replies: a resumed run asks the same, whatever was learned meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging.judge_context import judge_room
from draco_ray.judging.phases import Question
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.shortening import LENGTHS, LEVELS
from draco_ray.judging.tokens import SHORTER, TokenEstimate, is_too_long, part_to_keep, tokenizer
from draco_ray.records import Judged, Message, Trajectory

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

ValueT = TypeVar("ValueT")
CLOSE = 0.97
"""Part of its room that a prompt should fill."""
ROUNDS = 8
"""Prompts to try at most until one does; mostly there are two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[ValueT]):
    """A question as it is asked."""

    question: Question[ValueT]
    whole: str
    """The prompt before it was cut."""
    level: int = 0
    """How far it was cut (`draco_ray.judging.shortening`)."""
    prompt: str
    shown: Question[ValueT]
    """The question with less of what it shows."""

    @property
    def left_out(self) -> int:
        """Characters of the prompt."""
        return len(self.whole) - len(self.prompt)


class Fitting:
    """What one judge reads, in tokens; learns from its replies and from prompts that it refuses."""

    def __init__(self, config: JudgeConfig, prompts: Prompts, replies: ReplyCache | None = None) -> None:
        """``replies``: where the judge's answers are kept; None: nowhere."""
        self._config, self._prompts, self._replies = config, prompts, replies
        self.room = self._first_room = judge_room(config)
        """Tokens of a prompt; None: not known."""
        self._estimate = TokenEstimate()
        # Behind an endpoint of one's own a name says nothing, and a self-judge is the policy.
        self._model = None if config.api_base or config.self_judge.enabled else config.model

    @property
    def reads(self) -> str:
        """Words for how much the judge reads."""
        return "less than all of it" if self.room is None else f"about {self.room:,} tokens"

    async def fit(self, question: Question[ValueT]) -> Fitted[ValueT]:
        """The longest version of a question that the judge reads.

        Raises:
            ReplyError: it is too long even with every text cut.
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
        """The question cut further where the judge found it too long; None where it did not, or cannot be cut further.

        Args:
            fitted: as it was asked.
            judged: what came of that.
            tries: how often it was cut further before.
        """
        errors = [call.error for call in judged.calls if call.error is not None and call.finish_reason == "error"]
        if not errors or tries == len(SHORTER):
            return None
        tokens = await asyncio.to_thread(self._tokens, fitted.prompt)
        error = next((each for each in errors if is_too_long(each, tokens)), None)
        if error is None:
            return None
        found = await asyncio.to_thread(self._search, fitted, tokens * part_to_keep(error, tokens, tries))
        return found if len(found.prompt) < len(fitted.prompt) else None

    async def answered(self, fitted: Fitted[ValueT], judged: Judged[ValueT], tries: int) -> None:
        """Learn from the usage that the reply states, and keep how far the prompt was cut for it."""
        if self._replies is not None and (fitted.level or _bytes(fitted.whole) > (self._first_room or math.inf)):
            await self._replies.put(self._key(fitted.whole), {"level": fitted.level})
        used = judged.calls[0].input_tokens
        learned = self._estimate.learned(fitted.prompt, used)
        if learned is not self._estimate and tries:
            least = (self._first_room or 0) // 4
            self.room = max(min(self.room or used, used), least)
        self._estimate = learned

    def _cut(self, fitted: Fitted[ValueT], room: int) -> Fitted[ValueT]:
        tokens = self._tokens(fitted.whole)
        if tokens <= room:
            return fitted
        found = self._search(fitted, room)
        if self._tokens(found.prompt) <= room:
            return found
        raise ReplyError(
            f"its prompt takes about {tokens:,.0f} tokens, and the judge reads about {room:,}: too long even with "
            f"every text cut to {LENGTHS[-1]} characters: take a judge with a longer context (judge.context_tokens)"
        )

    def _key(self, whole: str) -> str:
        from draco_ray.judging.reply_cache import request_key

        return request_key({"cut of": whole, "model": self._config.model, "tokens": self._first_room})

    def _tokens(self, prompt: str) -> float:
        count = None if self._model is None else tokenizer(self._model)
        return self._estimate.tokens(prompt) if count is None else float(count(prompt))

    def _search(self, fitted: Fitted[ValueT], room: float) -> Fitted[ValueT]:
        """About the least cut with which the prompt takes at most ``room`` tokens; the most where none does.

        Escaping is what takes time in a prompt: so the bisection is over the texts alone, and the prompt is taken to
        grow with them in a straight line through the last two prompts that were tried.
        """

        @functools.cache
        def texts(level: int) -> float:
            return self._estimate.tokens("".join(_texts(fitted.question.shortened(level)))) + 1

        (before, tokens_before), (now, tokens_now) = (0.0, 0.0), (texts(0), self._tokens(fitted.whole))
        best: Fitted[ValueT] | None = None
        tried = {LEVELS}
        for _ in range(ROUNDS):
            slope = (tokens_now - tokens_before) / ((now - before) or 1.0)
            aim = now + (room - tokens_now) / max(slope, 0.1)
            level = bisect_left(range(LEVELS), True, key=lambda each: texts(each) <= aim)
            if level in tried:
                break
            tried.add(level)
            found = self._at(fitted, level)
            (before, tokens_before), (now, tokens_now) = (now, tokens_now), (texts(level), self._tokens(found.prompt))
            if tokens_now <= room and (best is None or level < best.level):
                best = found
            if CLOSE * room < tokens_now <= room:
                break
        return best or self._at(fitted, LEVELS)

    def _at(self, fitted: Fitted[ValueT], level: int) -> Fitted[ValueT]:
        shown = fitted.question.shortened(level)
        return Fitted(
            question=fitted.question, whole=fitted.whole, level=level, prompt=shown.prompt(self._prompts), shown=shown
        )


def _texts(shown: object) -> Iterator[str]:
    """What a question shows of rollouts, and of what their agent was told."""
    if isinstance(shown, Message):
        yield shown.content
    elif isinstance(shown, Trajectory):
        yield from _texts(shown.prompt)
        for turn in shown.turns:
            yield turn.text
            yield turn.observation or ""
    elif isinstance(shown, (list, tuple)):
        for each in shown:
            yield from _texts(each)
    elif isinstance(shown, Question):
        for field in dataclasses.fields(shown):  # type: ignore[arg-type]
            yield from _texts(getattr(shown, field.name))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))

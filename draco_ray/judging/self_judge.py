"""The self-judge (Section "Ablations", "Self-judge"): the policy that is being trained answers the judge's prompts.

It answers through the engines that generate, with whatever adapter they serve at that moment. Its replies are not kept:
the next version of the policy is another judge.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from draco_ray.config.schema import JudgeConfig
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.sampler import Sample
from draco_ray.errors import EngineError, ReplyError
from draco_ray.judging.complete import Completion, Request
from draco_ray.judging.parsing import THINK_BEGIN, after_thinking
from draco_ray.judging.pricing import find_price, price_of


class JudgeSampler(Protocol):
    """An engine that samples at the judge's temperature; `draco_ray.engine.actor.EngineClient` is one."""

    async def sample(
        self, token_ids: list[int], *, max_tokens: int, seed: int | None = None, temperature: float | None = None
    ) -> Sample:
        """Continue ``token_ids``; raises EngineError where they leave no room."""
        ...


class SelfJudgeClient:
    """A `draco_ray.judging.complete.Complete` whose answers the current policy samples."""

    def __init__(self, samplers: Sequence[JudgeSampler], tokenizer: Any, config: JudgeConfig, *, model: str) -> None:
        """Prepare the chat template.

        Args:
            samplers: the policy's engines; a request goes to the one with the fewest of ours in flight.
            tokenizer: the policy's.
            config: ``max_tokens``, ``temperature``, ``prices`` and ``self_judge`` are used.
            model: name in the archive, and in the price table by its last part.
        Raises: ConfigError when the tokenizer's chat template cannot be used.
        """
        self._samplers = list(samplers)
        self._in_flight = [0] * len(self._samplers)
        self._chat = ChatTokens(tokenizer, thinking=config.self_judge.thinking)
        self._config = config
        self._model = model
        self._price = find_price(model, config.prices)

    async def __call__(self, request: Request) -> Completion:
        """Answer ``request``; a prompt beyond the engine's context is this call's error, not the run's."""
        started_at, clock = time.time(), time.perf_counter()
        prompt = self._chat.prompt(request.messages)
        index = self._in_flight.index(min(self._in_flight))
        self._in_flight[index] += 1
        try:
            sample = await self._samplers[index].sample(
                prompt,
                max_tokens=self._config.max_tokens,
                seed=_seed(prompt, request.vote),
                temperature=self._config.temperature,
            )
        except EngineError as error:
            return self._completion("", "error", len(prompt), 0, started_at, clock, str(error))
        finally:
            self._in_flight[index] -= 1
        room, wanted = len(sample.token_ids), self._config.max_tokens
        if sample.finish_reason == "length" and room < wanted:
            cut = (
                f"a prompt of {len(prompt):,} tokens is too long: it left {room:,} of judge.max_tokens={wanted:,} for "
                "the reply: raise judge.self_judge.context_tokens"
            )
            return self._completion("", "error", len(prompt), room, started_at, clock, cut)
        text = self._chat.text(sample.token_ids)
        opened = self._chat.opens_thinking
        if opened or text.lstrip().startswith(THINK_BEGIN):
            answer = await asyncio.to_thread(_answer, text, opened)
            if answer == text:
                # Reasoning that never came to an end holds no answer, whatever JSON it may quote.
                return self._completion(text, "length", len(prompt), len(sample.token_ids), started_at, clock, None)
            text = answer.strip()
        return self._completion(text, sample.finish_reason, len(prompt), len(sample.token_ids), started_at, clock, None)

    async def forget(self, request: Request) -> None:
        """Do nothing: no answer is kept."""

    async def check(self) -> None:
        """Do nothing: the engines are started, and checked, by the run itself."""

    def _completion(
        self,
        text: str,
        finish_reason: str,
        input_tokens: int,
        output_tokens: int,
        started_at: float,
        clock: float,
        error: str | None,
    ) -> Completion:
        dollars = price_of(self._price, input_tokens, 0, output_tokens) if self._price and error is None else 0.0
        return Completion(
            text=text,
            finish_reason=finish_reason,
            model=self._model,
            input_tokens=input_tokens,
            cached_tokens=0,
            output_tokens=output_tokens,
            dollars=dollars,
            started_at=started_at,
            seconds=time.perf_counter() - clock,
            requests=1,
            error=error,
        )


def _answer(text: str, opened: bool) -> str:
    """What follows the reasoning; the text itself where it is not to be told."""
    try:
        return after_thinking(text, opened=opened)
    except ReplyError:
        return text


def _seed(prompt: list[int], vote: int) -> int:
    """A seed of the request's own: votes on one prompt are drawn independently, a rerun draws the same."""
    return int.from_bytes(hashlib.blake2b(repr((prompt, vote)).encode(), digest_size=4).digest(), "big")

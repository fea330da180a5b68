"""The self-judge (Section "Ablations", "Self-judge"): the policy that is being trained answers the judge's prompts.

It answers through the engines that generate, with the adapter they serve at that moment. With thinking it reasons
freely up to ``</think>``, and only its answer is constrained to the phase's JSON schema. Its replies are not stored:
the next version of the policy is another judge.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draco_ray.config.schema import JudgeConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample
from draco_ray.errors import EngineError
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.pricing import find_price, reply_cost
from draco_ray.judging.reply import THINK_BEGIN, THINK_END


class SelfJudgeClient:
    """A `draco_ray.judging.completion.Completer` whose answers the current policy samples."""

    def __init__(self, samplers: Sequence[Any], tokenizer: Any, config: JudgeConfig, *, model: str) -> None:
        """Prepare the chat template.

        Args:
            samplers: the policy's engines, which have the method ``sample`` of `draco_ray.engine.actor.EngineClient`; a
                request goes to the one with the fewest judge requests in flight.
            tokenizer: the policy's tokenizer.
            config: ``max_tokens``, ``temperature``, ``prices`` and ``self_judge`` are used.
            model: name in the archive; its last part is the name in the price table.
        Raises: ConfigError when the tokenizer's chat template cannot be used.
        """
        self._samplers = list(samplers)
        self._in_flight = [0] * len(self._samplers)
        self._chat = ChatTokenizer(tokenizer, thinking=config.self_judge.thinking)
        # None if the tag is several tokens: replies with reasoning are then not constrained.
        self._think_end: int | None = tokenizer.get_vocab().get(THINK_END)
        self._config = config
        self._model = model
        self._price = find_price(model, config.prices)

    async def __call__(self, request: Request) -> Completion:
        """Answer ``request``; a prompt beyond the engine's context fails this call, not the run."""
        clock = time.perf_counter()
        prompt = self._chat.prompt(request.messages)
        began = Completion(
            text="",
            finish_reason="error",
            model=self._model,
            input_tokens=len(prompt),
            started_at=time.time(),
            seconds=0.0,
        )
        index = self._in_flight.index(min(self._in_flight))
        self._in_flight[index] += 1
        try:
            sample = await self._sample(self._samplers[index], prompt, request)
        except EngineError as error:
            return replace(began, seconds=time.perf_counter() - clock, error=str(error))
        finally:
            self._in_flight[index] -= 1
        room, wanted = len(sample.token_ids), self._config.max_tokens
        ended = replace(began, seconds=time.perf_counter() - clock, output_tokens=room)
        if sample.finish_reason == "length" and room < wanted:
            cut = (
                f"a prompt of {len(prompt):,} tokens is too long: it leaves {room:,} tokens for the reply, expected "
                f"judge.max_tokens={wanted:,}; raise judge.self_judge.context_tokens"
            )
            return replace(ended, error=cut)
        text, reason = self._chat.text(sample.token_ids), sample.finish_reason
        if self._chat.opens_thinking or text.lstrip().startswith(THINK_BEGIN):
            _, closed, answer = text.partition(THINK_END)
            # Unfinished reasoning is no answer, whatever JSON it may quote.
            text, reason = (answer.strip(), reason) if closed else (text, "length")
        dollars = reply_cost(self._price, len(prompt), 0, room) if self._price else 0.0
        return replace(ended, text=text, finish_reason=reason, dollars=dollars)

    async def _sample(self, sampler: Any, prompt: list[int], request: Request) -> Sample:
        """Sample the reply; with thinking the reasoning first, and then the answer under the schema."""
        given: dict[str, Any] = {"seed": _seed(prompt, request.vote), "temperature": self._config.temperature}
        room, schema = self._config.max_tokens, request.schema if self._config.structured_output else None
        if schema is None or not self._config.self_judge.thinking:
            return await sampler.sample(prompt, max_tokens=room, schema=schema, **given)
        thought = await sampler.sample(prompt, max_tokens=room, stop_at=self._think_end, **given)
        left = room - len(thought.token_ids)
        if self._think_end is None or thought.token_ids[-1:] != [self._think_end] or left < 1:
            return thought
        answer = await sampler.sample([*prompt, *thought.token_ids], max_tokens=left, schema=schema, **given)
        return replace(
            answer,
            token_ids=[*thought.token_ids, *answer.token_ids],
            logprobs=[*thought.logprobs, *answer.logprobs],
        )

    async def forget(self, request: Request) -> None:
        """Do nothing: no answer is kept."""

    async def check(self) -> None:
        """Do nothing: the engines are started, and checked, by the run itself."""


def _seed(prompt: list[int], vote: int) -> int:
    """A seed derived from the request: votes on one prompt are independent, a rerun repeats them."""
    return int.from_bytes(hashlib.blake2b(repr((prompt, vote)).encode(), digest_size=4).digest(), "big")

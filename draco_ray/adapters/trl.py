"""A reward function and per-token advantages for TRL's GRPOTrainer.

    from trl import GRPOTrainer
    from draco_ray.adapters.trl import StepCredit

    credit = StepCredit("openai/gpt-5.4", budget=20.0)
    trainer = credit.trainer(GRPOTrainer)(model=..., reward_funcs=credit, ...)
    trainer.train()

The reward is the rubric's, in [-1, 1]. TRL makes of it, and of other reward functions beside it, its own advantage A_i;
the trainer then spreads that over the tokens of each step (Eq. `credit`), keeping its sum. A conversation whose tokens
do not show the turns that its messages have (one that was cut, say) keeps A_i on every token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

import numpy as np

from draco_ray.adapters.conversations import JudgedConversation, Judging
from draco_ray.adapters.tokens import token_advantages
from draco_ray.traces.library import JudgeOptions

log = logging.getLogger(__name__)


class StepCredit:
    """A reward function of TRL's, which remembers what the judge said for `trainer`."""

    __name__ = "draco"

    def __init__(self, model: str | None = None, **options: Unpack[JudgeOptions]) -> None:
        """
        Args:
            model: LiteLLM's name of the judge; None: that of ``config``.
            options: of `draco_ray.judge`: budget (of all generations together), rubric, api_base, out, ...

        Raises: see `Judging`.
        """
        self._judging = Judging(model, **options)
        self._latest: list[JudgedConversation | None] = []

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], messages: Sequence[Any] | None = None, **_: Any
    ) -> list[float | None]:
        """Rewards of one generation; None where a conversation could not be judged.

        Args:
            prompts: text, or messages. Equal ones are a group.
            completions: text, or messages, tool calls and results included.
            messages: whole conversations, where ``rollout_func`` returns them: they win over ``completions``.
        """
        records = [
            {"task_id": repr(prompt), "messages": [*_messages(prompt, "user"), *_messages(said, "assistant")]}
            for prompt, said in zip(prompts, messages or completions, strict=True)
        ]
        # TRL may call from within a running loop.
        with ThreadPoolExecutor(max_workers=1) as thread:
            judging = thread.submit(asyncio.run, self._judging(records))
            self._latest = judging.result()
        return [None if each is None else each.trace.reward for each in self._latest]

    def advantages(self, advantages: Sequence[float], mask: np.ndarray) -> np.ndarray:
        """Spread A_i over the tokens of the latest generation.

        Args:
            advantages: (B,).
            mask: (B, T), 1 where the policy sampled the token.
        Returns: (B, T) float32.
        """
        if len(self._latest) != len(advantages):
            log.warning(
                "step credit: %d conversations were judged and %d have advantages: these stay uniform",
                *(len(self._latest), len(advantages)),
            )
            return np.asarray(advantages, dtype=np.float32)[:, None] * (mask != 0)
        rows = [
            token_advantages(float(a), each.quality, each.acted, row)
            if each is not None
            else token_advantages(float(a), [], [], row)
            for a, each, row in zip(advantages, self._latest, mask, strict=True)
        ]
        return np.stack(rows)

    def trainer(self, base: type) -> type:
        """``base``, a GRPOTrainer, with step credit."""
        credit = self

        class StepCreditTrainer(base):
            """Replaces the advantage of each sequence by one for each of its tokens, which TRL's losses take."""

            def _generate_and_score_completions(self, inputs: Any) -> Any:
                output = super()._generate_and_score_completions(inputs)
                mask = output["completion_mask"]
                if "tool_mask" in output:
                    mask = mask * output["tool_mask"]
                uniform = output["advantages"]
                spread = credit.advantages(uniform.tolist(), mask.cpu().numpy())
                output["advantages"] = uniform.new_tensor(spread)
                return output

        return StepCreditTrainer


def _messages(said: Any, role: str) -> list[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)

"""Judging and storing verdicts: the common part of the trainers' adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.adapters.conversations import Judging
from draco_ray.adapters.tokens import sampled_runs
from draco_ray.adapters.verdicts import Missing, StepVerdict, TrajectoryKey, VerdictStore, digest
from draco_ray.traces.entry import AGENT, EARLIER
from draco_ray.traces.library import JudgeOptions


class CreditJudge:
    """A judge whose verdicts are stored."""

    def __init__(
        self,
        model: str | None = None,
        *,
        store: VerdictStore | str | Path | None = None,
        missing: Missing = "error",
        **options: Unpack[JudgeOptions],
    ) -> None:
        """
        Args:
            model: LiteLLM's name of the judge; None: that of ``config``.
            store: a verdict store or its file; None: a temporary file.
            missing: see `VerdictStore`.
            options: options of `draco_ray.judge`: budget (of all calls together), rubric, api_base, out, ...

        Raises: see `Judging`, `Judging.by_papers_rule` and `VerdictStore`.
        """
        self._judging = Judging(model, **options).by_papers_rule()
        self.store = store if isinstance(store, VerdictStore) else VerdictStore(store, missing=missing)

    async def verdicts(
        self, records: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int] | None] | None = None
    ) -> list[StepVerdict]:
        """Judge trajectories without storing the verdicts.

        Args:
            records: see `judge_conversations`; records with equal ``task_id`` are a group.
            tokens: number of sampled tokens of each turn of each record, if known.

        Returns: one verdict per record. Raises: as `draco_ray.judge`.
        """
        counts = [None] * len(records) if tokens is None else tokens
        return [StepVerdict.of(*each) for each in zip(await self._judging(records), counts, strict=True)]

    async def judge(self, keys: Sequence[TrajectoryKey], *arguments: Any) -> list[StepVerdict]:
        """Like `verdicts`, but also store the verdicts under the keys."""
        found = await self.verdicts(*arguments)
        self.store.put(dict(zip(keys, found, strict=True)))
        return found

    def judge_sync(self, *arguments: Any) -> list[StepVerdict]:
        """`judge`, for code that is not asynchronous but may be called from within a running event loop."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            judging = thread.submit(asyncio.run, self.judge(*arguments))
            return judging.result()


def trajectory_key(prompt: Any, completion: Any) -> TrajectoryKey:
    """The key of a completion, made from its content, so that shuffled and repeated samples are found."""
    return TrajectoryKey(digest(repr(prompt)), "", digest(list(completion)))


def prompt_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A prompt as messages, of which none is the policy's: earlier assistants' get the role `EARLIER`."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(dict, prompt)
    return [{**each, "role": EARLIER} if each.get("role") == AGENT else each for each in given]


def conversation_of_tokens(
    prompt: str | Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    mask: ArrayLike,
    decode: Callable[[Any], str],
    prompt_ids: Sequence[int] = (),
) -> tuple[list[dict[str, Any]], list[int]]:
    """Rebuild a conversation from its tokens, for trainers that keep no messages.

    Each run of sampled tokens is a turn of the agent; the tokens between two runs are the environment's answer. If the
    text before a turn opens its reasoning, the turn begins with ``<think>``.

    Args:
        prompt: text, or messages.
        token_ids: (T,) of the response.
        mask: (T,) 1 where the policy sampled the token.
        decode: token ids to text, without special tokens.
        prompt_ids: tokens of the prompt, if ``prompt`` is messages.

    Returns: messages, and the number of sampled tokens of each turn.
    """
    messages = prompt_messages(prompt)
    before = prompt if isinstance(prompt, str) else decode(list(prompt_ids))
    end = 0
    counts: list[int] = []
    for begin, stop in sampled_runs(np.asarray(mask)[: len(token_ids)]):
        if counts and begin > end:
            before = decode(list(token_ids[end:begin]))
            messages.append({"role": "user", "content": before})
        opens = "<think>" if before.rstrip().endswith("<think>") else ""
        messages.append({"role": "assistant", "content": opens + decode(list(token_ids[begin:stop]))})
        counts.append(stop - begin)
        end = stop
    return messages, counts

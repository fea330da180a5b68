"""Judging and storing verdicts: the common part of the trainers' adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.adapters.conversations import Judging
from draco_ray.adapters.per_token_advantages import sampled_spans
from draco_ray.adapters.verdicts import Missing, StepVerdict, TrajectoryKey, VerdictStore, digest
from draco_ray.traces.entry import AGENT, EARLIER_AGENT
from draco_ray.traces.library import JudgeOptions


class CreditJudge:
    """A judge that stores its verdicts in a `VerdictStore`."""

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
            model: LiteLLM's name of the judge; None: the model in ``config``.
            store: a verdict store or its file; None: a temporary file.
            missing: see `VerdictStore`.
            options: options of `draco_ray.judge`: budget (of all calls together), rubric, api_base, out, ...

        Raises: see `Judging`, `Judging.by_papers_rule` and `VerdictStore`.
        """
        self._judging = Judging(model, **options).by_papers_rule()
        self.store = store if isinstance(store, VerdictStore) else VerdictStore(store, missing=missing)

    async def judge(
        self,
        keys: Sequence[TrajectoryKey],
        records: Sequence[Mapping[str, Any]],
        tokens: Sequence[Sequence[int] | None] | None = None,
    ) -> list[StepVerdict]:
        """Judge trajectories and store the verdicts.

        Args:
            keys: one for each record.
            records: see `judge_conversations`; records with equal ``task_id`` are a group.
            tokens: number of sampled tokens of each turn of each record, if known.

        Returns: one verdict per record. Raises: as `draco_ray.judge`.
        """
        counts = [None] * len(records) if tokens is None else tokens
        found = [StepVerdict.of(*each) for each in zip(await self._judging(records), counts, strict=True)]
        self.store.put(dict(zip(keys, found, strict=True)))
        return found

    def judge_sync(self, *arguments: Any) -> list[StepVerdict]:
        """`judge`, for code that is not asynchronous but may be called from within a running event loop."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            judging = thread.submit(asyncio.run, self.judge(*arguments))
            return judging.result()


class ArrivingGroup:
    """A group whose trajectories arrive one by one; it is judged once the last one has arrived or is lost."""

    def __init__(self, size: int, judge: Callable[[dict[int, Any]], Awaitable[Sequence[StepVerdict]]]) -> None:
        """
        Args:
            size: number of trajectories, numbered from 0.
            judge: called with number -> record of the trajectories that arrived, numbers ascending; returns their
                verdicts in the same order.
        """
        self._judge, self._judging = judge, asyncio.Lock()
        self._missing, self._settled = set(range(size)), asyncio.Event()
        self._records: dict[int, Any] = {}
        self._verdicts: dict[int, StepVerdict] = {}

    async def verdict(self, number: int, record: Any) -> StepVerdict:
        """The verdict on a trajectory, once its group is judged. Raises: as ``judge``."""
        self._records[number] = record
        self.settle(number)
        await self._settled.wait()
        async with self._judging:
            if not self._verdicts:
                records = dict(sorted(self._records.items()))
                self._verdicts = dict(zip(records, await self._judge(records), strict=True))
        return self._verdicts[number]

    def settle(self, number: int) -> None:
        """Record that a trajectory has arrived or is lost, so that the group no longer waits for it."""
        self._missing.discard(number)
        if not self._missing:
            self._settled.set()


def trajectory_key(prompt: Any, completion: Any) -> TrajectoryKey:
    """The key of a completion, made from its content, so that shuffled and repeated samples are found."""
    return TrajectoryKey(digest(repr(prompt)), "", digest(list(completion)))


def prompt_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A prompt as messages. Assistant messages get the role `EARLIER_AGENT`, because the policy did not sample them."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(dict, prompt)
    return [{**each, "role": EARLIER_AGENT} if each.get("role") == AGENT else each for each in given]


def conversation_of_tokens(
    prompt: str | Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    mask: ArrayLike,
    decode: Callable[[Any], str],
    prompt_ids: Sequence[int] = (),
) -> tuple[list[dict[str, Any]], list[int]]:
    """Rebuild a conversation from its tokens, for trainers that keep no messages.

    Each run of sampled tokens is a turn of the agent; the tokens between two runs are the environment's answer. If the
    text before a turn ends with ``<think>``, the turn begins with it.

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
    for begin, stop in sampled_spans(np.asarray(mask)[: len(token_ids)]):
        if counts and begin > end:
            before = decode(list(token_ids[end:begin]))
            messages.append({"role": "user", "content": before})
        opens = "<think>" if before.rstrip().endswith("<think>") else ""
        messages.append({"role": "assistant", "content": opens + decode(list(token_ids[begin:stop]))})
        counts.append(stop - begin)
        end = stop
    return messages, counts

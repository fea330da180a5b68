"""Rewards and per-token advantages on the traces of verifiers (0.4 and later).

    from draco_ray.adapters.verifiers import score_group

    await score_group([trace for episode in group for trace in episode.traces], "openai/gpt-5.4")

Each trace gets a reward named ``draco``, and every sampled message of it the advantage of its step, one number a
sampled token, where prime-rl and other trainers read it (``MessageNode.advantages``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draco_ray.adapters.conversations import judge_conversations
from draco_ray.algorithm.advantage import group_advantages_G
from draco_ray.algorithm.credit import step_advantages
from draco_ray.traces.results import JudgedTrace

NAME = "draco"


async def score_group(traces: Sequence[Any], model: str, **options: Any) -> list[JudgedTrace | None]:
    """Judge traces of one task and write rewards and advantages into them.

    Args:
        traces: of ``verifiers.v1.Trace``; they are changed.
        model: LiteLLM's name of the judge.
        options: of `draco_ray.judge`.

    Returns: what the judge said, one a trace; None, and no reward, where a trace could not be judged.

    Raises: as `draco_ray.judge`.
    """
    import verifiers.v1 as vf

    records = []
    for trace in traces:
        record = trace.model_dump(mode="json")
        record["task"] = {"type": "group", "data": {"id": "group"}}
        records.append(record)
    judged = await judge_conversations([{"task_id": "group", **each} for each in records], model, **options)
    scored = [each.trace if each is not None and each.trace.reward is not None else None for each in judged]
    rewards = np.array([part.reward for part in scored if part is not None], dtype=float)
    shares = iter(group_advantages_G(rewards)) if len(rewards) else iter(())
    for trace, each, part in zip(traces, judged, scored, strict=True):
        trace.rewards[NAME] = None if part is None else vf.Reward(score=part.reward)
        if part is not None and each is not None:
            _spread(trace, each.quality, each.acted, float(next(shares)))
    return scored


def _spread(trace: Any, quality: Sequence[float | None], acted: Sequence[bool], advantage: float) -> None:
    """An advantage for each sampled token of each turn; A_i where nothing is cited."""
    turns = [node for node in trace.nodes if node.sampled]
    steps = [node for node, step in zip(turns, acted, strict=False) if step]
    tokens_M = np.array([sum(node.mask) for node in steps], dtype=np.int64)
    known = len(turns) == len(acted) and bool(quality) and all(each is not None for each in quality)
    if known and len(quality) == len(steps):
        values = dict(zip(map(id, steps), step_advantages(advantage, np.array(quality, float), tokens_M), strict=True))
        for node in turns:
            node.advantages = [float(values.get(id(node), 0.0))] * sum(node.mask)
    else:
        for node in turns:
            node.advantages = [advantage] * sum(node.mask)

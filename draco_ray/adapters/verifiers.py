"""Rewards and per-token advantages on the traces of verifiers (0.4 and later).

    from draco_ray.adapters.verifiers import score_group

    await score_group([trace for episode in group for trace in episode.traces], "openai/gpt-5.4")

Each trace gets a reward named ``draco``, and each of its sampled messages the advantage of its step, one number per
sampled token (``MessageNode.advantages``). prime-rl's own algorithms overwrite these advantages;
`draco_ray.adapters.prime_rl` keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draco_ray.adapters.conversations import JudgedConversation, Judging
from draco_ray.adapters.per_token_advantages import spread_rows
from draco_ray.algorithm.equations import group_advantages_G
from draco_ray.traces.results import JudgedTrace

REWARD_NAME = "draco"


async def score_group(traces: Sequence[Any], model: str | Judging, **options: Any) -> list[JudgedTrace | None]:
    """Judge traces of one task and write rewards and advantages into them.

    Args:
        traces: ``verifiers.v1.Trace`` objects; they are changed.
        model: LiteLLM's name of the judge, or a `Judging`, to share a budget over several groups.
        options: options of `draco_ray.judge`.

    Returns: one result per trace; None if a trace could not be judged, in which case it gets no reward.

    Raises: as `draco_ray.judge` and `Judging.by_papers_rule`.
    """
    judging = (model if isinstance(model, Judging) else Judging(model, **options)).by_papers_rule()
    judged = await judge_traces(traces, judging)
    scored = [(trace, each) for trace, each in zip(traces, judged, strict=True) if each is not None]
    advantages = group_advantages_G(np.array([each.trace.reward for _, each in scored], dtype=float)) if scored else ()
    for (trace, each), advantage in zip(scored, advantages, strict=True):
        for node in trace.nodes:
            if node.sampled:
                node.advantages = [float(advantage)] * sum(node.mask)
        spread_advantage(trace, each.quality, each.acted)
    return [None if each is None else each.trace for each in judged]


async def judge_traces(traces: Sequence[Any], judging: Judging) -> list[JudgedConversation | None]:
    """Judge traces of one task and add the reward `REWARD_NAME` to them.

    Returns: one result per trace; None for a trace that could not be judged, which gets no reward.
    Raises: as `draco_ray.judge`.
    """
    import verifiers.v1 as vf

    records = []
    for trace in traces:
        record = trace.model_dump(mode="json")
        record["task"] = {"type": "group", "data": {"id": "group"}}
        records.append({"task_id": "group", **record})
    judged = [
        each if each is not None and each.trace.reward is not None else None
        for each in (await judging(records) if records else [])
    ]
    for trace, each in zip(traces, judged, strict=True):
        trace.rewards[REWARD_NAME] = None if each is None else vf.Reward(score=each.trace.reward)
    return judged


def spread_advantage(trace: Any, quality: Sequence[float | None], acted: Sequence[bool]) -> None:
    """Spread a trace's uniform advantage over its steps; without citations it stays uniform."""
    turns = [node for node in trace.nodes if node.sampled and any(node.mask)]
    if turns:
        masks = [[1] * sum(node.mask) for node in turns]
        for node, row in zip(turns, spread_rows(turns[0].advantages[0], quality, acted, masks), strict=True):
            node.advantages = row.tolist()

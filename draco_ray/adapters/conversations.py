"""Conversations that a trainer has in memory, judged in the order in which it has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.traces.library import judge
from draco_ray.traces.load import groups_of, place_of
from draco_ray.traces.results import JudgedTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConversation:
    """One conversation's part."""

    trace: JudgedTrace
    acted: tuple[bool, ...]
    """Of each of the agent's turns: whether it is a step."""

    @property
    def quality(self) -> list[float | None]:
        """Q_j of each step."""
        return [step.quality for step in self.trace.steps]


async def judge_conversations(
    records: Sequence[Mapping[str, Any]], model: str, **options: Any
) -> list[JudgedConversation | None]:
    """Judge records of any format that `draco_ray.load_traces` knows; records with equal ``task_id`` are a group.

    Args:
        records: ``{"task_id": ..., "messages": [...]}``, say.
        model: the judge.
        options: of `draco_ray.judge`.

    Returns: one a record, in their order; None where a record is no trace.

    Raises: as `draco_ray.judge`; TraceError where no record is a trace.
    """
    groups = groups_of(records)
    found: list[JudgedConversation | None] = [None] * len(records)
    for group, judged in zip(groups, await judge(groups, model, **options), strict=True):
        for trace, part in zip(group.traces, judged.rollouts, strict=True):
            acted = tuple(turn.action is not None for turn in trace.turns if turn.role == "assistant")
            found[place_of(trace)] = JudgedConversation(trace=part, acted=acted)
    return found

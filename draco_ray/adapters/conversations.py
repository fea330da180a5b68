"""Conversations that a trainer has in memory, judged in the order in which it has them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.errors import ConfigError
from draco_ray.traces.library import Meter, judge, open_judge, plan
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
    records: Sequence[Mapping[str, Any]], model: str | None, **options: Any
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
            acted = tuple(turn.is_step for turn in trace.turns if turn.role == "assistant")
            found[place_of(trace)] = JudgedConversation(trace=part, acted=acted)
    return found


class Judging:
    """`judge_conversations` with the same options again and again; a budget holds over all of its calls."""

    def __init__(self, model: str | None, **options: Any) -> None:
        """Check what can be checked before anything is judged; the arguments are those of `draco_ray.judge`.

        Raises:
            TypeError: an option that it does not have.
            ConfigError: one that cannot be used; ``out``, which holds the traces of one call.
        """
        inspect.signature(judge).bind([], model, **options)
        if options.get("out") is not None:
            raise ConfigError("out: holds the traces of one call, and here each call has others; leave it out")
        self._model, self._options = model, options
        self._settled = {name: options[name] for name in inspect.signature(plan).parameters if name in options}
        plan(model, **self._settled)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._meter, self._spent = Meter(), 0.0

    async def __call__(self, records: Sequence[Mapping[str, Any]]) -> list[JudgedConversation | None]:
        """See `judge_conversations`."""
        options = dict(self._options)
        if options.get("complete") is None:
            options["complete"] = await self._opened()
            options.pop("batch", None)
        return await judge_conversations(records, self._model, **options)

    async def _opened(self) -> Meter:
        """The judge of this event loop, with what is left of the budget."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._spent += self._meter.dollars
            left = {} if (budget := self._options.get("budget")) is None else {"budget": max(0.0, budget - self._spent)}
            self._loop, self._meter = loop, open_judge(plan(self._model, **{**self._settled, **left}))
            self._answers = asyncio.ensure_future(self._meter.check())
        await self._answers
        return self._meter

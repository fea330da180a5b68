"""Judges conversations that a trainer holds in memory; the results keep their order."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

from draco_ray.algorithm.rules import AdvantageRule, find_rule
from draco_ray.errors import ConfigError
from draco_ray.judging.completion import Completer
from draco_ray.traces.library import JudgeOptions, MeteredJudge, check_judges, judge, open_judge, plan
from draco_ray.traces.load import groups_of, record_index
from draco_ray.traces.results import JudgedTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConversation:
    """The judge's result for one conversation."""

    trace: JudgedTrace
    acted: tuple[bool, ...]
    """For each of the agent's turns, whether it is a step."""

    @property
    def quality(self) -> list[float | None]:
        """Q_j of each step."""
        return [step.quality for step in self.trace.steps]


async def judge_conversations(
    records: Sequence[Mapping[str, Any]], model: str | None, **options: Unpack[JudgeOptions]
) -> list[JudgedConversation | None]:
    """Judge records of any format that `draco_ray.load_traces` knows; records with equal ``task_id`` are a group.

    Args:
        records: for example ``{"task_id": ..., "messages": [...]}``.
        model: the judge.
        options: options of `draco_ray.judge`.

    Returns: one result per record, in order; None for a record that is not a trace.

    Raises: as `draco_ray.judge`; TraceError if no record is a trace.
    """
    groups = groups_of(records)
    found: list[JudgedConversation | None] = [None] * len(records)
    for group, judged in zip(groups, await judge(groups, model, **options), strict=True):
        for trace, part in zip(group.traces, judged.rollouts, strict=True):
            acted = tuple(turn.is_step for turn in trace.turns if turn.role == "assistant")
            found[record_index(trace)] = JudgedConversation(trace=part, acted=acted)
    return found


class Judging:
    """Calls `judge_conversations` repeatedly with the same options; a budget covers all of the calls.

    With ``out`` each call has a run directory of its own, ``out/00001`` and so on. Replies and the amount spent are
    stored in ``out/judge_cache``, so a restarted process pays for no reply twice and stays within the budget.
    """

    def __init__(self, model: str | None, **options: Unpack[JudgeOptions]) -> None:
        """Check the arguments, which are those of `draco_ray.judge`, before anything is judged.

        Raises:
            TypeError: an unknown option.
            ConfigError: an option that cannot be used.
        """
        inspect.signature(judge).bind([], model, **options)
        complete, out = options.pop("complete", None), options.pop("out", None)
        self._complete = MeteredJudge(complete) if isinstance(complete, Completer) else complete
        self._out = None if out is None else Path(out)
        arguments: dict[str, Any] = {**options, "out": self._out}
        self._plan = plan(model, **arguments)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._meter, self._spent = MeteredJudge(), 0.0

    def by_papers_rule(self) -> Self:
        """Check that ``algorithm.rule`` spreads advantages as in the paper; adapters know no other way to spread them.

        Returns: this object.

        Raises: ConfigError: ``algorithm.rule`` spreads advantages in another way.
        """
        algorithm = self._plan.config.algorithm
        rule = find_rule(algorithm.rule, algorithm.reliability)
        if rule.cites and type(rule).spread is not AdvantageRule.spread:
            raise ConfigError(
                f"algorithm.rule={algorithm.rule}: adapters spread advantages by the paper's rule; expected draco, or "
                "grpo for no step credit"
            )
        return self

    async def __call__(self, records: Sequence[Mapping[str, Any]]) -> list[JudgedConversation | None]:
        """See `judge_conversations`."""
        complete = self._complete or await self._opened()
        return await judge_conversations(
            records,
            None,
            config=self._plan.config,
            context=self._plan.context_tokens,
            # Choose the folder last: nothing is awaited before it is created, so no other call can choose the same.
            out=None if self._out is None else _next_folder(self._out),
            complete=complete,
        )

    async def _opened(self) -> MeteredJudge:
        """The judge for this event loop, with the remaining budget."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._spent += self._meter.limiter.spent
            config, budget = self._plan.config, self._plan.config.judge.limits.dollars
            # A reply cache (``out`` always has one) itself records what was spent, also by earlier processes.
            if budget is not None and config.judge.cache is None:
                limits = config.judge.limits.model_copy(update={"dollars": max(0.0, budget - self._spent)})
                config = config.model_copy(update={"judge": config.judge.model_copy(update={"limits": limits})})
            checked, self._loop = self._meter.checked, loop
            # A cheaper conversation may still be judged after one that the budget refuses.
            self._meter = open_judge(replace(self._plan, config=config), final=False)
            self._meter.checked = checked
            self._answers = asyncio.ensure_future(check_judges(self._plan, self._meter))
        await self._answers
        return self._meter


def _next_folder(out: Path) -> Path:
    """``out/00001``, or the number after the largest existing one."""
    numbers = [int(path.name) for path in out.glob("[0-9]" * 5)]
    return out / f"{max(numbers, default=0) + 1:05d}"

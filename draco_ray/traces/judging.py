"""Judge groups of traces: `draco_ray.pipeline`, without Ray and without a policy.

Two or more traces are judged like a training group: stage1 ──► stage2 ×G ──► union ──► score ×G ──► credit ×G,
then dropout, reward, advantage and step credit. A single trace cannot be compared with another: its rubric is what
stage1 and stage2 propose, all criteria count, and it gets a reward and step qualities but no advantage.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draco_ray.algorithm.computer import local_advantages
from draco_ray.config.schema import AlgorithmConfig, DracoConfig
from draco_ray.judging.judge import CallContext, Judgement, phase_summary, resolve_question_field
from draco_ray.judging.phases import GroupQuestion, Phase, Stage1, Union
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import (
    GAP,
    TOOLS,
    Criterion,
    EpisodeEnd,
    GroupAdvantages,
    JudgeCall,
    Judged,
    Message,
    RolloutAdvantage,
    Trajectory,
)
from draco_ray.rollout.finished import PlayedRollouts
from draco_ray.traces.conversation import tool_texts
from draco_ray.traces.entry import AGENT
from draco_ray.traces.model import Trace, TraceGroup
from draco_ray.workers.local import LocalActor

MOST_IN_UNION = 16
"""Maximum number of a group's traces in the union prompt; all traces are scored."""
UNKNOWN_TOKEN = -1
"""Placeholder token id, as only the number of tokens is known."""
MOST_TOOLS = 40
"""Maximum number of tool names in the facts about the agents' environment."""
_TOOL = r"[A-Za-z_][\w.:-]{0,79}"
"""Regular expression of a tool's name. The facts about the agents' environment leave out names that do not match."""
SINGLE = "a single trace: no dropout, no advantage"

Phases = dict[tuple[str, int | None], Judged[Any]]
ALONE_RULE = "no_dropout"
"""The advantage rule for a single trace: there is no other to compare it with, so every criterion counts."""
SINGLE_TRACE_SETTINGS = {
    "rule": ALONE_RULE,
    "merge_proposals": False,
    "skip_useless_credit_calls": False,
    "skip_inert_credit_calls": False,
}
"""Settings of ``algorithm`` for a group of one trace."""

Ask = Callable[..., Awaitable[Judgement]]
"""Asks the judge, in this process or on a cluster, with the arguments of `draco_ray.judging.pool.JudgePool.ask`."""
JudgeOf = Callable[[Sequence[Trace]], Ask]
"""Traces -> the `Ask` whose prompts describe the environment of these traces."""


@dataclass(slots=True, kw_only=True)
class GroupJudgement:
    """The results of judging one group of traces, to be stored in a run directory.

    A `Pipeline` passes its results to `trajectory`, `judged` and `group`, and in training to the same methods of
    `draco_ray.runs.store_actor.RunStoreActor`.
    """

    index: int
    """Index of the group."""
    task_id: str
    traces: tuple[Trace, ...]
    """The complete traces, as they were read."""
    trajectories: tuple[Trajectory, ...]
    """The traces converted to trajectories, as the judge sees them."""
    static: tuple[Criterion, ...] | None = None
    """The rubric, if the judge does not write one."""
    phases: Phases = field(default_factory=dict)
    """(phase, rollout) -> result; rollout None for phases of the whole group."""
    advantages: GroupAdvantages | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    """The group's row in the table ``groups``."""

    def trajectory(self, step: int, trajectory: Trajectory) -> None:
        """Do nothing: `trajectories` already contains it."""

    def judged(self, step: int, task_id: str, rollout: int | None, phase: str, judged: Judged[Any]) -> None:
        """Keep the result of a phase."""
        self.phases[phase, rollout] = judged

    def group(self, step: int, task_id: str, rubric: Any, advantages: Any, step_tokens: Any, row: Any) -> None:
        """Keep the group's advantages and final state."""
        self.advantages, self.row = advantages, row
        if row["reason"] and self.static is None and (Union.name, None) not in self.phases:
            self.row = {**row, "reason": f"no rubric: {self.found(None, Stage1).error}"}

    @property
    def single(self) -> bool:
        """Whether the group has only one trace."""
        return len(self.traces) == 1

    def found(self, rollout: int | None, *phases: Phase) -> Judged[Any]:
        """The result of the first of these phases that has one, else a result without a value."""
        asked = (self.phases.get((phase.name, rollout)) for phase in phases)
        return next(filter(None, asked), Judged(value=None))

    @property
    def rubric(self) -> tuple[Criterion, ...]:
        """The criteria; empty if there are none."""
        written: tuple[Criterion, ...] = self.found(None, Union).value or ()
        return written if self.static is None else self.static

    @property
    def notes(self) -> list[str]:
        """Notes about the rubric."""
        notes = [f"union: {note}" for note in self.found(None, Union).notes]
        if len(self.traces) > MOST_IN_UNION and (Union.name, None) in self.phases:
            notes.insert(0, f"the rubric was merged from the first {MOST_IN_UNION} of {len(self.traces)} traces")
        return notes

    @property
    def calls(self) -> list[JudgeCall]:
        """All judge calls for the group."""
        return [call for judged in self.phases.values() for call in judged.calls]

    def share(self, rollout: int) -> RolloutAdvantage | None:
        """A trace's reward, advantage and step advantages; None if it has none."""
        members = () if self.advantages is None else self.advantages.rollouts
        return next((member for member in members if member.rollout == rollout), None)


class _TraceJudge:
    """Asks the judge about one group of traces.

    Unlike in training, a call about the whole group shows at most `MOST_IN_UNION` of its traces, and the rubric of a
    single trace consists of the criteria that were proposed for it, without a union call.
    """

    def __init__(self, ask: Ask, *, most: int, single: bool) -> None:
        """``most``: maximum number of criteria of a single trace."""
        self._ask, self._most, self._single = ask, most, single

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """See `draco_ray.judging.pool.JudgePool.ask`."""
        if issubclass(phase, GroupQuestion):
            given["trajectories"] = given["trajectories"][:MOST_IN_UNION]
        if phase is not Union:
            return await self._ask(phase, context, **given)
        if self._single:
            # Nothing to merge or to compare: every proposal counts.
            kept: Judged[Any] = Judged(value=tuple(await resolve_question_field(given["candidates"]))[: self._most])
            summary = phase_summary(phase.name, context, kept, time.time())
            found = Judgement(judged=kept, archived=kept, summary=summary)
        else:
            found = await self._ask(phase, context, **given)
        if found.ok and not found.summary.criteria:
            # Without a criterion there is no reward.
            why = "was proposed" if self._single else "distinguishes the traces of the group"
            found = replace(found, summary=replace(found.summary, error=f"no criterion {why}"))
        return found


async def judge_group(
    index: int, group: TraceGroup, config: DracoConfig, static: tuple[Criterion, ...] | None, judge_of: JudgeOf
) -> GroupJudgement:
    """Judge one group: from its traces to its step advantages.

    Args:
        index: index of the group.
        group: its traces.
        config: ``judge.max_union_criteria`` and ``algorithm`` are used.
        static: a rubric to use instead of the judge's own.
        judge_of: the judge.

    Raises:
        JudgeUnavailable: the judge does not answer; BudgetSpent if the budget is spent.
    """
    traces = await asyncio.to_thread(lambda: group.traces)
    played = await asyncio.to_thread(
        lambda: tuple(as_trajectory(trace, group.task_id, rollout) for rollout, trace in enumerate(traces))
    )
    state = GroupJudgement(index=index, task_id=group.task_id, traces=traces, trajectories=played, static=static)
    algorithm = config.algorithm.model_copy(update=SINGLE_TRACE_SETTINGS if state.single else {})
    await run_group_pipeline(
        state, algorithm, judge_of(traces), most=config.judge.max_union_criteria, least=min(2, len(traces))
    )
    return state


async def run_group_pipeline(
    state: GroupJudgement, algorithm: AlgorithmConfig, ask: Ask, *, most: int, least: int
) -> None:
    """Run the trajectories of a group through the graph of a training step, which fills ``state``.

    Args:
        state: the group.
        algorithm: the settings of the graph.
        ask: the judge.
        most: maximum number of criteria of a single trace.
        least: minimum number of traces with a reward.
    """
    used = {"reward": "rubric", "rubric": "dynamic" if state.static is None else "static", "rubric_visits": None}
    algorithm = algorithm.model_copy(update={**used, "group_size": len(state.trajectories)})
    rollouts: Any = PlayedRollouts({each.rollout: each for each in state.trajectories})
    judges: Any = _TraceJudge(ask, most=most, single=state.single)
    keep = LocalActor(state)
    pipeline = Pipeline(
        algorithm,
        rollouts,
        judges,
        local_advantages(algorithm),
        keep,
        static_rubric=Judged(value=state.static),
        least=least,
    )
    prompt = state.trajectories[0].prompt
    await pipeline.run(Group(step=0, index=state.index, task_id=state.task_id, prompt=prompt, members="traces"))
    await keep.done()


def as_trajectory(trace: Trace, group: str, rollout: int) -> Trajectory:
    """Convert a trace to the `Trajectory` that the judge and the advantage rule expect.

    Its tokens are those of the agent's turns, counted in the trace or estimated from the length, with placeholder ids.
    """
    counts = [trace.tokens(turn) for turn in trace.turns]
    ends = list(itertools.accumulate(counts))
    steps = itertools.count()
    step_of = [next(steps) if turn.is_step else GAP for turn in trace.turns]
    total = sum(counts)
    return Trajectory(
        task_id=trace.task_id,
        group=group,
        rollout=rollout,
        attempt=0,
        policy_version=0,
        prompt=trace.prompt,
        turns=tuple(
            replace(turn, first_token=end - count, last_token=end)
            for turn, count, end in zip(trace.turns, counts, ends, strict=True)
        ),
        token_ids_T=np.full(total, UNKNOWN_TOKEN, dtype=np.int32),
        sampled_T=np.ones(total, dtype=np.bool_),
        logprob_T=np.zeros(total, dtype=np.float32),
        step_T=np.repeat(np.array(step_of, dtype=np.int32), counts),
        prompt_length=0,
        ended=trace.ended,
        started_at=0.0,
        ended_at=0.0,
    )


def environment_facts(traces: Sequence[Trace]) -> str:
    """Facts about the agents' environment for the judge, derived from their traces.

    They contain only our own words and names of tools.
    """
    turns = [turn for trace in traces for turn in trace.turns]
    actions = [turn.action for turn in turns if turn.action is not None]
    called = {name for action in actions for name in _called(action)}
    declared = {name for trace in traces for message in trace.prompt for name in _declared(message)}
    facts = ["A step is a turn of the agent that somebody or something received: an action or a message."]
    if called or declared:
        tools = sorted(called | declared)
        more = f" and {len(tools) - MOST_TOOLS} more" if len(tools) > MOST_TOOLS else ""
        facts.append(
            "The agent acts by calling tools: several calls in a turn are made together and are one step, and what "
            f"the environment answered follows. Tools {'that it has' if declared else 'seen here'}: "
            f"{', '.join(tools[:MOST_TOOLS])}{more}."
        )
    elif actions:
        facts.append("An action of the agent is carried out, and its output follows.")
    else:
        facts.append("The agent only speaks here: no turn of these runs acts on anything.")
    others = sorted({turn.role for turn in turns if turn.role != AGENT})
    if "user" in others:
        facts.append("It talks with a user: its messages are said to the user, who may answer.")
    if rest := [role for role in others if role not in ("user", "tool")]:
        facts.append(f"Turns under another name ({', '.join(rest[:10])}) are not the agent's own.")
    if any(trace.ended is EpisodeEnd.UNSTATED for trace in traces):
        facts.append("Where a run ends with `unstated`, nothing is known of why it ended.")
    facts.append("Text in brackets such as [image: image/png, 12 kB] stands for what is no text and cannot be shown.")
    return "\n".join(f"- {fact}" for fact in facts)


def _called(action: str) -> list[str]:
    """Names of the tools that an action calls."""
    return re.findall(rf"^({_TOOL})\((?=[{{\"\[]|$|\n)", action, re.MULTILINE)


def _declared(message: Message) -> list[str]:
    """Names of the tools that a message declares: a JSON array of schemas in a run, else a line for each tool."""
    if message.role != TOOLS:
        return []
    lines = tool_texts(message.content) or message.content.splitlines()
    return [found[1] for line in lines if (found := re.match(rf"({_TOOL})(?=: |:?$)", line))]

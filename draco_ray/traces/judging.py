"""Judge groups of traces: the phases of `draco_ray.judging.judge.Judge`, without Ray and without a policy.

Two or more traces are judged like a training group: stage1 ──► stage2 ×G ──► union ──► score ×G ──► credit ×G,
then dropout, reward, advantage and step credit. A single trace cannot be compared with another: its rubric is what
stage1 and stage2 propose, all criteria count, and it gets a reward and step qualities but no advantage.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from draco_ray.algorithm.group import Uncalled, group_advantages
from draco_ray.algorithm.reward import mixed_verdicts
from draco_ray.algorithm.rules import NoDropout, find_rule
from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.judging.completion import Completer
from draco_ray.judging.judge import CallContext
from draco_ray.judging.panel import panel_judge
from draco_ray.judging.phases import Credit, Proposals, Question, Score, Stage1, Stage2, Union, Verdicts
from draco_ray.judging.prompts import Prompts
from draco_ray.records import (
    GAP,
    TOOLS,
    Attribution,
    Criterion,
    EpisodeEnd,
    GroupAdvantages,
    JudgeCall,
    Judged,
    Message,
    RolloutAdvantage,
    ScoredCriterion,
    Trajectory,
    Turn,
)
from draco_ray.traces.conversation import tool_texts
from draco_ray.traces.entry import AGENT
from draco_ray.traces.model import Trace, TraceGroup
from draco_ray.workers.tasks import gather_or_cancel

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

MOST_IN_UNION = 16
"""Maximum number of a group's traces in the union prompt; all traces are scored."""
UNKNOWN_TOKEN = -1
"""Placeholder token id, as only the number of tokens is known."""
MOST_TOOLS = 40
"""Maximum number of tool names in the facts."""
_TOOL = r"[A-Za-z_][\w.:-]{0,79}"
"""A tool's name that is shown in the facts."""
SINGLE = "a single trace: no dropout, no advantage"

Phases = dict[tuple[str, int | None], Judged[Any]]
ResultT = TypeVar("ResultT")


class Asker(Protocol):
    """Asks the judge: `draco_ray.judging.judge.Judge`, or a pool of judge workers."""

    async def ask(self, question: Question[ResultT], context: CallContext) -> Judged[ResultT]:
        """See `Judge.ask`."""
        ...


@dataclass(slots=True, kw_only=True)
class GroupJudgement:
    """The result of a group: the records that a run directory stores."""

    index: int
    """Index of the group."""
    group: TraceGroup
    traces: tuple[Trace, ...]
    """The complete traces, as they were read."""
    trajectories: tuple[Trajectory, ...]
    """The traces as trajectories, about which the judge is asked."""
    rubric: tuple[Criterion, ...] = ()
    phases: Phases = field(default_factory=dict)
    """(phase, rollout) -> result; rollout None for phases of the whole group."""
    advantages: GroupAdvantages | None = None
    errors: dict[int, str] = field(default_factory=dict)
    """Rollout -> why it has no verdicts."""
    reason: str | None = None
    """Why the group has no rewards."""
    notes: list[str] = field(default_factory=list)

    @property
    def single(self) -> bool:
        """Whether the group has only one trace."""
        return len(self.traces) == 1

    @property
    def calls(self) -> list[JudgeCall]:
        """All judge calls for the group."""
        return [call for judged in self.phases.values() for call in judged.calls]

    def verdicts(self, rollout: int) -> tuple[ScoredCriterion, ...] | None:
        """The scoring verdicts on a rollout; None if there are none."""
        judged = self.scored(rollout)
        return None if judged is None or not judged.ok else judged.value

    def scored(self, rollout: int) -> Judged[Any] | None:
        """The result of the call that scored a rollout; None if there was no such call."""
        return self.phases.get((Score.name, rollout)) or self.phases.get((Verdicts.name, rollout))

    def attributions(self, rollout: int) -> tuple[Attribution, ...] | None:
        """Attributions of the credit call or the merged call; None if there was no such call or it failed."""
        if (Verdicts.name, rollout) in self.phases:
            scores = self.verdicts(rollout)
            return None if scores is None else Attribution.of_scores(scores)
        judged = self.phases.get((Credit.name, rollout))
        return None if judged is None or not judged.ok else judged.value

    def left_out(self, rollout: int) -> int:
        """Characters of a rollout that were truncated in the scoring prompt."""
        judged = self.scored(rollout)
        return 0 if judged is None else judged.left_out

    def share(self, rollout: int) -> RolloutAdvantage | None:
        """A trace's reward, advantage and step advantages; None if it has none."""
        members = () if self.advantages is None else self.advantages.rollouts
        return next((member for member in members if member.rollout == rollout), None)


class TraceJudge:
    """Judges groups of traces with one judge model."""

    def __init__(
        self,
        complete: Completer,
        prompts: Prompts,
        config: DracoConfig,
        static: Sequence[Criterion] | None = None,
        open_other: Callable[[JudgeConfig], Completer] | None = None,
        asker: Asker | None = None,
        replies: ReplyCache | None = None,
    ) -> None:
        """
        Args:
            complete: completer of the judge.
            prompts: the prompt set.
            config: ``judge`` and ``algorithm`` are used.
            static: a rubric to use instead of the judge's own.
            open_other: opens the completer of another judge; None: ``complete`` answers for all.
            asker: asks the judge instead, e.g. a pool of judge workers on a cluster.
            replies: the reply store; None: replies are not stored.
        """
        self._asker = asker
        self._open_other = open_other or (lambda _: complete)
        self._complete, self._prompts, self._config, self._replies = complete, prompts, config, replies
        self._static = None if static is None else tuple(static)
        self._rule = find_rule(config.algorithm.rule, config.algorithm.reliability)

    async def judge(self, index: int, group: TraceGroup) -> GroupJudgement:
        """Judge one group: from its traces to its step advantages.

        Raises:
            JudgeUnavailable: the judge does not answer; BudgetSpent if the budget is spent.
        """
        traces = await asyncio.to_thread(lambda: group.traces)
        played = await asyncio.to_thread(
            lambda: tuple(as_trajectory(trace, group.task_id, rollout) for rollout, trace in enumerate(traces))
        )
        state = GroupJudgement(index=index, group=group, traces=traces, trajectories=played)
        judge = self._judge_of(traces)
        if self._static is not None:
            state.rubric = self._static
        elif not await self._write_rubric(judge, state):
            return state
        if not state.rubric:
            state.reason = (
                "no criterion distinguishes the traces of the group"
                if not state.single
                else "no criterion was proposed"
            )
            return state
        await self._score(judge, state)
        return state

    def prompt_of(self, group: TraceGroup) -> tuple[Trace, str]:
        """The first trace of a group as the judge sees it, without truncation."""
        from draco_ray.judging import render

        trace = group.traces[0]
        return trace, render.agent_trajectory(as_trajectory(trace, group.task_id, 0), self._prompts.code(group.task_id))

    def _judge_of(self, traces: Sequence[Trace]) -> Asker:
        """The judge, with facts about the environment of these traces."""
        if self._asker is not None:
            return self._asker
        prompts = self._prompts
        if not prompts.facts:
            prompts = replace(prompts, facts=environment_facts(traces))
        return panel_judge(self._config.judge, prompts, self._complete, self._open_other, self._replies)

    async def _write_rubric(self, judge: Asker, state: GroupJudgement) -> bool:
        """stage1 ──► stage2 ×G ──► union; returns whether there is a rubric."""
        context = CallContext(group=state.group.task_id, task_id=state.group.task_id)
        prompt = state.trajectories[0].prompt
        stage1 = state.phases[Stage1.name, None] = await judge.ask(Stage1(prompt), context)
        proposals = [stage1]

        async def stage2(trajectory: Trajectory) -> Judged[Any]:
            judged = await judge.ask(Stage2(trajectory, stage1.value or ()), _context(trajectory))
            state.phases[Stage2.name, trajectory.rollout] = judged
            return judged

        shown = state.trajectories[:MOST_IN_UNION]
        if merged := self._config.algorithm.merge_proposals and len(shown) > 1:
            question = Proposals(prompt, stage1.value or (), shown)
            state.phases[Proposals.name, None] = await judge.ask(question, context)
            proposals.append(state.phases[Proposals.name, None])
        else:
            proposals += await gather_or_cancel(stage2(each) for each in state.trajectories)
        if not any(each.ok for each in proposals):
            state.reason = f"no rubric: {stage1.error}"
            return False
        candidates = [criterion for each in proposals for criterion in each.value or ()]
        if len(state.trajectories) == 1:
            limit = self._config.judge.max_union_criteria
            state.rubric = tuple(candidates[:limit])
            return True
        if len(shown) < len(state.trajectories):
            of = len(state.trajectories)
            state.notes.append(f"the rubric was merged from the first {MOST_IN_UNION} of {of} traces")
        numbers = [] if merged else [each.rollout for each in shown]
        failed = [each for each in numbers if not state.phases[Stage2.name, each].ok]
        union = state.phases[Union.name, None] = await judge.ask(
            Union(prompt, candidates, shown, doubtful=failed), context
        )
        state.notes += [f"union: {note}" for note in union.notes]
        if not union.ok:
            state.reason = f"no rubric: {union.error}"
            return False
        state.rubric = union.value or ()
        return True

    async def _score(self, judge: Asker, state: GroupJudgement) -> None:
        """score ×G ──► credit ×G ──► advantages."""

        merged = self._config.algorithm.merge_verdicts and self._rule.cites
        phase = Verdicts if merged else Score

        async def score(trajectory: Trajectory) -> None:
            judged = await judge.ask(phase(trajectory, state.rubric), _context(trajectory))
            state.phases[phase.name, trajectory.rollout] = judged
            if judged.error is not None:
                state.errors[trajectory.rollout] = judged.error

        await gather_or_cancel(score(each) for each in state.trajectories)
        scored = [each for each in state.trajectories if state.verdicts(each.rollout) is not None]
        if not scored or (len(scored) < 2 and not state.single):
            state.reason = f"{len(scored)} of {len(state.traces)} traces could be scored"
            return
        rule = NoDropout() if state.single else self._rule
        verdict_GK = np.array(
            [[int(score.verdict) for score in state.verdicts(each.rollout) or ()] for each in scored], dtype=np.int8
        )
        surviving_K = rule.surviving(verdict_GK)
        mixed_G = mixed_verdicts(verdict_GK, surviving_K)
        rewards = rule.rewards(verdict_GK, surviving_K)
        matters = rule.cites and bool(surviving_K.any()) and (state.single or bool(np.ptp(rewards) > 0))
        asked = [int(index) for index in np.flatnonzero(surviving_K)]

        async def credit(trajectory: Trajectory, mixed: bool) -> Sequence[Attribution] | Uncalled | None:
            if merged:
                return state.attributions(trajectory.rollout)
            if not matters:
                return ()
            if self._config.algorithm.skip_inert_credit_calls and not mixed and not state.single:
                return Uncalled.UNANIMOUS
            scores = state.verdicts(trajectory.rollout) or ()
            judged = await judge.ask(Credit(trajectory, state.rubric, scores, asked), _context(trajectory))
            state.phases[Credit.name, trajectory.rollout] = judged
            return judged.value if judged.ok else None

        attributions = await gather_or_cancel(credit(each, bool(m)) for each, m in zip(scored, mixed_G, strict=True))
        state.advantages = group_advantages(
            state.group.task_id,
            verdict_GK,
            attributions,
            [each.tokens_M for each in scored],
            [each.rollout for each in scored],
            rule=rule,
            std_epsilon=self._config.algorithm.std_epsilon,
        )


async def judge_groups(
    judge: TraceJudge,
    groups: Iterable[tuple[int, TraceGroup]],
    keep: Callable[[GroupJudgement], Awaitable[None]],
    *,
    at_once: int,
) -> None:
    """Judge groups, ``at_once`` at a time, and pass each to ``keep`` as soon as it is judged.

    Raises:
        JudgeUnavailable: see `TraceJudge.judge`; groups in flight are cancelled.
    """
    waiting = iter(groups)

    async def work() -> None:
        for index, group in waiting:
            await keep(await judge.judge(index, group))

    await gather_or_cancel(work() for _ in range(at_once))


def _context(trajectory: Trajectory) -> CallContext:
    return CallContext(group=trajectory.group, task_id=trajectory.task_id, rollout=trajectory.rollout)


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
            Turn(
                text=turn.text,
                action=turn.action,
                observation=turn.observation,
                role=turn.role,
                first_token=end - count,
                last_token=end,
                message=turn.message,
            )
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

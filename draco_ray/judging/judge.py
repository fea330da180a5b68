"""The judge's five phases (Section "Dynamic Per-Trajectory Rubrics"): prompt, ask, parse, ask once more, or give up.

A phase never raises over a reply: it returns a `Judged` that holds either its value or the reason there is none, and
every call it made. Only a judge that cannot answer at all (`JudgeUnavailable`) climbs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.complete import Complete, Completion, Request
from draco_ray.judging.parsing import Parsed, check_finish, parse_attributions, parse_criteria, parse_scores
from draco_ray.judging.prompts import Prompts, evidence_key, load_prompts
from draco_ray.judging.structured import reply_schema
from draco_ray.records import (
    Attribution,
    Criterion,
    JudgeCall,
    Judged,
    Message,
    Phase,
    ScoredCriterion,
    Trajectory,
    Verdict,
)

if TYPE_CHECKING:
    from draco_ray.judging.limiter import Leases
    from draco_ray.judging.self_judge import JudgeSampler

Rubric = tuple[Criterion, ...]
Scores = tuple[ScoredCriterion, ...]
Attributions = tuple[Attribution, ...]

QUOTED_REPLY_CHARACTERS = 20_000
"""How much of an unusable reply is shown to the judge when it is asked again."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a call is for, as the archive records it."""

    group: str
    task_id: str
    rollout: int | None = None


class Judge:
    """One judge model with one prompt set."""

    def __init__(self, complete: Complete, prompts: Prompts, config: JudgeConfig) -> None:
        self._complete = complete
        self._prompts = prompts
        self._config = config
        self._schemas = {phase: reply_schema(phase, prompts.templates[phase]) for phase in Phase}

    async def check(self) -> None:
        """Make sure that the judge answers.

        Raises:
            JudgeUnavailable: it does not.
        """
        await self._complete.check()

    async def stage1(self, prompt: Sequence[Message], context: CallContext) -> Judged[Rubric]:
        """Propose criteria from the agent's prompt alone; at least one, or the phase has failed."""

        def parse(text: str, last: bool) -> Parsed[Rubric]:
            return parse_criteria(text, limit=self._config.max_stage1_criteria, source="stage1")

        scope = "" if self._config.stage1_across_epochs else context.group
        asked = await asyncio.to_thread(stage1_prompt, self._prompts, prompt)
        return await self._phase(Phase.STAGE1, asked, parse, context, scope=scope)

    async def stage2(
        self, trajectory: Trajectory, existing: Sequence[Criterion], context: CallContext
    ) -> Judged[Rubric]:
        """Add the criteria that this rollout reveals and ``existing`` does not cover; possibly none."""

        def parse(text: str, last: bool) -> Parsed[Rubric]:
            return parse_criteria(
                text,
                limit=self._config.max_stage2_criteria,
                source=f"stage2/{trajectory.rollout}",
                taken=existing,
                allow_empty=True,
            )

        asked = await asyncio.to_thread(stage2_prompt, self._prompts, trajectory, existing)
        return await self._phase(Phase.STAGE2, asked, parse, context)

    async def union(
        self,
        prompt: Sequence[Message],
        candidates: Sequence[Criterion],
        trajectories: Sequence[Trajectory],
        context: CallContext,
    ) -> Judged[Rubric]:
        """Merge every candidate into the one rubric of the group; empty when no criterion tells its rollouts apart.

        No candidates: an empty rubric, without a call.
        """
        if not candidates:
            return Judged(value=())
        asked = await asyncio.to_thread(union_prompt, self._prompts, prompt, candidates, trajectories)
        return await self.merge(asked, context)

    async def merge(self, prompt: str, context: CallContext) -> Judged[Rubric]:
        """One set of criteria out of the candidates that ``prompt`` lists: `union` with a prompt of the caller's."""

        def parse(text: str, last: bool) -> Parsed[Rubric]:
            return parse_criteria(text, limit=self._config.max_union_criteria, source="union", allow_empty=True)

        return await self._phase(Phase.UNION, prompt, parse, context)

    async def score(self, trajectory: Trajectory, rubric: Sequence[Criterion], context: CallContext) -> Judged[Scores]:
        """A verdict on every criterion, in the rubric's order; an empty rubric needs no call.

        With k = ``score_votes`` calls see `combine_votes`; if one of them fails so does the phase, because unanimity of
        the others is a laxer rule.
        """
        if not rubric:
            return Judged(value=())

        def parse(text: str, last: bool) -> Parsed[Scores]:
            return parse_scores(text, rubric)

        prompt = await asyncio.to_thread(score_prompt, self._prompts, trajectory, rubric)
        votes = await asyncio.gather(
            *(self._phase(Phase.SCORE, prompt, parse, context, vote) for vote in range(self._config.score_votes))
        )
        calls = tuple(call for vote in votes for call in vote.calls)
        notes = tuple(note for vote in votes for note in vote.notes)
        errors = [vote.error for vote in votes if vote.error is not None]
        if errors:
            return Judged(value=None, calls=calls, error=errors[0], notes=notes)
        return Judged(value=combine_votes([vote.value or () for vote in votes]), calls=calls, notes=notes)

    async def credit(
        self,
        trajectory: Trajectory,
        rubric: Sequence[Criterion],
        scores: Sequence[ScoredCriterion],
        context: CallContext,
        criteria: Sequence[int] | None = None,
    ) -> Judged[Attributions]:
        """The steps responsible for each verdict.

        Args:
            trajectory: one without a step needs no call: nothing can be cited.
            rubric: the group's.
            scores: one per criterion of ``rubric``.
            context: for the archive.
            criteria: indices into ``rubric`` to ask about, e.g. those that survived dropout; None asks about all.

        Returns: attributions whose ``criterion`` indexes into ``rubric``, whatever ``criteria`` was.
        """
        asked = range(len(rubric)) if criteria is None else criteria
        if not asked or not trajectory.steps:
            return Judged(value=())
        asked_rubric = [rubric[index] for index in asked]

        def parse(text: str, last: bool) -> Parsed[Attributions]:
            return parse_attributions(text, asked_rubric, len(trajectory.steps), lenient=last)

        asked_scores = [scores[index] for index in asked]
        prompt = await asyncio.to_thread(credit_prompt, self._prompts, trajectory, asked_rubric, asked_scores)
        judged = await self._phase(Phase.CREDIT, prompt, parse, context)
        if judged.value is None:
            return judged
        attributions = tuple(
            Attribution(
                criterion=asked[attribution.criterion],
                verdict=attribution.verdict,
                steps=attribution.steps,
                explanation=attribution.explanation,
            )
            for attribution in judged.value
        )
        return Judged(value=attributions, calls=judged.calls, notes=judged.notes)

    async def _phase(
        self,
        phase: Phase,
        prompt: str,
        parse: Callable[[str, bool], Parsed[ValueT]],
        context: CallContext,
        vote: int = 0,
        scope: str = "",
    ) -> Judged[ValueT]:
        """Ask, parse, ask again with the error quoted; ``parse`` is told when its answer is the last one."""
        messages: tuple[Message, ...] = (Message(role="user", content=prompt),)
        archived_prompt = prompt
        calls: list[JudgeCall] = []
        requests: list[Request] = []
        error = ""
        for attempt in range(1 + self._config.reasks):
            # A second try goes without the schema, should it be what misled the judge.
            schema = self._schemas[phase] if attempt == 0 else None
            request = Request(messages=messages, vote=vote, scope=scope, schema=schema, phase=phase)
            requests.append(request)
            completion = await self._complete(request)
            if completion.error is not None:
                error = completion.error
                calls.append(_call(phase, context, archived_prompt, completion, error))
                break
            try:
                # In a thread: what a judge writes is not to hold up the other calls.
                parsed = await asyncio.to_thread(_read, completion, parse, attempt == self._config.reasks)
            except ReplyError as problem:
                error = str(problem)
            else:
                calls.append(_call(phase, context, archived_prompt, completion, None))
                return Judged(value=parsed.value, calls=tuple(calls), notes=parsed.notes)
            calls.append(_call(phase, context, archived_prompt, completion, error))
            quoted = _shorten(completion.text) or "(empty)"
            reask = _reask(error)
            messages = (*messages, Message(role="assistant", content=quoted), Message(role="user", content=reask))
            archived_prompt = f"{archived_prompt}\n\n[REPLY]\n{quoted}\n\n[ASKED AGAIN]\n{reask}"
        for request in requests:
            await self._complete.forget(request)
        who = context.task_id if context.rollout is None else f"{context.task_id} rollout {context.rollout}"
        return Judged(
            value=None, calls=tuple(calls), error=f"{phase} of {who} failed after {len(calls)} calls: {error}"
        )


def build_judge(config: JudgeConfig, leases: Leases | None = None) -> Judge:
    """The judge a configuration describes, over LiteLLM; answers are kept if ``config.cache`` names a folder.

    ``leases`` are asked before every request; None: nothing is limited.

    Raises:
        ConfigError: the prompt set cannot be used.
    """
    from draco_ray.judging.client import LiteLLMClient
    from draco_ray.judging.reply_cache import ReplyCache

    cache = None if config.cache is None else ReplyCache(config.cache)
    return Judge(
        LiteLLMClient(config, cache, leases=leases), load_prompts(config.prompts, evidence_key(config.cache)), config
    )


def build_self_judge(config: JudgeConfig, samplers: Sequence[JudgeSampler], model_path: str) -> Judge:
    """The policy behind ``samplers`` as its own judge.

    Raises:
        ConfigError: the prompt set or the chat template cannot be used.
    """
    from transformers import AutoTokenizer

    from draco_ray.judging.self_judge import SelfJudgeClient

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    complete = SelfJudgeClient(samplers, tokenizer, config, model=f"self/{Path(model_path).name}")
    return Judge(complete, load_prompts(config.prompts, evidence_key(config.cache)), config)


def combine_votes(votes: Sequence[Scores]) -> Scores:
    """Join k scoring calls: a criterion passes only if every call passes it (appendix "Self-judge variants").

    It fails if any call fails it; passes and not-applicables without a fail make it not applicable, since nobody saw it
    violated. Evidence comes from the first call that gave the joint verdict.
    """
    combined = []
    for ballots in zip(*votes, strict=True):
        verdicts = {ballot.verdict for ballot in ballots}
        if Verdict.FAIL in verdicts:
            verdict = Verdict.FAIL
        elif verdicts == {Verdict.PASS}:
            verdict = Verdict.PASS
        else:
            verdict = Verdict.NOT_APPLICABLE
        combined.append(next(ballot for ballot in ballots if ballot.verdict is verdict))
    return tuple(combined)


def stage1_prompt(prompts: Prompts, prompt: Sequence[Message]) -> str:
    """What the judge sees in stage1."""
    # The same whenever the task comes again.
    code = prompts.code(f"{Phase.STAGE1} {[(message.role, message.content) for message in prompt]}")
    return prompts.fill(
        Phase.STAGE1, {"agent_prompt": render.agent_prompt(prompt, code), "task": render.task(prompt, code)}
    )


def stage2_prompt(prompts: Prompts, trajectory: Trajectory, existing: Sequence[Criterion]) -> str:
    """What the judge sees in stage2."""
    values = _trajectory_values(prompts, trajectory) | {"existing_rubrics": render.existing_rubrics(existing)}
    return prompts.fill(Phase.STAGE2, values)


def union_prompt(
    prompts: Prompts, prompt: Sequence[Message], candidates: Sequence[Criterion], trajectories: Sequence[Trajectory]
) -> str:
    """What the judge sees in the merge of a group's ``trajectories``, at least one."""
    code = prompts.code(trajectories[0].group)
    values = {
        "agent_prompt": render.agent_prompt(prompt, code),
        "task": render.task(prompt, code),
        "candidate_rubrics": render.candidate_rubrics(candidates),
        "group_trajectories": render.group_trajectories(trajectories, code),
    }
    return prompts.fill(Phase.UNION, values)


def score_prompt(prompts: Prompts, trajectory: Trajectory, rubric: Sequence[Criterion]) -> str:
    """What the judge sees in scoring."""
    return prompts.fill(Phase.SCORE, _trajectory_values(prompts, trajectory) | {"rubrics": render.rubrics(rubric)})


def credit_prompt(
    prompts: Prompts, trajectory: Trajectory, rubric: Sequence[Criterion], scores: Sequence[ScoredCriterion]
) -> str:
    """What the judge sees in step attribution."""
    values = _trajectory_values(prompts, trajectory) | {
        "steps_summary": render.steps_summary(trajectory, prompts.code(trajectory.group)),
        "num_steps": len(trajectory.steps),
        "num_rubrics": len(rubric),
        "rubric_scores": render.rubric_scores(rubric, scores),
    }
    return prompts.fill(Phase.CREDIT, values)


def _trajectory_values(prompts: Prompts, trajectory: Trajectory) -> dict[str, object]:
    code = prompts.code(trajectory.group)
    return {
        "agent_prompt": render.agent_prompt(trajectory.prompt, code),
        "task_input": render.task(trajectory.prompt, code),
        "agent_trajectory": render.agent_trajectory(trajectory, code),
    }


def _call(phase: Phase, context: CallContext, prompt: str, completion: Completion, error: str | None) -> JudgeCall:
    return JudgeCall(
        call_id=completion.call_id or uuid.uuid4().hex,
        phase=phase,
        group=context.group,
        task_id=context.task_id,
        rollout=context.rollout,
        model=completion.model,
        prompt=prompt,
        reply=completion.text,
        finish_reason=completion.finish_reason,
        input_tokens=completion.input_tokens,
        cached_tokens=completion.cached_tokens,
        output_tokens=completion.output_tokens,
        reasoning_tokens=completion.reasoning_tokens,
        dollars=completion.dollars,
        estimated_dollars=completion.estimated_dollars,
        paid=completion.paid,
        started_at=completion.started_at,
        seconds=completion.seconds,
        requests=completion.requests,
        error=error,
    )


def _read(completion: Completion, parse: Callable[[str, bool], Parsed[ValueT]], last: bool) -> Parsed[ValueT]:
    check_finish(completion.text, completion.finish_reason)
    return parse(completion.text, last)


def _reask(error: str) -> str:
    return (
        f"Your reply could not be used: {error}\n\n"
        "Answer the first message again, in full and in the format it asks for, with the complete JSON array only."
    )


def _shorten(text: str) -> str:
    if len(text) <= QUOTED_REPLY_CHARACTERS:
        return text
    half = QUOTED_REPLY_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"

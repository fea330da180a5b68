"""Ask the judge (Section "Dynamic Per-Trajectory Rubrics"): send the prompt, parse the reply, retry, or give up.

The phases are in `draco_ray.judging.phases`. An unusable reply raises nothing: the result is a `Judged` with a value or
the reason there is none, and all calls. Only a judge that cannot answer at all raises (`JudgeUnavailable`).

A content filter, or one rollout that is too long even if truncated, must not cost the other rollouts of a group their
rubric: a question about several rollouts that has no usable answer is asked again without those whose own stage2 call
failed. If the judge refused the question for its content, and refuses this one too, the rollouts are added one by one,
without those that make it refuse.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.endpoint import shared_ends
from draco_ray.judging.judge_context import QUOTED_REPLY_CHARACTERS
from draco_ray.judging.phases import Phase, Proposals, Question, Rubric, Score, Verdicts
from draco_ray.judging.prompt_fitter import FittedPrompt, PromptFitter
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.reply import Parsed, check_finish, extract_tagged_answer, tag_of
from draco_ray.judging.shortening import cut
from draco_ray.records import JudgeCall, Judged, Message, Verdict
from draco_ray.summaries import PhaseSummary
from draco_ray.workers.local import resolve

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

ValueT = TypeVar("ValueT")
Ask = Callable[[Question[ValueT]], Awaitable[Judged[ValueT]]]


def is_refused(judged: Judged[ValueT]) -> bool:
    """Whether a question was refused for its content: it does not fit, or the judge declined."""
    if judged.ok or not judged.calls:
        return not judged.ok
    last = judged.calls[-1]
    # A provider may also report an interrupted reply as an error.
    return last.finish_reason in ("content_filter", "refusal") or (last.finish_reason == "error" and not last.reply)


def is_unusable(judged: Judged[ValueT]) -> bool:
    """Whether the judge replied, but not usably: a refusal in prose, an empty, truncated or misdirected reply."""
    return not judged.ok and bool(judged.calls) and judged.calls[-1].finish_reason not in ("error", "unavailable")


async def ask_without_refused(question: Question[ValueT], whole: Judged[ValueT], ask: Ask[ValueT]) -> Judged[ValueT]:
    """The answer about as many of the question's rollouts as the judge accepts, with a note about the others.

    Args:
        question: about several rollouts.
        whole: the result for all of them.
        ask: asks about some of them.

    Returns: the answer; ``whole`` with all calls if the judge accepts no rollout.
    """
    calls, answer, shown = [*whole.calls], whole, list[int]()

    async def try_with(members: list[int]) -> bool:
        nonlocal answer, shown
        judged = await ask(question.only(members))
        calls.extend(judged.calls)
        if judged.ok:
            answer, shown = judged, members
        return judged.ok

    sure = [each for each in question.members if each not in question.doubtful] or [*question.members]
    if (len(sure) == len(question.members) or not await try_with(sure)) and is_refused(whole):
        for member in sure:
            # The judge was already asked about all rollouts of ``sure`` together, in vain.
            if len(shown) + 1 < len(sure):
                await try_with([*shown, member])
    if not shown:
        return replace(whole, calls=tuple(calls))
    without = ", ".join(str(each) for each in question.members if each not in shown)
    note = f"{question.name} was asked without rollout {without}, which the judge refused to read: {whole.error}"
    return replace(answer, calls=tuple(calls), notes=(note, *answer.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The subject of a call, as the archive records it."""

    group: str
    task_id: str
    rollout: int | None = None
    held_out: bool = False
    """Whether the held-out judge is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A finished judge phase: its result or a reference to it, and its summary."""

    judged: Any
    """The `Judged` without its calls: readers of verdicts do not need the prompts."""
    archived: Any
    """The `Judged` with its calls (prompts and replies), for the run store."""
    summary: PhaseSummary

    @property
    def ok(self) -> bool:
        """Whether the phase produced a value."""
        return self.summary.error is None


async def ask_phase(judge: Judge, phase: Phase, context: CallContext, /, **given: Any) -> Judgement:
    """Ask a question of ``phase``.

    Args:
        judge: who is asked.
        phase: class of the question.
        context: for the archive.
        given: fields of the question, or references. The result of another phase is replaced by its value, or by an
            empty one if it failed. A list may hold references, and the values of several phases become one sequence.
    """
    started = time.time()
    judged = await judge.ask(
        phase(**{name: await resolve_question_field(each) for name, each in given.items()}), context
    )
    summary = phase_summary(phase.name, context, judged, started)
    return Judgement(judged=replace(judged, calls=()), archived=judged, summary=summary)


async def resolve_question_field(given: Any) -> Any:
    """The value of a question's field, made from ``given`` as `ask_phase` describes."""
    given = await resolve(given)
    if isinstance(given, Judged):
        return given.value or ()
    if not isinstance(given, list):
        return given
    found = [await resolve(each) for each in given]
    if any(isinstance(each, Judged) for each in found):
        return [value for judged in found for value in judged.value or ()]
    return found


def phase_summary(phase: str, context: CallContext, judged: Judged[Any], started: float) -> PhaseSummary:
    """The driver's summary of a phase that began at ``started`` and ends now."""
    verdicts = [each.verdict for each in judged.value or ()] if phase in (Score.name, Verdicts.name) else []
    summed = ("requests", "input_tokens", "cached_tokens", "output_tokens", "dollars")
    return PhaseSummary(
        phase=phase,
        task_id=context.task_id,
        rollout=context.rollout,
        error=judged.error,
        criteria=len(judged.value or ()),
        calls=len(judged.calls),
        passed=verdicts.count(Verdict.PASS),
        applicable=len(verdicts) - verdicts.count(Verdict.NOT_APPLICABLE),
        prompt_cut=judged.left_out > 0,
        started_at=started,
        ended_at=time.time(),
        **{name: sum(getattr(call, name) for call in judged.calls) for name in summed},
    )


class Judge:
    """One judge model with one prompt set."""

    def __init__(
        self, complete: Completer, prompts: Prompts, config: JudgeConfig, replies: ReplyCache | None = None
    ) -> None:
        """``replies``: where ``complete`` stores its replies; None: nowhere."""
        self._complete = complete
        self._prompts = prompts
        self._config = config
        self._fitting = PromptFitter(config, prompts, replies)

    async def check(self) -> None:
        """Make sure that the judge answers.

        Raises:
            JudgeUnavailable: it does not.
        """
        await self._complete.check()

    async def ask(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        """Answer a question of any phase: its value, or the reason there is none, with all calls."""
        if isinstance(question, Proposals) and len(question.members) > 1 and await self._fitting.too_long(question):
            halves: Judged[Any] = await self._ask_halves(question, context)
            return halves
        return await self._ask_members(question, context)

    async def _ask_halves(self, question: Proposals, context: CallContext) -> Judged[Rubric]:
        """Ask about half of the rollouts, and then about the others together with the first proposals."""
        half = len(question.members) // 2
        first = await self._ask_members(question.only(question.members[:half]), context)
        rest = question.only(question.members[half:])
        second = await self._ask_members(replace(rest, candidates=[*rest.candidates, *(first.value or ())]), context)
        ok = first.ok or second.ok
        return Judged(
            value=(*(first.value or ()), *(second.value or ())) if ok else None,
            calls=(*first.calls, *second.calls),
            error=None if ok else first.error,
            notes=(*first.notes, *second.notes, *(each.error for each in (first, second) if ok and each.error)),
            left_out=first.left_out + second.left_out,
        )

    async def _ask_members(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        judged = await self._ask_fitting(question, context)
        doubted = question.doubtful and is_unusable(judged)
        if len(question.members) < 2 or not (is_refused(judged) or doubted):
            return judged
        return await ask_without_refused(question, judged, lambda some: self._ask_fitting(some, context))

    async def _ask_fitting(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        """Ask, truncated to the judge's context if necessary."""
        if (settled := question.settled()) is not None:
            return Judged(value=settled)
        try:
            fitted = await self._fitting.fit(question)
        except ReplyError as problem:
            return Judged(value=None, error=f"{question.name} of {_who(context)} failed: {problem}")
        calls: tuple[JudgeCall, ...] = ()
        tries = 0
        judged = await self._votes(fitted, context)
        while (shorter := await self._fitting.shorter(fitted, judged, tries)) is not None:
            calls, fitted, tries = (*calls, *judged.calls), shorter, tries + 1
            judged = await self._votes(fitted, context)
        if judged.ok:
            await self._fitting.answered(fitted, judged, tries)
        elif tries:
            judged = replace(judged, error=f"{judged.error} (asked {tries + 1} times with ever shorter prompts)")
        notes = judged.notes
        if fitted.left_out:
            about = f"{fitted.left_out:,} of {len(fitted.whole):,} characters were left out of the prompt"
            notes = (f"{about}, because the judge accepts only {self._fitting.reads}", *notes)
        return replace(judged, calls=(*calls, *judged.calls), notes=notes, left_out=fitted.left_out)

    async def _votes(self, fitted: FittedPrompt[ValueT], context: CallContext) -> Judged[ValueT]:
        """Ask for each vote of the phase, and join them."""
        question = fitted.shown
        votes = await asyncio.gather(
            *(self._vote(question, fitted.prompt, context, vote) for vote in range(question.votes(self._config)))
        )
        calls = tuple(call for vote in votes for call in vote.calls)
        notes = tuple(note for vote in votes for note in vote.notes)
        failed = next((vote for vote in votes if vote.error is not None), None)
        if failed is not None:
            return Judged(value=None, calls=calls, error=failed.error, notes=notes)
        values = [vote.value for vote in votes if vote.value is not None]
        return Judged(value=question.combine(values), calls=calls, notes=notes)

    async def _vote(self, question: Question[ValueT], prompt: str, context: CallContext, vote: int) -> Judged[ValueT]:
        """Ask and parse; after an unusable reply, ask again with the error quoted."""
        phase, scope = question.name, question.scope(self._config, context.group)
        shared = shared_ends(self._prompts, phase, prompt, self._prompts.code(question.identity))
        schema = question.schema(self._prompts.templates[phase], self._config)
        messages: tuple[Message, ...] = (Message(role="user", content=prompt),)
        archived_prompt = prompt
        calls: list[JudgeCall] = []
        requests: list[Request] = []
        error = ""
        for attempt in range(1 + self._config.reasks):
            request = Request(
                messages=messages,
                vote=vote,
                scope=scope,
                schema=schema,
                phase=phase,
                group=context.group,
                shared=shared,
            )
            requests.append(request)
            completion = await self._complete(request)
            if completion.error is not None:
                error = completion.error
                calls.append(_call(phase, context, archived_prompt, completion, error))
                break
            try:
                # In a thread: parsing a long reply must not block the other calls.
                parsed = await asyncio.to_thread(
                    _read, completion, question, tag_of(prompt), self._config, last=attempt == self._config.reasks
                )
            except ReplyError as problem:
                error = str(problem)
            else:
                calls.append(_call(phase, context, archived_prompt, completion, None))
                return Judged(value=parsed.value, calls=tuple(calls), notes=parsed.notes)
            if completion.finish_reason == "length":
                limit = f"judge.max_tokens={self._config.max_tokens:,}"
                error = f"{error} ({limit})"
                if not completion.text.strip():
                    error = f"reasoning used all of {limit}; raise judge.max_tokens, or lower judge.reasoning_effort"
            calls.append(_call(phase, context, archived_prompt, completion, error))
            if completion.finish_reason == "length" and not completion.text.strip():
                break  # A retry would use up judge.max_tokens again.
            quoted = cut(completion.text, QUOTED_REPLY_CHARACTERS) or "(empty)"
            reask = _reask(error)
            messages = (*messages, Message(role="assistant", content=quoted), Message(role="user", content=reask))
            archived_prompt = f"{archived_prompt}\n\n[REPLY]\n{quoted}\n\n[ASKED AGAIN]\n{reask}"
        for request in requests:
            await self._complete.forget(request)
        return Judged(
            value=None,
            calls=tuple(calls),
            error=f"{phase} of {_who(context)} failed after {len(calls)} calls: {error}",
        )


def _who(context: CallContext) -> str:
    return context.task_id if context.rollout is None else f"{context.task_id} rollout {context.rollout}"


_COPIED = {each.name for each in fields(JudgeCall)} & {each.name for each in fields(Completion)} - {"call_id", "error"}


def _call(phase: str, context: CallContext, prompt: str, completion: Completion, error: str | None) -> JudgeCall:
    return JudgeCall(
        call_id=completion.call_id or uuid.uuid4().hex,
        phase=phase,
        group=context.group,
        task_id=context.task_id,
        rollout=context.rollout,
        prompt=prompt,
        reply=completion.text,
        error=error,
        **{name: getattr(completion, name) for name in _COPIED},
    )


def _read(
    completion: Completion, question: Question[ValueT], tag: str, config: JudgeConfig, *, last: bool
) -> Parsed[ValueT]:
    check_finish(completion.text, completion.finish_reason)
    return question.parse(extract_tagged_answer(completion.text, tag, question.entry), config, last=last)


def _reask(error: str) -> str:
    return (
        f"Your reply could not be used: {error}\n\n"
        "Answer the first message again, in full and in the format it asks for, with the complete JSON only."
    )

"""Asking the judge (Section "Dynamic Per-Trajectory Rubrics"): prompt, ask, parse, ask once more, or give up.

What is asked is in `draco_ray.judging.phases`. No phase raises over a reply: it returns a `Judged` that holds either
its value or the reason there is none, and every call it made. Only a judge that cannot answer at all
(`JudgeUnavailable`) climbs.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import second_look
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.fitting import Fitted, Fitting
from draco_ray.judging.judge_context import QUOTED_REPLY_CHARACTERS
from draco_ray.judging.members import ask_without_refused, is_refused
from draco_ray.judging.phases.base import Question
from draco_ray.judging.phases.score import Score
from draco_ray.judging.prompt_cache import shared_ends
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.reply import Entry, Parsed, check_finish, own_answer
from draco_ray.judging.structured import tag_of
from draco_ray.records import JudgeCall, Judged, Message

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a call is for, as the archive records it."""

    group: str
    task_id: str
    rollout: int | None = None


class Judge:
    """One judge model with one prompt set."""

    def __init__(
        self, complete: Completer, prompts: Prompts, config: JudgeConfig, replies: ReplyCache | None = None
    ) -> None:
        """``replies``: where ``complete`` keeps its answers; None: nowhere."""
        self._complete = complete
        self._prompts = prompts
        self._config = config
        self._fitting = Fitting(config, prompts, replies)

    async def check(self) -> None:
        """Make sure that the judge answers.

        Raises:
            JudgeUnavailable: it does not.
        """
        await self._complete.check()

    async def ask(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        """Answer a question of any phase: its value, or the reason there is none, with every call that was made."""
        judged = await self._ask_fitting(question, context)
        if len(question.members) < 2 or not is_refused(judged):
            return judged
        return await ask_without_refused(question, judged, lambda some: self._ask_fitting(some, context))

    async def _ask_fitting(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        """Ask with as much of what the question shows as the judge reads."""
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
            judged = replace(judged, error=f"{judged.error} (asked {tries + 1} times, with less of it each time)")
        notes = judged.notes
        if fitted.left_out:
            about = f"{fitted.left_out:,} of {len(fitted.whole):,} characters were left out of its prompt"
            notes = (f"{about}: the judge reads {self._fitting.reads}", *notes)
        return replace(judged, calls=(*calls, *judged.calls), notes=notes, left_out=fitted.left_out)

    async def _votes(self, fitted: Fitted[ValueT], context: CallContext) -> Judged[ValueT]:
        """Ask as often as the phase wants votes, and join them."""
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
        judged = Judged(value=question.combine(values), calls=calls, notes=notes)
        looks = second_look.sampled(self._config.second_look, context.group, context.rollout)
        return await self._looked_at(judged, question, context) if isinstance(question, Score) and looks else judged

    async def _looked_at(self, judged: Judged[Any], question: Score, context: CallContext) -> Judged[Any]:
        """``judged``, and how many of its scores contradict their own justifications; nothing where that call fails."""
        scores: Any = judged.value
        request = second_look.request(question.rubric, scores, context.group)
        completion = await self._complete(request)
        error = completion.error
        found = 0
        if error is None:
            try:
                reply = _answer(completion, tag_of(request.messages[0].content), second_look.LookEntry)
                found = second_look.contradictions(reply, question.rubric, scores)
            except ReplyError as problem:
                error = str(problem)
        call = _call(second_look.NAME, context, request.messages[0].content, completion, error)
        looked_at = len(question.rubric) if error is None else 0
        return replace(judged, calls=(*judged.calls, call), looked_at=looked_at, contradicted=found)

    async def _vote(self, question: Question[ValueT], prompt: str, context: CallContext, vote: int) -> Judged[ValueT]:
        """Ask, parse, ask again with the error quoted."""
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
                # In a thread: reading a long reply must not hold up the other calls.
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
                    error = f"all of {limit} went to reasoning; raise it, or lower judge.reasoning_effort"
            calls.append(_call(phase, context, archived_prompt, completion, error))
            if completion.finish_reason == "length" and not completion.text.strip():
                break  # Asked again, it would think as long.
            quoted = _shorten(completion.text) or "(empty)"
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


def _call(phase: str, context: CallContext, prompt: str, completion: Completion, error: str | None) -> JudgeCall:
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
        waited_seconds=completion.waited_seconds,
        requests=completion.requests,
        error=error,
    )


def _answer(completion: Completion, tag: str, entry: type[Entry]) -> str:
    check_finish(completion.text, completion.finish_reason)
    return own_answer(completion.text, tag, entry)


def _read(
    completion: Completion, question: Question[ValueT], tag: str, config: JudgeConfig, *, last: bool
) -> Parsed[ValueT]:
    return question.parse(_answer(completion, tag, question.entry), config, last=last)


def _reask(error: str) -> str:
    return (
        f"Your reply could not be used: {error}\n\n"
        "Answer the first message again, in full and in the format it asks for, with the complete JSON only."
    )


def _shorten(text: str) -> str:
    if len(text) <= QUOTED_REPLY_CHARACTERS:
        return text
    half = QUOTED_REPLY_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"

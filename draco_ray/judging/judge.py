"""Ask the judge (Section "Dynamic Per-Trajectory Rubrics"): send the prompt, parse the reply, retry, or give up.

The phases are in `draco_ray.judging.phases`. An unusable reply raises nothing: the result is a `Judged` with a value or
the reason there is none, and all calls. Only a judge that cannot answer at all raises (`JudgeUnavailable`).

A content filter, or one rollout that is too long even if truncated, must not cost the other rollouts of a group their
rubric: a question about several rollouts is asked again without those that the judge refuses. Rollouts whose own stage2
call failed are left out first, which takes one more call. Otherwise bisection finds the refused ones: some rollouts are
added to the accepted ones, and split if the judge refuses them; the last accepted answer counts. One refused rollout of
eight takes at most 6 more calls; after `MOST_CALLS` the rest is left out.

For a sample of rollouts one more call (``judge.second_look``) shows the judge its own notes without the verdicts, and
asks which verdict they argue for. The result is a rate in the metrics and the report; it changes no verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from draco_ray.config.load import project_file
from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.fitting import Fitted, Fitting
from draco_ray.judging.judge_context import QUOTED_REPLY_CHARACTERS
from draco_ray.judging.phases import Proposals, Question, Rubric, Score
from draco_ray.judging.prompt_cache import shared_ends
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.render import json_text
from draco_ray.judging.reply import Entry, Parsed, RubricEntry, align, check_finish, own_answer, read_entries
from draco_ray.judging.structured import reply_schema, tag_of, with_tag
from draco_ray.records import Criterion, JudgeCall, Judged, Message, ScoredCriterion

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

MOST_CALLS = 12
"""Maximum number of further questions, each about a part of the rollouts."""

ValueT = TypeVar("ValueT")
Ask = Callable[[Question[ValueT]], Awaitable[Judged[ValueT]]]


def is_refused(judged: Judged[ValueT]) -> bool:
    """Whether a question was refused for its content: it does not fit, or the judge declined."""
    if judged.ok or not judged.calls:
        return not judged.ok
    last = judged.calls[-1]
    # A provider may also report an interrupted reply as an error.
    return last.finish_reason in ("content_filter", "refusal") or (last.finish_reason == "error" and not last.reply)


async def ask_without_refused(question: Question[ValueT], whole: Judged[ValueT], ask: Ask[ValueT]) -> Judged[ValueT]:
    """The answer about as many of the question's rollouts as the judge accepts, with a note about the others.

    Args:
        question: about several rollouts.
        whole: the result for all of them.
        ask: asks about some of them.

    Returns: the answer; ``whole`` with all calls if the judge accepts no rollout.
    """
    search = _Search(question, ask)
    sure = [each for each in question.members if each not in question.doubtful]
    others = sure or question.members
    await search.add(others, refused=len(others) == len(question.members))
    calls = (*whole.calls, *search.calls)
    if search.answer is None:
        return replace(whole, calls=calls)
    without = ", ".join(str(each) for each in question.members if each not in search.shown)
    note = f"{question.name} was asked without rollout {without}, for which the judge refused it: {whole.error}"
    return replace(search.answer, calls=calls, notes=(note, *search.answer.notes))


class _Search(Generic[ValueT]):
    """Bisection for the rollouts that the judge accepts."""

    def __init__(self, question: Question[ValueT], ask: Ask[ValueT]) -> None:
        self._question, self._ask = question, ask
        self._asked = 0
        self.shown: list[int] = []
        self.answer: Judged[ValueT] | None = None
        self.calls: list[JudgeCall] = []

    async def add(self, part: Sequence[int], *, refused: bool) -> bool:
        """Add as many rollouts of ``part`` as possible; returns whether all were added.

        Args:
            part: rollouts.
            refused: whether the judge has already refused the accepted rollouts together with all of these.
        """
        if not refused:
            if self._asked == MOST_CALLS:
                return False
            judged = await self._ask(self._question.only([*self.shown, *part]))
            self._asked += 1
            self.calls += judged.calls
            if judged.ok:
                self.shown, self.answer = [*self.shown, *part], judged
                return True
        if len(part) < 2:
            return False
        half = len(part) // 2
        first = await self.add(part[:half], refused=False)
        await self.add(part[half:], refused=first)
        return False


SECOND_LOOK = "second_look"
"""Phase name of second-look calls in the archive and in cost tables."""
PROMPT = Path("prompts/second_look.txt")


class LookEntry(RubricEntry):
    """The verdict that a criterion's notes argue for."""

    decides = ("verdict",)
    verdict: Literal["PASS", "FAIL", "NOT_APPLICABLE", "UNCLEAR"]


def in_sample(share: float, group: str, rollout: int | None) -> bool:
    """Whether a rollout belongs to the sample; deterministic.

    Args:
        share: sampled share of all rollouts, 0 .. 1.
        group: the rollout's group.
        rollout: its index in the group; None: whether the group belongs to a sample of groups.
    """
    digest = hashlib.blake2b(f"{group}/{rollout}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") < share * 2**56


def second_look_request(rubric: Sequence[Criterion], scores: Sequence[ScoredCriterion], group: str) -> Request:
    """The request about the notes of the scores, one per criterion."""
    template = project_file(PROMPT).read_text(encoding="utf-8")
    notes = [
        {
            "rubric_index": index,
            "rubric_title": criterion.title,
            "evaluator_instruction": criterion.evaluator_instruction,
            "evidence": score.evidence,
            "justification": score.justification,
        }
        for index, (criterion, score) in enumerate(zip(rubric, scores, strict=True))
    ]
    prompt = with_tag(template.replace("{{ notes }}", json_text(notes)))
    schema = reply_schema(LookEntry, template, least=len(rubric), most=len(rubric))
    return Request(messages=(Message(role="user", content=prompt),), schema=schema, phase=SECOND_LOOK, group=group)


def count_contradictions(text: str, rubric: Sequence[Criterion], scores: Sequence[ScoredCriterion]) -> int:
    """Number of scores whose own notes argue for another verdict; unclear notes do not count.

    Raises:
        ReplyError: not exactly one entry per criterion.
    """
    entries, _ = align(read_entries(text, LookEntry, len(rubric), last=True).value, rubric)
    return sum(
        entry.verdict not in ("UNCLEAR", score.verdict.name) for entry, score in zip(entries, scores, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The subject of a call, as the archive records it."""

    group: str
    task_id: str
    rollout: int | None = None
    held_out: bool = False
    """Whether the held-out judge is asked."""


class Judge:
    """One judge model with one prompt set."""

    def __init__(
        self, complete: Completer, prompts: Prompts, config: JudgeConfig, replies: ReplyCache | None = None
    ) -> None:
        """``replies``: where ``complete`` stores its replies; None: nowhere."""
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
        if len(question.members) < 2 or not is_refused(judged):
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
            judged = replace(judged, error=f"{judged.error} (asked {tries + 1} times, with less of it each time)")
        notes = judged.notes
        if fitted.left_out:
            about = f"{fitted.left_out:,} of {len(fitted.whole):,} characters were left out of its prompt"
            notes = (f"{about}: the judge reads {self._fitting.reads}", *notes)
        return replace(judged, calls=(*calls, *judged.calls), notes=notes, left_out=fitted.left_out)

    async def _votes(self, fitted: Fitted[ValueT], context: CallContext) -> Judged[ValueT]:
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
        judged = Judged(value=question.combine(values), calls=calls, notes=notes)
        looks = in_sample(self._config.second_look, context.group, context.rollout)
        return await self._looked_at(judged, question, context) if isinstance(question, Score) and looks else judged

    async def _looked_at(self, judged: Judged[Any], question: Score, context: CallContext) -> Judged[Any]:
        """``judged`` with the number of scores that contradict their own notes; unchanged if that call fails."""
        scores: Any = judged.value
        request = second_look_request(question.rubric, scores, context.group)
        completion = await self._complete(request)
        error = completion.error
        found = 0
        if error is None:
            try:
                reply = _answer(completion, tag_of(request.messages[0].content), LookEntry)
                found = count_contradictions(reply, question.rubric, scores)
            except ReplyError as problem:
                error = str(problem)
        call = _call(SECOND_LOOK, context, request.messages[0].content, completion, error)
        looked_at = len(question.rubric) if error is None else 0
        return replace(judged, calls=(*judged.calls, call), looked_at=looked_at, contradicted=found)

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
                    error = f"all of {limit} went to reasoning; raise it, or lower judge.reasoning_effort"
            calls.append(_call(phase, context, archived_prompt, completion, error))
            if completion.finish_reason == "length" and not completion.text.strip():
                break  # A retry would reason just as long.
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

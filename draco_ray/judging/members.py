"""A question that shows several rollouts, asked without those for which the judge refuses it.

A content filter, or a rollout that is too long whatever is cut, must not cost the others their rubric. Rollouts whose
own stage2 call failed are left out first, which takes one more call. Otherwise those that are refused are found by
halving: a part is added to what the judge has accepted, and split where that is refused. So the last accepted answer is
the one that counts. One refused rollout of eight takes 6 more calls at most, and there are never more than
`MOST_CALLS`; what is not shown by then is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from draco_ray.judging.phases.base import Question
from draco_ray.records import JudgeCall, Judged

MOST_CALLS = 12
"""Times that the question is asked again, each with less than all of its rollouts."""

ValueT = TypeVar("ValueT")
Ask = Callable[[Question[ValueT]], Awaitable[Judged[ValueT]]]


def is_refused(judged: Judged[ValueT]) -> bool:
    """Whether a question was refused for what it shows: it does not fit, or the judge declined."""
    if judged.ok or not judged.calls:
        return not judged.ok
    last = judged.calls[-1]
    # A provider may call it an error, too, that it broke a reply off.
    return last.finish_reason in ("content_filter", "refusal") or (last.finish_reason == "error" and not last.reply)


async def ask_without_refused(question: Question[ValueT], whole: Judged[ValueT], ask: Ask[ValueT]) -> Judged[ValueT]:
    """The answer about as many of the question's rollouts as the judge accepts, with a note of the others.

    Args:
        question: about several.
        whole: what came of asking about all of them.
        ask: asks about some.

    Returns: ``whole`` with all calls where it accepts none of them.
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
    """The rollouts that the judge has accepted, and its answer about them."""

    def __init__(self, question: Question[ValueT], ask: Ask[ValueT]) -> None:
        self._question, self._ask = question, ask
        self._asked = 0
        self.shown: list[int] = []
        self.answer: Judged[ValueT] | None = None
        self.calls: list[JudgeCall] = []

    async def add(self, part: Sequence[int], *, refused: bool) -> bool:
        """Add what can be added of ``part``; returns whether that is all of it.

        Args:
            part: rollouts.
            refused: whether the judge has refused what is shown together with all of them.
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

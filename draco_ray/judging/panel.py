"""Several judges: a vote, a stronger one where cheap ones disagree, and others in the place of one that fails.

========================  ==========================================================================================
``judge.jury``            scores with the judge; the verdict of most counts, the judge's own where none has most
``judge.strong``          is asked about the criteria only on which judge and jury differ, and decides these
``judge.fallbacks``       are asked in turn what the judge could not answer
========================  ==========================================================================================

All other phases are the judge's own. Every call is in the archive under the model that answered it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from draco_ray.config.schema import JudgeConfig, LocalJudgeConfig, OtherJudgeConfig
from draco_ray.errors import BudgetSpent, JudgeUnavailable
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Question, Score, Scores
from draco_ray.judging.pricing import check_budget
from draco_ray.judging.prompts import Prompts
from draco_ray.records import Judged, ScoredCriterion

if TYPE_CHECKING:
    from draco_ray.judging.reply_cache import ReplyCache

AWAY_SECONDS = 60.0
"""For which a judge that was not there is not asked again, where another one answers."""

ValueT = TypeVar("ValueT")


class Panel(Judge):
    """A judge with a jury."""

    def __init__(
        self,
        complete: Completer,
        prompts: Prompts,
        config: JudgeConfig,
        replies: ReplyCache | None,
        jury: Sequence[Judge],
        strong: Judge | None,
    ) -> None:
        """The first four are those of `Judge`."""
        super().__init__(complete, prompts, config, replies)
        self._jury, self._strong = tuple(jury), strong

    async def check(self) -> None:
        """Make sure that all of them answer.

        Raises:
            JudgeUnavailable: one does not.
        """
        await super().check()
        for judge in (*self._jury, *([self._strong] if self._strong is not None else [])):
            await judge.check()

    async def ask(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        """`Judge.ask`; scores are the panel's."""
        if not isinstance(question, Score) or question.settled() is not None:
            return await super().ask(question, context)
        found: Judged[Any] = await self._score(question, context)
        return found

    async def _score(self, question: Score, context: CallContext) -> Judged[Scores]:
        ballots: list[Judged[Scores]] = await asyncio.gather(
            super().ask(question, context), *(judge.ask(question, context) for judge in self._jury)
        )
        calls = tuple(call for ballot in ballots for call in ballot.calls)
        notes = [note for ballot in ballots for note in ballot.notes]
        looks = ("looked_at", "contradicted")
        noted: dict[str, Any] = {name: sum(getattr(each, name) for each in ballots) for name in looks}
        noted["left_out"] = max(ballot.left_out for ballot in ballots)
        # A judge whose call failed has no vote; a note says so.
        notes += [f"no vote: {ballot.error}" for ballot in ballots if ballot.error is not None]
        valid = [ballot.value for ballot in ballots if ballot.value is not None]
        if not valid:
            return Judged(value=None, calls=calls, error=ballots[0].error, notes=tuple(notes), **noted)
        scores = [majority(votes) for votes in zip(*valid, strict=True)]
        split = [i for i, votes in enumerate(zip(*valid, strict=True)) if len({each.verdict for each in votes}) > 1]
        if self._strong is None or not split:
            return Judged(value=tuple(scores), calls=calls, notes=tuple(notes), **noted)
        asked = Score(question.trajectory, [question.rubric[index] for index in split])
        decided = await self._strong.ask(asked, context)
        calls += decided.calls
        if decided.value is None:
            notes.append(f"the vote stands, the strong judge did not answer: {decided.error}")
        else:
            for index, score in zip(split, decided.value, strict=True):
                scores[index] = score
        return Judged(value=tuple(scores), calls=calls, notes=tuple(notes), **noted)


def majority(votes: Sequence[ScoredCriterion]) -> ScoredCriterion:
    """The first vote with the verdict of most; the first one where no verdict has most."""
    counts = Counter(vote.verdict for vote in votes)
    most = [verdict for verdict, count in counts.items() if count == max(counts.values())]
    verdict = most[0] if len(most) == 1 else votes[0].verdict
    return next(vote for vote in votes if vote.verdict is verdict)


class Fallbacks:
    """A `Completer` that asks others in turn what the first could not answer."""

    def __init__(self, completes: Sequence[Completer], clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is for tests."""
        self._completes, self._clock = tuple(completes), clock
        self._away: dict[int, float] = {}

    async def __call__(self, request: Request) -> Completion:
        """The first answer that is one.

        Raises:
            JudgeUnavailable: the last of them is away as well; BudgetSpent at once.
        """
        paid = 0.0
        for index, complete in enumerate(self._completes):
            last = index == len(self._completes) - 1
            if not last and self._clock() < self._away.get(index, 0.0):
                continue
            try:
                completion = await complete(request)
            except BudgetSpent:
                raise
            except JudgeUnavailable:
                if last:
                    raise
                self._away[index] = self._clock() + AWAY_SECONDS
                continue
            if completion.error is None or last:
                return _dearer(completion, paid)
            paid += completion.dollars
        raise AssertionError("the last one answers or raises")

    async def forget(self, request: Request) -> None:
        """Drop it wherever it is kept."""
        for complete in self._completes:
            await complete.forget(request)

    async def check(self) -> None:
        """Make sure that one of them answers.

        Raises:
            JudgeUnavailable: none does.
        """
        for index, complete in enumerate(self._completes):
            try:
                await complete.check()
            except JudgeUnavailable:
                if index == len(self._completes) - 1:
                    raise
                self._away[index] = self._clock() + AWAY_SECONDS
            else:
                return


def _dearer(completion: Completion, dollars: float) -> Completion:
    """The completion with what the judges before it may have cost."""
    return replace(
        completion,
        dollars=completion.dollars + dollars,
        estimated_dollars=completion.estimated_dollars + dollars,
    )


def other(config: JudgeConfig, judge: OtherJudgeConfig) -> JudgeConfig:
    """The configuration of another judge: its model and endpoint, everything else as of the first."""
    return config.model_copy(
        update={
            "model": judge.model,
            "api_base": judge.api_base,
            "api_key_env": judge.api_key_env,
            "extra_body": {},
            "context_tokens": None,
            "local": LocalJudgeConfig(),
            "jury": (),
            "strong": None,
            "fallbacks": (),
        }
    )


def with_fallbacks(config: JudgeConfig, open_one: Callable[[JudgeConfig], Completer]) -> Completer:
    """What answers for a configuration: the judge, with those that stand in for it.

    Raises:
        ConfigError: a budget, and no price of one of the judges: what it is asked would count nothing.
    """
    beside = (*config.jury, *([config.strong] if config.strong is not None else []), *config.fallbacks)
    for each in beside:
        check_budget(other(config, each), each.model)
    if not config.fallbacks:
        return open_one(config)
    # Only the last judge of the list is waited for while it does not answer.
    models = [config, *(other(config, each) for each in config.fallbacks)]
    impatient = [each.model_copy(update={"max_outage_seconds": 0.0}) for each in models[:-1]]
    return Fallbacks([open_one(each) for each in [*impatient, models[-1]]])


def panel_judge(
    config: JudgeConfig,
    prompts: Prompts,
    complete: Completer,
    open_one: Callable[[JudgeConfig], Completer],
    replies: ReplyCache | None = None,
) -> Judge:
    """The judge of a configuration, with its jury where it has one.

    Args:
        complete: answers for the judge itself.
        open_one: opens what answers for another.
        replies: where they keep their answers; None: nowhere.
    """
    if not config.jury and config.strong is None:
        return Judge(complete, prompts, config, replies)

    def judge_of(judge: OtherJudgeConfig) -> Judge:
        theirs = other(config, judge)
        return Judge(open_one(theirs), prompts, theirs, replies)

    strong = None if config.strong is None else judge_of(config.strong)
    return Panel(complete, prompts, config, replies, [judge_of(each) for each in config.jury], strong)

"""Several judges: a jury that votes, a strong judge that breaks ties, and fallbacks.

========================  ==========================================================================================
``judge.jury``            scores too; the majority verdict counts, or the judge's own if there is no majority
``judge.strong``          decides the criteria on which judge and jury differ
``judge.fallbacks``       are asked in turn if the judge does not answer
========================  ==========================================================================================

Jury and strong judge take part in the phases ``score`` and ``verdicts`` only. Every call is in the archive under the
model that answered it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from draco_ray.config.schema import JudgeConfig, LocalJudgeConfig, OtherJudgeConfig, RuleJudgeConfig
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
"""Time for which an unavailable judge is not asked again while a fallback answers."""

ValueT = TypeVar("ValueT")


class Panel(Judge):
    """A judge that votes together with a jury; a strong judge, if configured, decides where their verdicts differ."""

    def __init__(
        self,
        complete: Completer,
        prompts: Prompts,
        config: JudgeConfig,
        replies: ReplyCache | None,
        jury: Sequence[Judge],
        strong: Judge | None,
    ) -> None:
        """The first four arguments are those of `Judge`."""
        super().__init__(complete, prompts, config, replies)
        self._jury, self._strong = tuple(jury), strong

    async def check(self) -> None:
        """Make sure that the judge, its jury and the strong judge answer.

        Raises:
            JudgeUnavailable: one of them does not.
        """
        await super().check()
        for judge in (*self._jury, *([self._strong] if self._strong is not None else [])):
            await judge.check()

    async def ask(self, question: Question[ValueT], context: CallContext) -> Judged[ValueT]:
        """Like `Judge.ask`, but the whole panel gives the scores."""
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
        left_out = max(ballot.left_out for ballot in ballots)
        # A judge whose call failed has no vote; a note says so.
        notes += [f"one judge gave no verdicts: {ballot.error}" for ballot in ballots if ballot.error is not None]
        valid = [ballot.value for ballot in ballots if ballot.value is not None]
        scores = [majority(votes) for votes in zip(*valid, strict=True)]
        split = [i for i, votes in enumerate(zip(*valid, strict=True)) if len({each.verdict for each in votes}) > 1]
        if self._strong is not None and split:
            asked = replace(question, rubric=[question.rubric[index] for index in split])
            decided = await self._strong.ask(asked, context)
            calls += decided.calls
            if decided.value is None:
                notes.append(f"the strong judge did not answer, so the majority's verdicts count: {decided.error}")
            else:
                for index, score in zip(split, decided.value, strict=True):
                    scores[index] = score
        value, error = (tuple(scores), None) if valid else (None, ballots[0].error)
        return Judged(value=value, calls=calls, error=error, notes=tuple(notes), left_out=left_out)


def majority(votes: Sequence[ScoredCriterion]) -> ScoredCriterion:
    """The first vote with the most frequent verdict; the first vote if several verdicts are equally frequent."""
    counts = Counter(vote.verdict for vote in votes)
    most = [verdict for verdict, count in counts.items() if count == max(counts.values())]
    verdict = most[0] if len(most) == 1 else votes[0].verdict
    return next(vote for vote in votes if vote.verdict is verdict)


class Fallbacks:
    """A `Completer` that asks others in turn if the first does not answer."""

    def __init__(self, completes: Sequence[Completer], clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is for tests."""
        self._completes, self._clock = tuple(completes), clock
        self._away: dict[int, float] = {}

    async def __call__(self, request: Request) -> Completion:
        """The first answer.

        Raises:
            JudgeUnavailable: the last fallback is unavailable, too.
            BudgetSpent: the budget is spent; no fallback is asked.
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
                # Judges that were asked before and answered with an error may have billed the request: add their cost.
                dollars, estimated = completion.dollars + paid, completion.estimated_dollars + paid
                return replace(completion, dollars=dollars, estimated_dollars=estimated)
            paid += completion.dollars
        raise AssertionError("the last fallback returned no completion and raised no error")

    async def forget(self, request: Request) -> None:
        """Drop the stored reply of every judge to this request."""
        for complete in self._completes:
            await complete.forget(request)

    async def check(self) -> None:
        """Make sure that the judge or one of its fallbacks answers.

        Raises:
            JudgeUnavailable: none of them answers.
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


def member_config(config: JudgeConfig, judge: OtherJudgeConfig) -> JudgeConfig:
    """The configuration of an additional judge: of the jury, the strong judge, a fallback or the held-out judge.

    Model, endpoint and key are those of ``judge``. Settings that only describe the run's own judge have their defaults.
    Among them is ``rule_judge``, because replies of a rule judge are stored without their endpoint. All other settings
    are those of ``config``.
    """
    return config.model_copy(
        update={
            "model": judge.model,
            "api_base": judge.api_base,
            "api_key_env": judge.api_key_env,
            "extra_body": {},
            "context_tokens": None,
            "local": LocalJudgeConfig(),
            "rule_judge": RuleJudgeConfig(),
            "jury": (),
            "strong": None,
            "fallbacks": (),
            "held_out": None,
        }
    )


def with_fallbacks(config: JudgeConfig, open_one: Callable[[JudgeConfig], Completer]) -> Completer:
    """The completer of a configuration: the judge with its fallbacks.

    Raises:
        ConfigError: there is a budget, and the price of one of the judges is unknown.
    """
    beside = (*config.jury, *([config.strong] if config.strong is not None else []), *config.fallbacks)
    for each in beside:
        check_budget(member_config(config, each), each.model)
    if not config.fallbacks:
        return open_one(config)
    # Only calls to the last judge wait for the end of its outage.
    models = [config, *(member_config(config, each) for each in config.fallbacks)]
    impatient = [each.model_copy(update={"max_outage_seconds": 0.0}) for each in models[:-1]]
    return Fallbacks([open_one(each) for each in [*impatient, models[-1]]])


def panel_judge(
    config: JudgeConfig,
    prompts: Prompts,
    complete: Completer,
    open_one: Callable[[JudgeConfig], Completer],
    replies: ReplyCache | None = None,
) -> Judge:
    """The judge of a configuration, with its jury if it has one.

    Args:
        complete: completer of the judge itself.
        open_one: opens the completer of another judge.
        replies: the reply store; None if replies are not stored.
    """
    if not config.jury and config.strong is None:
        return Judge(complete, prompts, config, replies)

    def judge_of(judge: OtherJudgeConfig) -> Judge:
        theirs = member_config(config, judge)
        return Judge(open_one(theirs), prompts, theirs, replies)

    strong = None if config.strong is None else judge_of(config.strong)
    return Panel(complete, prompts, config, replies, [judge_of(each) for each in config.jury], strong)

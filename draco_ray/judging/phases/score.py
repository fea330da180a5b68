"""Score: a verdict on every criterion for one rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.parsing import Parsed, Remark, RubricEntry, VerdictName, align, read_entries
from draco_ray.judging.phases.base import INTEGER, TEXT, JsonSchema, Question, Scores, trajectory_values
from draco_ray.judging.phases.contradiction import other_verdict
from draco_ray.judging.reply_json import integer
from draco_ray.judging.shortening import shortened
from draco_ray.records import Criterion, ScoredCriterion, Trajectory, Verdict
from draco_ray.runs.rows import Row, verdict_rows

WHICH = {"rubric_index": INTEGER, "rubric_title": TEXT}
_SCORE: JsonSchema = {"type": "integer", "enum": [-1, 0, 1]}


@dataclass(frozen=True, slots=True)
class Score(Question[Scores]):
    """Judge a rollout by every criterion of ``rubric``, in its order; an empty rubric needs no call.

    With k = ``judge.score_votes`` calls see `combine_votes`; if one of them fails so does the phase, because unanimity
    of the others is a laxer rule.
    """

    trajectory: Trajectory
    rubric: Sequence[Criterion]

    name = "score"
    template = "score_rubrics.txt"
    placeholders = frozenset({"agent_prompt", "task_input", "agent_trajectory", "rubrics"})
    required = (frozenset({"agent_trajectory"}), frozenset({"rubrics"}))
    reply_fields = WHICH | {"evidence": TEXT, "justification": TEXT, "score": _SCORE}

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(self, trajectory=shortened(self.trajectory, level))

    @property
    def identity(self) -> str:
        """The group, whose prompts begin alike."""
        return self.trajectory.group

    def values(self, code: str) -> Mapping[str, object]:
        """The rollout and the rubric."""
        return trajectory_values(self.trajectory, code) | {"rubrics": render.rubrics(self.rubric)}

    def settled(self) -> Scores | None:
        """An empty answer where there is no criterion."""
        return None if self.rubric else ()

    def votes(self, config: JudgeConfig) -> int:
        """As many calls as ``judge.score_votes`` says."""
        return config.score_votes

    def combine(self, votes: Sequence[Scores]) -> Scores:
        """Join the votes (`combine_votes`)."""
        return combine_votes(votes)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Scores]:
        """Read a reply (`parse_scores`)."""
        return parse_scores(text, self.rubric)

    @classmethod
    def rows(cls, step: int, task_id: str, rollout: int | None, value: Scores) -> tuple[str, list[Row]] | None:
        """One row per verdict."""
        return None if rollout is None else ("verdicts", verdict_rows(step, task_id, rollout, value))

    @classmethod
    def example(cls) -> Score:
        """A question about the example's first rollout."""
        from draco_ray.judging.example import RUBRIC, example_trajectory

        return cls(example_trajectory(), RUBRIC)


class ScoreEntry(RubricEntry):
    """A verdict as the judge writes it."""

    score: Annotated[Literal[-1, 0, 1], BeforeValidator(integer)]
    verdict: VerdictName | None = None
    """Not asked for; where a judge adds it, it must say the same."""
    evidence: Remark = ""
    justification: Remark = ""

    def contradiction(self) -> str | None:
        """What else of the entry says another verdict than its score."""
        score = Verdict(self.score)
        if self.verdict is not None and Verdict[self.verdict] != score:
            return f"verdict {self.verdict}"
        return other_verdict(score, self.justification, self.model_extra or {})


def parse_scores(text: str, rubric: Sequence[Criterion]) -> Parsed[Scores]:
    """Read the verdicts on a rubric, in the rubric's order.

    Raises:
        ReplyError: not exactly one entry per criterion, or a score outside -1, 0, 1.
    """
    entries = read_entries(text, ScoreEntry)
    order, notes = align(entries, rubric)
    for position, entry in enumerate(entries):
        if (other := entry.contradiction()) is not None:
            raise ReplyError(f"entry {position}: score {entry.score} and {other} contradict each other")
    return Parsed(
        value=tuple(
            ScoredCriterion(
                verdict=Verdict(entries[position].score),
                evidence=entries[position].evidence,
                justification=entries[position].justification,
            )
            for position in order
        ),
        notes=notes,
    )


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

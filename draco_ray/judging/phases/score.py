"""Score: a verdict on every criterion for one rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.phases.base import Question, Scores, trajectory_values
from draco_ray.judging.reply import Parsed, Remark, RubricEntry, ScoreValue, align, read_entries
from draco_ray.judging.shortening import shortened
from draco_ray.judging.structured import JsonSchema, reply_schema
from draco_ray.records import Criterion, ScoredCriterion, Trajectory, Verdict


class ScoreEntry(RubricEntry):
    """A verdict as the judge writes it."""

    decides = ("score",)
    evidence: Remark = ""
    justification: Remark = ""
    score: ScoreValue


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
    entry = ScoreEntry

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

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """One entry a criterion."""
        return score_schema(template, len(self.rubric))

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Scores]:
        """Read a reply (`parse_scores`)."""
        return parse_scores(text, self.rubric, last=last)

    @classmethod
    def example(cls) -> Score:
        """A question about the example's first rollout."""
        from draco_ray.judging.example import RUBRIC, example_trajectory

        return cls(example_trajectory(), RUBRIC)


def score_schema(template: str, count: int) -> JsonSchema:
    """The JSON schema of verdicts on ``count`` criteria, for a prompt whose example has the fields of ``template``."""
    index = {"rubric_index": {"minimum": 0, "maximum": count - 1}}
    return reply_schema(ScoreEntry, template, least=count, most=count, cases=[index])


def parse_scores(text: str, rubric: Sequence[Criterion], *, last: bool = False) -> Parsed[Scores]:
    """Read the verdicts on a rubric, in the rubric's order.

    Raises:
        ReplyError: not exactly one entry per criterion, or a score outside -1, 0, 1.
    """
    parsed = read_entries(text, ScoreEntry, len(rubric), last=last)
    entries, notes = align(parsed.value, rubric)
    scores = []
    for index, entry in enumerate(entries):
        verdict = Verdict(entry.score)
        if (other := entry.second_verdict(verdict)) is not None and not last:
            raise ReplyError(f"rubric_index {index}: score {entry.score} and {other} contradict each other")
        scores.append(ScoredCriterion(verdict=verdict, evidence=entry.evidence, justification=entry.justification))
    return Parsed(value=tuple(scores), notes=(*parsed.notes, *notes))


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

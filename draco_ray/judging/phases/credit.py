"""Credit: the steps of one rollout that are responsible for each verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import BeforeValidator

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.phases.base import Attributions, Question, trajectory_values
from draco_ray.judging.reply import Integer, Parsed, Remark, RubricEntry, VerdictName, align, read_entries
from draco_ray.judging.shortening import shortened
from draco_ray.judging.structured import JsonSchema, reply_schema
from draco_ray.records import Attribution, Criterion, ScoredCriterion, Trajectory, Verdict


class AttributionEntry(RubricEntry):
    """A verdict's citations as the judge writes them."""

    decides = ("verdict", "relevant_steps")
    explanation: Remark = ""
    relevant_steps: Annotated[list[Integer], BeforeValidator(lambda value: [] if value is None else value)]
    verdict: VerdictName


@dataclass(frozen=True, slots=True)
class Credit(Question[Attributions]):
    """Name the steps responsible for each verdict of ``scores``, one per criterion of ``rubric``.

    A rollout without a step needs no call: nothing can be cited. The attributions' ``criterion`` indexes into
    ``rubric``, whatever ``criteria`` is.
    """

    trajectory: Trajectory
    rubric: Sequence[Criterion]
    scores: Sequence[ScoredCriterion]
    criteria: Sequence[int] | None = None
    """Indices into ``rubric`` to ask about, e.g. those that survived dropout; None asks about all."""

    name = "credit"
    template = "credit_assignment.txt"
    placeholders = frozenset(
        {
            "agent_prompt",
            "task_input",
            "agent_trajectory",
            "steps_summary",
            "num_steps",
            "num_rubrics",
            "rubric_scores",
        }
    )
    required = (frozenset({"rubric_scores"}), frozenset({"steps_summary", "agent_trajectory"}))
    entry = AttributionEntry

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(self, trajectory=shortened(self.trajectory, level))

    @property
    def identity(self) -> str:
        """The group, whose prompts begin alike."""
        return self.trajectory.group

    @property
    def asked(self) -> Sequence[int]:
        """Indices of the criteria that are asked about."""
        return range(len(self.rubric)) if self.criteria is None else self.criteria

    def values(self, code: str) -> Mapping[str, object]:
        """The rollout, also as numbered steps, and the verdicts."""
        scores = [self.scores[index] for index in self.asked]
        return trajectory_values(self.trajectory, code) | {
            "steps_summary": render.steps_summary(self.trajectory, code),
            "num_steps": len(self.trajectory.steps),
            "num_rubrics": len(self.asked),
            "rubric_scores": render.rubric_scores(self._asked_rubric, scores),
        }

    def settled(self) -> Attributions | None:
        """An empty answer where there is no criterion to ask about, or no step."""
        return None if self.asked and self.trajectory.steps else ()

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """One entry a criterion; only NOT_APPLICABLE comes without a step."""
        return credit_schema(template, len(self.asked), len(self.trajectory.steps))

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Attributions]:
        """Read a reply (`parse_attributions`)."""
        parsed = parse_attributions(text, self._asked_rubric, len(self.trajectory.steps), last=last)
        attributions = tuple(replace(each, criterion=self.asked[each.criterion]) for each in parsed.value)
        return Parsed(value=attributions, notes=parsed.notes)

    @property
    def _asked_rubric(self) -> list[Criterion]:
        return [self.rubric[index] for index in self.asked]

    @classmethod
    def example(cls) -> Credit:
        """A question about the example's first rollout."""
        from draco_ray.judging.example import RUBRIC, SCORES, example_trajectory

        return cls(example_trajectory(), RUBRIC, SCORES)


def credit_schema(template: str, count: int, num_steps: int) -> JsonSchema:
    """The JSON schema of citations for ``count`` criteria; ``template`` as of `score_schema`."""
    index = {"minimum": 0, "maximum": count - 1}
    step = {"type": "integer", "minimum": 1, "maximum": num_steps}
    cited: JsonSchema = {"rubric_index": index, "relevant_steps": {"items": step, "minItems": 1}}
    uncited: JsonSchema = {
        "rubric_index": index,
        "relevant_steps": {"items": step, "maxItems": 0},
        "verdict": {"enum": ["NOT_APPLICABLE"]},
    }
    return reply_schema(AttributionEntry, template, least=count, most=count, cases=[cited, uncited])


def parse_attributions(
    text: str, rubric: Sequence[Criterion], num_steps: int, *, last: bool = False
) -> Parsed[Attributions]:
    """Read which steps are responsible for which verdict, in the rubric's order.

    A criterion judged not applicable cites nothing, whatever steps the reply lists for it.

    Args:
        text: the reply.
        rubric: the criteria that were asked about; `Attribution.criterion` indexes into it.
        num_steps: M; valid steps are 1 .. M.
        last: whether the judge is not asked again: then steps that do not exist are left out, and a pass or fail
            without a step moves no credit, each with a note. That loses one citation, not all of them.

    Raises:
        ReplyError: not exactly one entry per criterion, an unknown verdict, or (unless ``last``) a step beyond the
            trajectory or a pass or fail without a step.
    """
    parsed = read_entries(text, AttributionEntry, len(rubric), last=last)
    entries, alignment_notes = align(parsed.value, rubric)
    notes = [*parsed.notes, *alignment_notes]
    attributions = []
    for criterion, entry in enumerate(entries):
        verdict = Verdict[entry.verdict]
        if (other := entry.second_verdict(verdict)) is not None and not last:
            raise ReplyError(f"rubric_index {criterion}: verdict {entry.verdict} and {other} contradict each other")
        cited = sorted(set(entry.relevant_steps)) if verdict is not Verdict.NOT_APPLICABLE else []
        steps = tuple(step for step in cited if 1 <= step <= num_steps)
        problems = [f"step {step} does not exist; steps are 1 to {num_steps}" for step in cited if step not in steps]
        if verdict is not Verdict.NOT_APPLICABLE and not steps:
            problems.append("a PASS or FAIL must cite at least one step in relevant_steps")
        if problems and not last:
            raise ReplyError(f"rubric_index {criterion}: {problems[0]}")
        notes += [f"rubric_index {criterion}: {problem}" for problem in problems]
        attributions.append(
            Attribution(criterion=criterion, verdict=verdict, steps=steps, explanation=entry.explanation)
        )
    return Parsed(value=tuple(attributions), notes=tuple(notes))

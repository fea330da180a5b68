"""Credit: the steps of one rollout that are responsible for each verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import BeforeValidator

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.parsing import Integer, Parsed, Remark, RubricEntry, VerdictName, align, read_entries
from draco_ray.judging.phases.base import INTEGER, TEXT, Attributions, JsonSchema, Question, trajectory_values
from draco_ray.judging.phases.contradiction import other_verdict
from draco_ray.judging.phases.score import WHICH
from draco_ray.judging.reply_json import integer
from draco_ray.judging.shortening import shortened
from draco_ray.records import Attribution, Criterion, ScoredCriterion, Trajectory, Verdict
from draco_ray.runs.rows import Row, citation_rows

_STEPS: JsonSchema = {"type": "array", "items": INTEGER}
_VERDICT: JsonSchema = {"type": "string", "enum": ["PASS", "FAIL", "NOT_APPLICABLE"]}


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
    reply_fields = WHICH | {"explanation": TEXT, "relevant_steps": _STEPS, "verdict": _VERDICT}

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

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Attributions]:
        """Read a reply (`parse_attributions`), leniently where the judge is not asked again."""
        parsed = parse_attributions(text, self._asked_rubric, len(self.trajectory.steps), lenient=last)
        attributions = tuple(replace(each, criterion=self.asked[each.criterion]) for each in parsed.value)
        return Parsed(value=attributions, notes=parsed.notes)

    @property
    def _asked_rubric(self) -> list[Criterion]:
        return [self.rubric[index] for index in self.asked]

    @classmethod
    def rows(cls, step: int, task_id: str, rollout: int | None, value: Attributions) -> tuple[str, list[Row]] | None:
        """One row per cited step."""
        return None if rollout is None else ("citations", citation_rows(step, task_id, rollout, value))

    @classmethod
    def example(cls) -> Credit:
        """A question about the example's first rollout."""
        from draco_ray.judging.example import RUBRIC, SCORES, example_trajectory

        return cls(example_trajectory(), RUBRIC, SCORES)


class AttributionEntry(RubricEntry):
    """A verdict's citations as the judge writes them."""

    verdict: VerdictName
    relevant_steps: Annotated[list[Integer], BeforeValidator(lambda value: [] if value is None else value)]
    explanation: Remark = ""

    def contradiction(self) -> str | None:
        """What else of the entry says another verdict, or names other steps."""
        for name, value in (self.model_extra or {}).items():
            if "step" in name.lower() and self.verdict != "NOT_APPLICABLE" and not self._cites(value):
                return f"{name[:60]} {str(value)[:60]}"
        return other_verdict(Verdict[self.verdict], self.explanation, self.model_extra or {})

    def _cites(self, value: object) -> bool:
        """Whether a further field names the same steps, one of them, or none."""
        if not isinstance(value, list):
            return value is None or isinstance(integer(value), str) or value in self.relevant_steps
        numbers = [integer(each) for each in value]
        return all(each in self.relevant_steps for each in numbers) and len(numbers) in (0, len(self.relevant_steps))


def parse_attributions(
    text: str, rubric: Sequence[Criterion], num_steps: int, *, lenient: bool = False
) -> Parsed[Attributions]:
    """Read which steps are responsible for which verdict, in the rubric's order.

    A criterion judged not applicable cites nothing, whatever steps the reply lists for it.

    Args:
        text: the reply.
        rubric: the criteria that were asked about; `Attribution.criterion` indexes into it.
        num_steps: M; valid steps are 1 .. M.
        lenient: leave out steps that do not exist, and accept a pass or fail that then cites none as a verdict that
            moves no credit, each with a note. The judge sets it once asking again did not help: losing one criterion's
            citation is less than losing them all.

    Raises:
        ReplyError: not exactly one entry per criterion, an unknown verdict, or (unless lenient) a step beyond the
            trajectory or a pass or fail without a step.
    """
    entries = read_entries(text, AttributionEntry)
    order, alignment_notes = align(entries, rubric)
    for position, entry in enumerate(entries):
        if (other := entry.contradiction()) is not None:
            raise ReplyError(f"entry {position}: verdict {entry.verdict} and {other} contradict each other")
    notes = list(alignment_notes)
    attributions = []
    uncited = []
    for criterion, position in enumerate(order):
        entry = entries[position]
        cited = set(entry.relevant_steps)
        if beyond := sorted(step for step in cited if not 1 <= step <= num_steps):
            problem = f"rubric_index {criterion}: step {beyond[0]} does not exist; steps are 1 to {num_steps}"
            if not lenient:
                raise ReplyError(problem)
            notes.append(problem)
        verdict = Verdict[entry.verdict]
        steps = () if verdict is Verdict.NOT_APPLICABLE else tuple(sorted(cited - set(beyond)))
        if verdict is not Verdict.NOT_APPLICABLE and not steps:
            uncited.append(criterion)
        attributions.append(
            Attribution(criterion=criterion, verdict=verdict, steps=steps, explanation=entry.explanation)
        )
    if uncited:
        which = ", ".join(str(criterion) for criterion in uncited)
        if not lenient:
            raise ReplyError(f"rubric_index {which}: a PASS or FAIL must cite at least one step in relevant_steps")
        notes.append(f"no step cited for rubric_index {which}: no credit moves for it")
    return Parsed(value=tuple(attributions), notes=tuple(notes))

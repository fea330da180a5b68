"""The judge's phases: each has a template, values for its placeholders, a reply schema and a parser.

A phase is a subclass of `Question`; an instance is one question: ``judge.ask(Score(trajectory, rubric), context)``.
`PHASES` lists them; docs/extending/judge_phase.md adds one. Their names are those of the paper's logs,
except ``score``, which is ``stage3`` there.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BeforeValidator, Field

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.reply import (
    MAX_TITLE_CHARACTERS,
    Entry,
    Integer,
    JsonSchema,
    Parsed,
    Remark,
    ScoreValue,
    Text,
    Texts,
    Title,
    VerdictName,
    integer,
    read_entries,
    reply_schema,
    verdict_name,
)
from draco_ray.judging.shortening import most_candidates, shortened, shortened_prompt
from draco_ray.records import Attribution, Criterion, Message, ScoredCriterion, Trajectory, Verdict

if TYPE_CHECKING:
    from draco_ray.judging.prompts import Prompts

Rubric = tuple[Criterion, ...]
Scores = tuple[ScoredCriterion, ...]
Attributions = tuple[Attribution, ...]

RubricEntryT = TypeVar("RubricEntryT", bound="RubricEntry")
ValueT = TypeVar("ValueT")


class Question(ABC, Generic[ValueT]):
    """One question to the judge. Each phase is a subclass: a frozen dataclass whose fields are the inputs."""

    name: ClassVar[str]
    """Name of the phase in the archive, in tables and on the command line."""
    template: ClassVar[str]
    """File name of the prompt in a prompt set."""
    placeholders: ClassVar[frozenset[str]]
    """Placeholders that the template may contain; `values` fills them."""
    required: ClassVar[tuple[frozenset[str], ...]]
    """Placeholders that the template must contain: at least one of each set."""
    entry: ClassVar[type[Entry]]
    """Schema of each entry of a reply."""
    merged: ClassVar[bool] = False
    """Whether the phase joins several phases of the paper; a prompt set without its template uses the built-in one."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The text from which the prompt's evidence code is derived (`draco_ray.judging.render.evidence_code`)."""

    @abstractmethod
    def values(self, code: str) -> Mapping[str, object]:
        """The text for each placeholder, with evidence marked by ``code``."""

    def shortened(self, level: int) -> Self:
        """The same question with its texts truncated (`draco_ray.judging.shortening`), 0 .. `MAX_LEVEL`."""
        return self

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema of a reply to ``template``."""
        return reply_schema(self.entry, template)

    @property
    def members(self) -> Sequence[int]:
        """Rollouts that could be left out of a question about a whole group; empty for other questions."""
        return ()

    @property
    def doubtful(self) -> Sequence[int]:
        """The `members` to leave out first if the judge refuses the question."""
        return ()

    def only(self, members: Sequence[int]) -> Self:
        """The same question about some of its `members`."""
        return self

    @abstractmethod
    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[ValueT]:
        """Read a reply.

        Args:
            text: the reply.
            config: limits.
            last: whether this is the last attempt: the judge is not asked again.

        Raises:
            ReplyError: it cannot be used; the message is sent back to the judge.
        """

    def prompt(self, prompts: Prompts) -> str:
        """The prompt that asks the question: its template with the placeholders filled in."""
        return prompts.fill(self.name, self.values(prompts.code(self.identity)))

    def settled(self) -> ValueT | None:
        """The answer if no call is needed; None if the judge must be asked."""
        return None

    def votes(self, config: JudgeConfig) -> int:
        """Number of independent calls to make; if one of them fails, the phase fails."""
        return 1

    def combine(self, votes: Sequence[ValueT]) -> ValueT:
        """Combine the values of all `votes` into one."""
        return votes[0]

    def scope(self, config: JudgeConfig, group: str) -> str:
        """The only scope in which a stored reply may be reused; empty: anywhere."""
        return ""


@dataclass(frozen=True, slots=True)
class RolloutQuestion(Question[ValueT]):
    """A question about one rollout."""

    trajectory: Trajectory

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(self, trajectory=shortened(self.trajectory, level))

    @property
    def identity(self) -> str:
        """The group, so that its prompts share a prefix."""
        return self.trajectory.group

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task and the rollout."""
        return {
            "agent_prompt": render.agent_prompt(self.trajectory.prompt, code),
            "task_input": render.task(self.trajectory.prompt, code),
            "agent_trajectory": render.agent_trajectory(self.trajectory, code),
        }


class CriterionEntry(Entry):
    """A criterion that the judge proposes or keeps."""

    decides = ("title", "evaluator_instruction")
    if_asked = ("trajectory_evidence", "grounding_references")
    trajectory_evidence: Remark = ""
    grounding_references: Texts = Field(default_factory=list)
    title: Title
    description: Text
    evaluator_instruction: Text


@dataclass(frozen=True, slots=True)
class Stage1(Question[Rubric]):
    """Propose criteria from the agent's prompt alone; at least one, or the phase has failed."""

    messages: Sequence[Message]

    name = "stage1"
    template = "generate_rubrics.txt"
    placeholders = frozenset({"agent_prompt", "task"})
    required = (frozenset({"agent_prompt"}),)
    entry = CriterionEntry

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(self, messages=shortened_prompt(tuple(self.messages), level))

    @property
    def identity(self) -> str:
        """The agent's prompt, so that the judge's prompt about a task is the same in every epoch."""
        return f"{self.name} {[(message.role, message.content) for message in self.messages]}"

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, and the task, which is the user part of that prompt."""
        return {"agent_prompt": render.agent_prompt(self.messages, code), "task": render.task(self.messages, code)}

    def scope(self, config: JudgeConfig, group: str) -> str:
        """The whole run, or this group if ``judge.stage1_across_epochs`` is off."""
        return "" if config.stage1_across_epochs else group

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema of a reply: a list of one to ``judge.max_stage1_criteria`` criteria."""
        return reply_schema(self.entry, template, least=1, most=config.max_stage1_criteria)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Up to ``judge.max_stage1_criteria`` criteria."""
        return parse_criteria(text, limit=config.max_stage1_criteria, source=self.name, least=1, last=last)


@dataclass(frozen=True, slots=True)
class Stage2(RolloutQuestion[Rubric]):
    """Add criteria that a rollout reveals and that ``existing`` (those of stage 1) does not cover; possibly none."""

    existing: Sequence[Criterion]

    name = "stage2"
    template = "generate_rubrics_from_trajectory.txt"
    placeholders = frozenset({"agent_prompt", "task_input", "agent_trajectory", "existing_rubrics"})
    required = (frozenset({"agent_trajectory"}), frozenset({"existing_rubrics"}))
    entry = CriterionEntry

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task, the rollout and the existing criteria."""
        existing = render.existing_rubrics(self.existing)
        return {**RolloutQuestion.values(self, code), "existing_rubrics": existing}

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema of a reply: a list of up to ``judge.max_stage2_criteria`` criteria."""
        return reply_schema(self.entry, template, most=config.max_stage2_criteria)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Up to ``judge.max_stage2_criteria`` criteria with new titles."""
        source = f"{self.name}/{self.trajectory.rollout}"
        return parse_criteria(text, limit=config.max_stage2_criteria, source=source, taken=self.existing, last=last)


@dataclass(frozen=True, slots=True)
class GroupQuestion(Question[Rubric]):
    """A question about all rollouts of a group, whose answer is a list of criteria."""

    messages: Sequence[Message]
    """The agent's prompt."""
    candidates: Sequence[Criterion]
    """Existing criteria."""
    trajectories: Sequence[Trajectory]
    """Rollouts of the group, at least one."""

    entry = CriterionEntry

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        messages = shortened_prompt(tuple(self.messages), level)
        return replace(self, messages=messages, trajectories=[shortened(each, level) for each in self.trajectories])

    @property
    def members(self) -> Sequence[int]:
        """See `Question`."""
        return [each.rollout for each in self.trajectories]

    def only(self, members: Sequence[int]) -> Self:
        """The same question about the rollouts ``members`` only. Stage2 proposals for other rollouts are left out."""
        others = {f"{Stage2.name}/{each}" for each in self.members if each not in members}
        return replace(
            self,
            candidates=[each for each in self.candidates if each.source not in others],
            trajectories=[each for each in self.trajectories if each.rollout in members],
        )

    @property
    def identity(self) -> str:
        """The id of the group, so that all prompts about its rollouts have the same evidence code."""
        return self.trajectories[0].group

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task and the group's rollouts."""
        return {
            "agent_prompt": render.agent_prompt(self.messages, code),
            "task": render.task(self.messages, code),
            "group_trajectories": render.group_trajectories(self.trajectories, code),
        }

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema of a reply: a list of up to ``judge.max_union_criteria`` criteria."""
        return reply_schema(self.entry, template, most=config.max_union_criteria)


@dataclass(frozen=True, slots=True)
class Proposals(GroupQuestion):
    """Stage 2 about all rollouts at once: add criteria that ``candidates`` do not cover; possibly none."""

    name = "proposals"
    template = "generate_rubrics_from_group.txt"
    placeholders = frozenset({"agent_prompt", "task", "group_trajectories", "existing_rubrics"})
    required = (frozenset({"group_trajectories"}), frozenset({"existing_rubrics"}))
    merged = True

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task, the group's rollouts and the existing criteria."""
        return {**GroupQuestion.values(self, code), "existing_rubrics": render.existing_rubrics(self.candidates)}

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Criteria with new titles, up to ``judge.max_union_criteria`` together with those of an earlier rubric."""
        kept = [each for each in self.candidates if each.source != Stage1.name]
        limit = max(0, config.max_union_criteria - len(kept))
        return parse_criteria(text, limit=limit, source=self.name, taken=self.candidates, last=last)


@dataclass(frozen=True, slots=True)
class Union(GroupQuestion):
    """Merge all candidates into the one rubric of the group; empty when no criterion tells its rollouts apart.

    Without candidates the rubric is empty and no call is made.
    """

    doubtful: Sequence[int] = field(default=(), kw_only=True)
    """Rollouts whose own stage2 call failed; they are left out first if the judge refuses the union."""

    name = "union"
    template = "union_rubrics.txt"
    placeholders = frozenset({"agent_prompt", "task", "candidate_rubrics", "group_trajectories"})
    required = (frozenset({"candidate_rubrics"}), frozenset({"group_trajectories"}))

    def shortened(self, level: int) -> Self:
        """See `Question`; in the last stage of truncation, only the first `most_candidates` are kept."""
        return replace(GroupQuestion.shortened(self, level), candidates=self.candidates[: most_candidates(level)])

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task, the group's rollouts and the proposed criteria."""
        return {**GroupQuestion.values(self, code), "candidate_rubrics": render.candidate_rubrics(self.candidates)}

    def settled(self) -> Rubric | None:
        """An empty rubric if there are no candidates; None if the judge must be asked."""
        return None if self.candidates else ()

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Read the merged rubric from the reply: up to ``judge.max_union_criteria`` criteria."""
        return parse_criteria(text, limit=config.max_union_criteria, source=self.name, last=last)


def parse_criteria(
    text: str, *, limit: int, source: str, taken: Sequence[Criterion] = (), least: int = 0, last: bool = False
) -> Parsed[tuple[Criterion, ...]]:
    """Read a list of proposed or merged criteria (phases stage1, stage2, union).

    Args:
        text: the reply.
        limit: maximum number of criteria; the rest is left out with a note.
        source: recorded with each criterion.
        taken: criteria whose titles must not occur again; such entries are left out with a note.
        least: minimum number of entries.
        last: whether this is the last attempt.

    Raises:
        ReplyError: as `read_entries`, or fewer than ``least`` entries.
    """
    parsed = read_entries(text, CriterionEntry, last=last)
    if len(parsed.value) < least:
        raise ReplyError(f"{len(parsed.value)} criteria, expected at least {least}")
    notes = list(parsed.notes)
    titles = {_normal(criterion.title) for criterion in taken}
    kept: list[Criterion] = []
    for entry in parsed.value:
        title = _normal(entry.title)
        if not title or not entry.evaluator_instruction:
            notes.append(f"left out a criterion without a title or an instruction: {entry.title!r}")
        elif title in titles:
            notes.append(f"left out a criterion whose title is already taken: {entry.title}")
        else:
            titles.add(title)
            texts = entry.model_dump(include={"title", "description", "evaluator_instruction"})
            kept.append(Criterion(**texts, source=source))
    if len(kept) > limit:
        notes.append(f"left out {len(kept) - limit} of {len(kept)} criteria: the limit is {limit}")
    return Parsed(value=tuple(kept[:limit]), notes=tuple(notes))


def _normal(title: str) -> str:
    """A title without case, width, punctuation and spacing, for comparison."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", title[:MAX_TITLE_CHARACTERS]).casefold()))


def _steps(value: object) -> object:
    """Convert one step, a text such as "1, 2", or null to a list of steps."""
    if value is None:
        return []
    return value if isinstance(value, list) else str(value).split(",")


Steps = Annotated[list[Integer], BeforeValidator(_steps)]


class RubricEntry(Entry):
    """An entry about a criterion of a given rubric; `align` determines which one."""

    rubric_index: Integer | None = None
    rubric_title: Annotated[Title, BeforeValidator(lambda value: "" if value is None else value)] = ""

    @classmethod
    def decided(cls, value: dict[str, Any]) -> bool:
        """See `Entry`."""
        return super().decided(value) or cls.complete(value)

    @classmethod
    def complete(cls, value: dict[str, Any]) -> bool:
        """See `Entry`: whether the object names its criterion."""
        return not value.keys().isdisjoint(("rubric_index", "rubric_title"))

    def contradictions(self, own: Verdict, *, last: bool) -> list[str]:
        """Notes about further fields with a verdict that differs from ``own``, such as ``"final_score": -1``.

        Raises:
            ReplyError: there is one, unless ``last``.
        """
        found = []
        for name, value in (self.model_extra or {}).items():
            if "score" in name.lower() or "verdict" in name.lower():
                said = Verdict.__members__.get(str(verdict_name(value)), integer(value))
                if said in tuple(Verdict) and said != own:
                    found.append(f"verdict {own.name} and {name[:60]} {str(value)[:60]} contradict each other")
        if found and not last:
            raise ReplyError(f"{self.rubric_title[:80]!r}: {found[0]}")
        return found


class ScoreEntry(RubricEntry):
    """A verdict as the judge writes it."""

    decides = ("score",)
    evidence: Remark = ""
    justification: Remark = ""
    score: ScoreValue


@dataclass(frozen=True, slots=True)
class Score(RolloutQuestion[Scores]):
    """Judge a rollout by every criterion of ``rubric``, in its order; an empty rubric needs no call.

    ``judge.score_votes`` calls are made and joined by `combine_votes`. If one of them fails, the phase fails, because
    unanimity among the others would be a laxer rule.
    """

    rubric: Sequence[Criterion]

    name = "score"
    template = "score_rubrics.txt"
    placeholders = frozenset({"agent_prompt", "task_input", "agent_trajectory", "rubrics"})
    required = (frozenset({"agent_trajectory"}), frozenset({"rubrics"}))
    entry: ClassVar[type[Entry]] = ScoreEntry

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task, the rollout and the rubric."""
        return {**RolloutQuestion.values(self, code), "rubrics": render.rubrics(self.rubric)}

    def settled(self) -> Scores | None:
        """An empty answer if there is no criterion; None if the judge must be asked."""
        return None if self.rubric else ()

    def votes(self, config: JudgeConfig) -> int:
        """The number of scoring calls: ``judge.score_votes``."""
        return config.score_votes

    def combine(self, votes: Sequence[Scores]) -> Scores:
        """See `combine_votes`."""
        return combine_votes(votes)

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema of a reply: exactly one entry per criterion."""
        return score_schema(template, len(self.rubric))

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Scores]:
        """See `parse_scores`."""
        return parse_scores(text, self.rubric, last=last)


class VerdictsEntry(ScoreEntry):
    """A verdict and its citations as the judge writes them."""

    relevant_steps: Steps


@dataclass(frozen=True, slots=True)
class Verdicts(Score):
    """Score and credit in one call: the verdict of every criterion of ``rubric``, and the steps responsible."""

    name = "verdicts"
    template = "score_and_credit_rubrics.txt"
    placeholders = Score.placeholders | {"num_steps"}
    entry = VerdictsEntry
    merged = True

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the agent's prompt, the task, the rollout, the number of its steps, the rubric."""
        return {**Score.values(self, code), "num_steps": len(self.trajectory.steps)}

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema of a reply: one entry per criterion. If there are steps, only a score of 0 may cite none."""
        count, steps = len(self.rubric), len(self.trajectory.steps)
        uncited = _case(count, steps, score={"enum": [0] if steps else [-1, 0, 1]})
        cases = [_case(count, steps), uncited] if steps else [uncited]
        return reply_schema(self.entry, template, least=count, most=count, cases=cases)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Scores]:
        """As `parse_scores`; steps are read as in `parse_attributions`."""
        return parse_scores(text, self.rubric, last=last, num_steps=len(self.trajectory.steps))


def score_schema(template: str, count: int) -> JsonSchema:
    """The JSON schema of verdicts on ``count`` criteria, its fields in the order of the example in ``template``."""
    index = {"rubric_index": {"minimum": 0, "maximum": count - 1}}
    return reply_schema(ScoreEntry, template, least=count, most=count, cases=[index])


def parse_scores(
    text: str, rubric: Sequence[Criterion], *, last: bool = False, num_steps: int | None = None
) -> Parsed[Scores]:
    """Read the verdicts on a rubric, in the rubric's order.

    Args:
        text: the reply.
        rubric: the criteria.
        last: whether this is the last attempt.
        num_steps: M, if the reply also names the steps responsible; None: it does not.

    Raises:
        ReplyError: not exactly one entry per criterion, a score outside -1, 0, 1, or steps that `cited_steps` refuses.
    """
    kind = ScoreEntry if num_steps is None else VerdictsEntry
    parsed = read_entries(text, kind, len(rubric), last=last)
    entries, aligned = align(parsed.value, rubric)
    scores, notes = [], [*parsed.notes, *aligned]
    for index, entry in enumerate(entries):
        verdict = Verdict(entry.score)
        notes += entry.contradictions(verdict, last=last)
        steps = None
        if num_steps is not None and isinstance(entry, VerdictsEntry):
            steps, problems = cited_steps(entry.relevant_steps, verdict, num_steps, f"rubric_index {index}", last=last)
            notes += problems
        texts = {"evidence": entry.evidence, "justification": entry.justification}
        scores.append(ScoredCriterion(verdict=verdict, steps=steps, **texts))
    return Parsed(value=tuple(scores), notes=tuple(notes))


def align(entries: Sequence[RubricEntryT], rubric: Sequence[Criterion]) -> tuple[list[RubricEntryT], tuple[str, ...]]:
    """Match the entries of a reply to the criteria of a rubric.

    The criterion of an entry is the one with its ``rubric_index`` or, without an index, the one with its title. If an
    entry has no index and an unknown title, it belongs to the only criterion without an entry. Indices count from 0, or
    from 1 if they are 1 .. K and the titles are in the rubric's order.

    Returns: one entry per criterion, in the rubric's order, and a note if an entry had no index and an unknown title.

    Raises:
        ReplyError: a criterion has no entry or two, an index does not exist, or an index comes with the title of
            another criterion.
    """
    titles = [_normal(criterion.title) for criterion in rubric]
    wanted = "; ".join(f"{index}: {criterion.title}" for index, criterion in enumerate(rubric))
    wanted = f"answer exactly one entry for each of these, with rubric_index and rubric_title: {wanted}"
    found: dict[int, RubricEntryT] = {}
    nameless: list[RubricEntryT] = []
    said = {(entry.rubric_index, _normal(entry.rubric_title)) for entry in entries}
    first = 1 if said == set(enumerate(titles, start=1)) else 0
    for place, entry in enumerate(entries):
        named = [index for index, title in enumerate(titles) if title == _normal(entry.rubric_title)]
        if entry.rubric_index is not None:
            target = entry.rubric_index - first
        elif named:
            target = place if place in named else named[0]
        else:
            nameless.append(entry)
            continue
        if not 0 <= target < len(rubric):
            raise ReplyError(f"rubric_index {target} does not exist; {wanted}")
        if named and target not in named:
            raise ReplyError(f"rubric_index {target} comes with the title of rubric_index {named[0]}; {wanted}")
        if target in found:
            raise ReplyError(f"rubric_index {target} is answered twice; {wanted}")
        found[target] = entry
    left = [index for index in range(len(rubric)) if index not in found]
    if len(left) != len(nameless) or len(left) > 1:
        raise ReplyError(f"rubric_index {', '.join(map(str, left))} is not answered; {wanted}")
    found |= dict(zip(left, nameless, strict=True))
    notes = [f"rubric_index {index} was the only one left for {found[index].rubric_title[:80]!r}" for index in left]
    return [found[index] for index in range(len(rubric))], tuple(notes)


def cited_steps(
    named: Sequence[int], verdict: Verdict, num_steps: int, where: str, *, last: bool
) -> tuple[tuple[int, ...], list[str]]:
    """The existing steps that a verdict cites, in ascending order, and notes about its other citations.

    Args:
        named: the steps in the reply.
        verdict: the verdict; a criterion that is not applicable cites nothing.
        num_steps: number of steps of the rollout.
        where: the entry of the reply, for messages.
        last: whether this is the last attempt. Wrong citations are then noted instead of refused.

    Raises:
        ReplyError: ``last`` is False, and the verdict cites a step that does not exist, or is a pass or fail that cites
            no step although the rollout has steps.
    """
    cited = sorted(set(named)) if verdict is not Verdict.NOT_APPLICABLE else []
    steps = tuple(step for step in cited if 1 <= step <= num_steps)
    problems = [f"step {step} does not exist; steps are 1 to {num_steps}" for step in cited if step not in steps]
    if verdict is not Verdict.NOT_APPLICABLE and not steps and num_steps:
        problems.append("a PASS or FAIL must cite at least one step in relevant_steps")
    if problems and not last:
        raise ReplyError(f"{where}: {problems[0]}")
    return steps, [f"{where}: {problem}" for problem in problems]


def combine_votes(votes: Sequence[Scores]) -> Scores:
    """Join k scoring calls: a criterion passes only if every call passes it (appendix "Self-judge variants").

    It fails if any call fails it. Without a fail, any not-applicable makes it not applicable: no call saw a violation.
    Evidence comes from the first call that gave the joint verdict.
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


class AttributionEntry(RubricEntry):
    """A verdict's citations as the judge writes them."""

    decides = ("verdict", "relevant_steps")
    explanation: Remark = ""
    relevant_steps: Steps
    verdict: VerdictName


@dataclass(frozen=True, slots=True)
class Credit(RolloutQuestion[Attributions]):
    """Name the steps responsible for each verdict of ``scores``, one per criterion of ``rubric``.

    A rollout without steps needs no call: nothing can be cited. `Attribution.criterion` indexes into ``rubric``,
    whatever ``criteria`` is.
    """

    rubric: Sequence[Criterion]
    scores: Sequence[ScoredCriterion]
    criteria: Sequence[int] | None = None
    """Indices into ``rubric`` to ask about, e.g. those that survived dropout; None asks about all."""

    name = "credit"
    template = "credit_assignment.txt"
    placeholders = frozenset(
        {"agent_prompt", "task_input", "agent_trajectory", "steps_summary", "num_steps", "num_rubrics", "rubric_scores"}
    )
    required = (frozenset({"rubric_scores"}), frozenset({"steps_summary", "agent_trajectory"}))
    entry = AttributionEntry

    @property
    def asked(self) -> Sequence[int]:
        """Indices of the criteria that are asked about."""
        return range(len(self.rubric)) if self.criteria is None else self.criteria

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: agent's prompt, task, rollout, the rollout's numbered steps, and verdicts."""
        return {
            **RolloutQuestion.values(self, code),
            "steps_summary": render.steps_summary(self.trajectory, code),
            "num_steps": len(self.trajectory.steps),
            "num_rubrics": len(self.asked),
            "rubric_scores": render.rubric_scores(self._asked_rubric, [self.scores[index] for index in self.asked]),
        }

    def settled(self) -> Attributions | None:
        """An empty answer if there is no criterion or no step to ask about; None if the judge must be asked."""
        return None if self.asked and self.trajectory.steps else ()

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """One entry per criterion; only NOT_APPLICABLE may come without a step."""
        return credit_schema(template, len(self.asked), len(self.trajectory.steps))

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Attributions]:
        """See `parse_attributions`."""
        parsed = parse_attributions(text, self._asked_rubric, len(self.trajectory.steps), last=last)
        attributions = tuple(replace(each, criterion=self.asked[each.criterion]) for each in parsed.value)
        return Parsed(value=attributions, notes=parsed.notes)

    @property
    def _asked_rubric(self) -> list[Criterion]:
        return [self.rubric[index] for index in self.asked]


def credit_schema(template: str, count: int, num_steps: int) -> JsonSchema:
    """The JSON schema of citations for ``count`` criteria; ``template`` as in `score_schema`."""
    cases = [_case(count, num_steps), _case(count, num_steps, verdict={"enum": ["NOT_APPLICABLE"]})]
    return reply_schema(AttributionEntry, template, least=count, most=count, cases=cases)


def _case(count: int, num_steps: int, **constraints: JsonSchema) -> JsonSchema:
    """The schema's constraints on an entry: it has at least one step or, with ``constraints``, no step."""
    step = {"type": "integer", "minimum": 1, "maximum": max(1, num_steps)}
    steps = {"items": step, "maxItems": 0} if constraints else {"items": step, "minItems": 1}
    return {"rubric_index": {"minimum": 0, "maximum": count - 1}, "relevant_steps": steps, **constraints}


def parse_attributions(
    text: str, rubric: Sequence[Criterion], num_steps: int, *, last: bool = False
) -> Parsed[Attributions]:
    """Read which steps are responsible for which verdict, in the rubric's order.

    A criterion judged not applicable cites nothing, whatever steps the reply lists for it.

    Args:
        text: the reply.
        rubric: the criteria that were asked about; `Attribution.criterion` indexes into it.
        num_steps: M; valid steps are 1 .. M.
        last: whether this is the last attempt. Then steps that do not exist are dropped, and a pass or fail without a
            step gives no credit, each with a note, so that the other citations are kept.

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
        notes += entry.contradictions(verdict, last=last)
        steps, problems = cited_steps(entry.relevant_steps, verdict, num_steps, f"rubric_index {criterion}", last=last)
        notes += problems
        attributions.append(
            Attribution(criterion=criterion, verdict=verdict, steps=steps, explanation=entry.explanation)
        )
    return Parsed(value=tuple(attributions), notes=tuple(notes))


Phase = type[Question[Any]]
PHASES: dict[str, Phase] = {phase.name: phase for phase in (Stage1, Stage2, Proposals, Union, Score, Verdicts, Credit)}
"""Phases in the order in which a group needs them; ``proposals`` and ``verdicts`` each replace several calls."""


def phase_rank(name: str | None) -> int:
    """Priority of a phase's calls: those with the lowest rank are sent first.

    Later phases have lower ranks, so that groups in progress are finished before new ones begin.
    """
    names = list(PHASES)
    return -names.index(name) if name in names else 0

"""Judge replies: text in, checked values out, or one `ReplyError` whose message tells the judge what to mend.

A reply is used whole or not at all. In this order:

1. ``finish_reason`` (a reply cut at the token limit can look complete once it is repaired), emptiness, length.
   Reasoning in front of the answer is passed over (`after_thinking`).
2. JSON: strict, with prose or code fences around it; else leniently, where the text leaves no doubt (`reply_json`).
3. The schema of the phase. Scores are -1, 0 or 1; steps lie within the trajectory; nothing is coerced to zero.
4. One entry for each criterion, no more, no fewer: matched by ``rubric_index`` (else by position), cross-checked
   against the title. A title that names another criterion, with words more or cut, is a contradiction; so are
   duplicates. A title that names none (a translation, say) is accepted where the index is stated or only one criterion
   is left for it. Entries without an index whose titles are all known may come in any order.

What is tolerated is noted, never silent: criteria beyond the limit or with a title already taken are cut, a title that
names nothing, and what a phase tolerates in the last reply (`draco_ray.judging.phases.credit`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draco_ray.errors import ReplyError
from draco_ray.judging.escaping import ascii_like
from draco_ray.judging.reply_json import (
    BEGIN,
    MAX_COMPARED_CHARACTERS,
    NO_ARRAY,
    arrays_of_objects,
    comparable,
    integer,
    without_json,
)
from draco_ray.records import Criterion

MAX_REPLY_CHARACTERS = 400_000
"""Longer replies are refused unread: 24 criteria with evidence fill a tenth of it."""
MAX_TEXT_CHARACTERS = 8_000
"""Of one field: what a judge writes is repeated in later prompts."""
MAX_TITLE_CHARACTERS = 300

_NO_ANSWER = {
    "content_filter": "the reply was withheld by the provider's content filter",
    "refusal": "the judge refused to answer",
    "tool_calls": "the judge called a tool instead of answering, and there is none",
    "function_call": "the judge called a tool instead of answering, and there is none",
    "reasoning": "the reply is reasoning that no answer follows",
}

THINK_BEGIN, THINK_END = "<think>", "</think>"

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[ValueT]):
    """A usable reply, and what was tolerated in it."""

    value: ValueT
    notes: tuple[str, ...] = ()


def check_finish(text: str, finish_reason: str) -> None:
    """Refuse a reply by how it ended, before looking for JSON in it.

    Raises:
        ReplyError: cut off, broken off, filtered, refused, no answer but a tool call or reasoning, empty or absurdly
            long.
    """
    if finish_reason == "length":
        raise ReplyError("the reply was cut off at the token limit; answer with shorter texts")
    if finish_reason in _NO_ANSWER:
        said = f": {' '.join(text.split())[:200]!r}" if text.strip() else ""
        raise ReplyError(f"{_NO_ANSWER[finish_reason]}{said}")
    if finish_reason != "stop":
        raise ReplyError(f"the provider broke the reply off ({finish_reason[:60]!r}); answer again")
    if not text.strip():
        raise ReplyError("the reply is empty")
    if len(text) > MAX_REPLY_CHARACTERS:
        raise ReplyError(f"the reply has {len(text)} characters; at most {MAX_REPLY_CHARACTERS} are read")


def after_thinking(text: str, *, opened: bool = False) -> str:
    """What follows the reasoning that a model served without a reasoning parser writes in front of its answer.

    The reasoning ends at the last ``</think>`` outside JSON. A tag inside JSON is quoted: the agent's turns hold one
    each, and what a rollout wrote behind it must not become the answer. For the same reason a tag behind JSON that does
    not parse counts only where reasoning was open.

    Args:
        text: the reply.
        opened: whether it begins inside reasoning, because the chat template opened it.

    Returns:
        ``text`` itself where no reasoning ends.

    Raises:
        ReplyError: too much broken JSON to tell.
    """
    if THINK_END not in text:
        return text
    outside = without_json(text)
    # A field of any phase's entries: JSON of the answer's kind, if it stands where no valid JSON is.
    field = re.compile(rf"""["'](?:{"|".join(sorted(Entry.names))})["']\s*+:""")
    begin = 0
    opened = opened or text.lstrip().startswith(THINK_BEGIN)
    for closing in re.finditer(THINK_END, outside):
        if field.search(outside, begin, closing.start()) and not opened:
            break
        begin, opened = closing.end(), False
    return text[begin:]


def parse_criteria(
    text: str, *, limit: int, source: str, taken: Sequence[Criterion] = (), allow_empty: bool = False
) -> Parsed[tuple[Criterion, ...]]:
    """Read a list of proposed or merged criteria (phases stage1, stage2, union).

    Args:
        text: the reply.
        limit: how many are kept; the rest is cut with a note.
        source: recorded with each criterion.
        taken: criteria whose titles must not come again; such entries are cut with a note.
        allow_empty: whether no criterion at all is an answer.

    Raises:
        ReplyError: no JSON array, or an entry without a title, description or evaluator_instruction.
    """
    entries = read_entries(text, CriterionEntry)
    notes = []
    titles = {_normal(criterion.title) for criterion in taken}
    kept: list[Criterion] = []
    for entry in entries:
        title = _normal(entry.title)
        if title in titles:
            notes.append(f"cut a criterion whose title is already taken: {entry.title}")
            continue
        titles.add(title)
        kept.append(
            Criterion(
                title=entry.title,
                description=entry.description,
                evaluator_instruction=entry.evaluator_instruction,
                source=source,
            )
        )
    if len(kept) > limit:
        notes.append(f"cut {len(kept) - limit} of {len(kept)} criteria: the limit is {limit}")
    if not entries and not allow_empty:
        raise ReplyError("the array holds no criterion; at least one is needed")
    return Parsed(value=tuple(kept[:limit]), notes=tuple(notes))


# --- schemas ----------------------------------------------------------------------------------------------------------


def _text(value: object) -> object:
    """Strings that can be stored and sent on; judges also write lists of quotes where a text is asked for."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n".join(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8").replace("\x00", "").strip()
    return value


def _optional_text(value: object) -> object:
    return "" if value is None else _text(value)


def verdict_name(value: object) -> object:
    """A verdict's name, whatever case and spelling of it a judge uses; everything else as it is."""
    if not isinstance(value, str):
        return value
    name = re.sub(r"[\s_/-]+", "_", value.strip().upper())
    return {"N_A": "NOT_APPLICABLE", "NA": "NOT_APPLICABLE"}.get(name, name)


Title = Annotated[str, BeforeValidator(_text), Field(min_length=1, max_length=MAX_TITLE_CHARACTERS)]
Body = Annotated[str, BeforeValidator(_text), Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
Remark = Annotated[str, BeforeValidator(_optional_text), Field(max_length=MAX_TEXT_CHARACTERS)]
VerdictName = Annotated[Literal["PASS", "FAIL", "NOT_APPLICABLE"], BeforeValidator(verdict_name)]
Integer = Annotated[int, BeforeValidator(integer), Field(strict=True)]


class Entry(BaseModel):
    """An entry of a reply's array. Fields beyond the schema (grounding_references, ...) stay in the archived reply."""

    model_config = ConfigDict(extra="ignore")
    names: ClassVar[set[str]] = set()
    """Fields of the entries of all phases."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        Entry.names.update(cls.model_fields)


class CriterionEntry(Entry):
    """A proposed or merged criterion as the judge writes it."""

    title: Title
    description: Body
    evaluator_instruction: Body


class RubricEntry(Entry):
    """An entry about a criterion of a given rubric; `align` says which. Further fields may contradict it."""

    model_config = ConfigDict(extra="allow")

    rubric_title: Remark = ""
    rubric_index: Integer | None = None

    def besides(self) -> list[str]:
        """Texts under names that nobody asked for: a title may be among them."""
        return [each for each in (self.model_extra or {}).values() if isinstance(each, str)]


EntryT = TypeVar("EntryT", bound=BaseModel)
RubricEntryT = TypeVar("RubricEntryT", bound=RubricEntry)


# --- JSON -------------------------------------------------------------------------------------------------------------

_DECLINES = re.compile(r"\b(?:sorry|can(?:'|\u2019)t|cannot|unable|won(?:'|\u2019)t|decline)\b", re.IGNORECASE)
_CALLS_TOOL = re.compile(r"<tool_call>|<function[=_]|<\|tool|\[TOOL_CALLS?\]|<\|python_tag\|>")


def read_entries(text: str, schema: type[EntryT]) -> list[EntryT]:
    """The one array of objects in ``text`` that fits ``schema``; others may only be about something else.

    Raises:
        ReplyError: no such array, several, or one that holds the schema's fields and does not fit it.
    """
    body = after_thinking(text)
    try:
        arrays = arrays_of_objects(body, list(schema.model_fields))
    except ReplyError as error:
        if BEGIN.search(body):
            raise
        raise ReplyError(f"{error}{_looks_like(body)}") from None
    found: list[EntryT] | None = None
    misfit: ReplyError | None = None
    for array in arrays:
        try:
            entries = [_entry(schema, position, value) for position, value in enumerate(array)]
        except ReplyError as problem:
            if any(isinstance(entry, dict) and not schema.model_fields.keys().isdisjoint(entry) for entry in array):
                raise
            misfit = problem
            continue
        # An empty one in front says nothing: "it returned []", or a box of a list.
        if not found:
            found = entries
        elif entries != found:
            raise ReplyError("the reply holds several different JSON arrays; answer with exactly one")
    if found is None:
        raise ReplyError(f"{misfit or NO_ARRAY}{_looks_like(body)}")
    return found


def _looks_like(text: str) -> str:
    """What a reply without an answer seems to be instead."""
    start = " ".join(text[:200].split())
    if _CALLS_TOOL.search(text[:2000]):
        return "; it is a call of a tool, and there is none"
    if text.lstrip().startswith(THINK_BEGIN):
        return "; it is reasoning that no answer follows"
    if _DECLINES.search(start[:60]):
        return f"; it reads like a refusal: {start[:100]!r}"
    return ""


def _entry(schema: type[EntryT], position: int, value: object) -> EntryT:
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        found = "" if problem["type"] == "missing" else f", found {str(problem['input'])[:60]!r}"
        raise ReplyError(f"entry {position}, field {field}: {problem['msg']}{found}") from None


# --- matching ---------------------------------------------------------------------------------------------------------


def align(entries: Sequence[RubricEntryT], rubric: Sequence[Criterion]) -> tuple[list[int], tuple[str, ...]]:
    """Find the entry of each criterion, by the module's rule 4.

    Returns: for each criterion the position of its entry, and what was tolerated.
    Raises:
        ReplyError: not exactly one entry per criterion.
    """
    expected = len(rubric)
    if len(entries) != expected:
        raise ReplyError(f"{len(entries)} entries for {expected} rubrics; {_wanted(rubric)}")
    titles = [_normal(criterion.title) for criterion in rubric]
    position_of: dict[int, int] = {}
    notes = []
    nameless = []
    for position, entry in enumerate(entries):
        title = _normal(entry.rubric_title)
        named = [index for index, candidate in enumerate(titles) if candidate == title] if title else []
        if entry.rubric_index is not None:
            target = entry.rubric_index
            if not 0 <= target < expected:
                raise ReplyError(f"rubric_index {target} does not exist; {_wanted(rubric)}")
            meant = named or _meant(titles, title, {_normal(each) for each in entry.besides()})
            others = [index for index in meant if index != target]
            if others and target not in named:
                raise ReplyError(
                    f"rubric_index {target} comes with the title of rubric_index {others[0]}; {_wanted(rubric)}"
                )
            if not named:
                notes.append(f"rubric_index {target} came with an unknown title: {entry.rubric_title[:80]!r}")
        elif named:
            if len(named) > 1 and position not in named:
                raise ReplyError(f"{entry.rubric_title[:80]!r} may be several rubrics; {_wanted(rubric)}")
            target = position if position in named else named[0]
        else:
            nameless.append(position)
            continue
        if target in position_of:
            raise ReplyError(f"rubric_index {target} is answered twice; {_wanted(rubric)}")
        position_of[target] = position
    if len(nameless) > 1:
        unknown = entries[nameless[0]].rubric_title[:80]
        raise ReplyError(f"no rubric has the title {unknown!r} and no rubric_index is given; {_wanted(rubric)}")
    if nameless:
        (left,) = set(range(expected)) - set(position_of)
        position_of[left] = nameless[0]
        notes.append(f"rubric_index {left} was the only one left for {entries[nameless[0]].rubric_title[:80]!r}")
    return [position_of[index] for index in range(expected)], tuple(notes)


def _meant(titles: Sequence[str], title: str, besides: Set[str]) -> list[int]:
    """The criteria that an entry seems to be about: their titles stand within its own, which adds words or breaks off,
    or in another field. A title within a longer one that stands there is only a part of it."""
    whole = [each for each in titles if each and f" {each} " in f" {title} "]
    return [
        index
        for index, each in enumerate(titles)
        if (each in whole and not any(each != longer and f" {each} " in f" {longer} " for longer in whole))
        or (len(title) > 3 and each.startswith(title))
        or (each and each in besides)
    ]


def _normal(title: str) -> str:
    """Titles compare without case, punctuation, spacing, accents and look-alike letters."""
    return " ".join(re.findall(r"\w+", comparable(ascii_like(title[:MAX_COMPARED_CHARACTERS]))))


def _wanted(rubric: Sequence[Criterion]) -> str:
    listed = "; ".join(f"{index}: {criterion.title}" for index, criterion in enumerate(rubric))
    return f"answer exactly one entry for each of these, with rubric_index and rubric_title: {listed}"

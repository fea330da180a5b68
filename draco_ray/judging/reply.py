"""Read a judge's reply: text in, entries of the phase's schema out, or a `ReplyError` that the judge is told.

The last complete JSON value that satisfies the schema is the answer. Text around it does not matter. Four things make
the judge be asked again: no such value; another one with a different content; a further answer that does not satisfy
the schema behind it; and JSON of the answer's kind that does not parse around or behind it, since a value inside broken
JSON may be a quotation of the rollout. A reply that was cut is refused whatever it holds. Nothing is repaired.

On the last attempt a complete answer counts although a broken one stands behind it, with a note.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draco_ray.errors import ReplyError
from draco_ray.records import Criterion, Verdict

MAX_REPLY_CHARACTERS = 400_000
"""Longer replies are refused unread: 24 criteria with evidence take a tenth of it."""
MAX_TEXT_CHARACTERS = 8_000
"""Maximum length of one text, in characters; longer ones are truncated, because later prompts repeat them."""
MAX_TITLE_CHARACTERS = 300
MAX_BROKEN = 1_000
"""Maximum number of places that look like JSON and do not parse: bounds the time that reading takes."""

THINK_BEGIN, THINK_END = "<think>", "</think>"
ENTRIES = "entries"
"""The one key of the object that our prompts ask for."""

_NO_ANSWER = {
    "content_filter": "the reply was withheld by the provider's content filter",
    "refusal": "the judge refused to answer",
    "tool_calls": "the judge called a tool instead of answering, and there is none",
    "function_call": "the judge called a tool instead of answering, and there is none",
    "reasoning": "the reply is reasoning that no answer follows",
}
_BEGIN = re.compile(r"\[\s*+[{\]]|\{\s*+[\"}]")
"""Where an array of objects or an object may begin; ``[3]`` in prose is a citation."""
_ENDS_ALONE = re.compile(r"[\s`.]*\Z")

EntryT = TypeVar("EntryT", bound="Entry")
RubricEntryT = TypeVar("RubricEntryT", bound="RubricEntry")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[ValueT]):
    """A usable reply, and what was tolerated in it."""

    value: ValueT
    notes: tuple[str, ...] = ()


def _text(limit: int) -> BeforeValidator:
    def clean(value: object) -> object:
        """A text that can be stored and sent on; a list of quotations becomes lines."""
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = "\n".join(value)
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode("utf-8").replace("\x00", "").strip()
            return value if len(value) <= limit else f"{value[: limit - 6]} [...]"
        return value

    return BeforeValidator(clean)


def _integer(value: object) -> object:
    """An integer, also where a judge writes "1" or 1.0; nothing else becomes one."""
    plain = (
        re.fullmatch(r"(0|[+-]?[1-9][0-9]{0,5})(?:\.0{1,6})?", value.strip(" \t\n\r"))
        if isinstance(value, str)
        else None
    )
    return int(plain[1]) if plain else str(value) if isinstance(value, bool) else value


def _verdict_name(value: object) -> object:
    name = re.sub(r"\W+", "_", value.strip().upper()) if isinstance(value, str) else value
    return "NOT_APPLICABLE" if name in ("N_A", "NA") else name


Title = Annotated[str, _text(MAX_TITLE_CHARACTERS)]
Text = Annotated[str, _text(MAX_TEXT_CHARACTERS)]
Remark = Annotated[Text, BeforeValidator(lambda value: "" if value is None else value)]
Texts = Annotated[list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value or [])]
VerdictName = Annotated[Literal["PASS", "FAIL", "NOT_APPLICABLE"], BeforeValidator(_verdict_name)]
Integer = Annotated[int, BeforeValidator(_integer), Field(strict=True)]
ScoreValue = Annotated[Literal[-1, 0, 1], BeforeValidator(_integer)]


class Entry(BaseModel):
    """One entry of a reply; its fields are those of the JSON schema (`draco_ray.judging.structured`)."""

    model_config = ConfigDict(extra="allow")
    decides: ClassVar[tuple[str, ...]]
    """Fields of which an entry of an answer holds at least one."""
    if_asked: ClassVar[tuple[str, ...]] = ()
    """Fields that belong to the schema only where the prompt shows them."""

    @classmethod
    def decided(cls, value: dict[str, Any]) -> bool:
        """Whether a JSON object is meant as an entry."""
        return any(name in value for name in cls.decides)

    @classmethod
    def complete(cls, value: dict[str, Any]) -> bool:
        """Whether it is one even where it stands outside a list."""
        return all(name in value for name in cls.decides)


class CriterionEntry(Entry):
    """A criterion that the judge proposes or keeps."""

    decides = ("title", "evaluator_instruction")
    if_asked = ("trajectory_evidence", "grounding_references")
    trajectory_evidence: Remark = ""
    grounding_references: Texts = []
    title: Title
    description: Text
    evaluator_instruction: Text


class RubricEntry(Entry):
    """An entry about a criterion of a given rubric; `align` finds out which."""

    rubric_index: Integer | None = None
    rubric_title: Annotated[Title, BeforeValidator(lambda value: "" if value is None else value)] = ""

    @classmethod
    def complete(cls, value: dict[str, Any]) -> bool:
        """See `Entry`: it also has to say which criterion it is about."""
        return super().complete(value) and not value.keys().isdisjoint(("rubric_index", "rubric_title"))

    def second_verdict(self, own: Verdict) -> str | None:
        """A further field that is named like a verdict and holds another one than ``own``: ``"final_score": -1``."""
        for name, value in (self.model_extra or {}).items():
            if "score" in name.lower() or "verdict" in name.lower():
                said = Verdict.__members__.get(str(_verdict_name(value)), _integer(value))
                if said in tuple(Verdict) and said != own:
                    return f"{name[:60]} {str(value)[:60]}"
        return None


def check_finish(text: str, finish_reason: str) -> None:
    """Refuse a reply by how it ended, before looking for JSON in it.

    Raises:
        ReplyError: cut off, broken off, filtered, refused, no answer but a tool call or reasoning, empty, or too long.
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


def read_entries(
    text: str, kind: type[EntryT], count: int | None = None, *, last: bool = False
) -> Parsed[list[EntryT]]:
    """The entries of the reply's answer.

    Args:
        text: the reply.
        kind: what an entry holds.
        count: number of entries; None: any.
        last: whether the judge is not asked again.

    Raises:
        ReplyError: there is no answer, or it is not clear which one counts.
    """
    scan = _Scan(text, kind)
    answers: list[tuple[int, list[EntryT]]] = []
    parts: list[EntryT] = []
    problem = reason = ""
    for place, value in enumerate(scan.values):
        single = isinstance(value, dict) and kind.decided(value)
        listed = [value] if single else _listed(value)
        if listed is None or (single and not kind.complete(value)):
            continue
        if not listed and isinstance(value, list) and not (scan.only_values and scan.ends_at(place)):
            continue  # "It returned []" is no answer.
        try:
            entries = [_entry(kind, each, f"entry {number}, ") for number, each in enumerate(listed)]
        except ReplyError as error:
            reason = str(error) if any(map(kind.decided, listed)) else reason
            problem = reason if any(map(kind.complete, listed)) else problem
            continue
        if single or len(entries) != (len(entries) if count is None else count):
            parts += entries
            reason = f"{len(parts)} entries, expected {count}"
        else:
            answers.append((place, entries))
    if not answers and parts and not problem and len(parts) == (count or len(parts)) and scan.only_values:
        answers.append((len(scan.values) - 1, parts))
    if not answers:
        raise ReplyError(
            (parts and scan.broken) or reason or scan.broken or f"no JSON object with {ENTRIES!r} was found"
        )
    place, answer = answers[-1]
    if any(entries != answer for _, entries in answers) or any(each not in answer for each in parts):
        raise ReplyError("the reply holds several different answers; give exactly one")
    if scan.encloses(place):
        raise ReplyError(scan.broken or "the answer stands inside JSON that does not parse")
    doubt = problem or scan.broken_behind(place)
    if doubt and not last:
        raise ReplyError(f"beside the answer stands another one that cannot be used: {doubt}; give exactly one")
    return Parsed(value=answer, notes=(f"left out what stands beside the answer: {doubt}",) if doubt else ())


def parse_criteria(
    text: str, *, limit: int, source: str, taken: Sequence[Criterion] = (), least: int = 0, last: bool = False
) -> Parsed[tuple[Criterion, ...]]:
    """Read a list of proposed or merged criteria (phases stage1, stage2, union).

    Args:
        text: the reply.
        limit: how many are kept; the rest is left out with a note.
        source: recorded with each criterion.
        taken: criteria whose titles must not come again; such entries are left out with a note.
        least: minimum number of entries.
        last: whether the judge is not asked again.

    Raises:
        ReplyError: as `read_entries`, or fewer entries.
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
            kept.append(
                Criterion(
                    title=entry.title,
                    description=entry.description,
                    evaluator_instruction=entry.evaluator_instruction,
                    source=source,
                )
            )
    if len(kept) > limit:
        notes.append(f"left out {len(kept) - limit} of {len(kept)} criteria: the limit is {limit}")
    return Parsed(value=tuple(kept[:limit]), notes=tuple(notes))


def align(entries: Sequence[RubricEntryT], rubric: Sequence[Criterion]) -> tuple[list[RubricEntryT], tuple[str, ...]]:
    """The entry of each criterion, in the rubric's order, and what was tolerated.

    An entry belongs to its ``rubric_index``, else to the criterion of its title, else to the one that is left.

    Raises:
        ReplyError: a criterion has no entry or two, or an index comes with another criterion's title.
    """
    titles = [_normal(criterion.title) for criterion in rubric]
    found: dict[int, RubricEntryT] = {}
    nameless: list[RubricEntryT] = []
    notes = []
    for place, entry in enumerate(entries):
        named = [index for index, title in enumerate(titles) if title == _normal(entry.rubric_title)]
        target = entry.rubric_index
        if target is None:
            if not named:
                nameless.append(entry)
                continue
            target = place if place in named else named[0]
        elif not 0 <= target < len(rubric):
            raise ReplyError(f"rubric_index {target} does not exist; {_wanted(rubric)}")
        elif named and target not in named:
            raise ReplyError(
                f"rubric_index {target} comes with the title of rubric_index {named[0]}; {_wanted(rubric)}"
            )
        elif not named:
            notes.append(f"rubric_index {target} came with an unknown title: {entry.rubric_title[:80]!r}")
        if target in found:
            raise ReplyError(f"rubric_index {target} is answered twice; {_wanted(rubric)}")
        found[target] = entry
    left = [index for index in range(len(rubric)) if index not in found]
    if len(left) != len(nameless) or len(left) > 1:
        raise ReplyError(f"rubric_index {', '.join(map(str, left))} is not answered; {_wanted(rubric)}")
    for index, entry in zip(left, nameless, strict=True):
        notes.append(f"rubric_index {index} was the only one left for {entry.rubric_title[:80]!r}")
        found[index] = entry
    return [found[index] for index in range(len(rubric))], tuple(notes)


@dataclass(slots=True)
class _Scan:
    """The complete JSON values of a text, and whether JSON of ``kind`` stands around them that does not parse."""

    text: str
    kind: type[Entry]
    values: list[Any] = field(init=False, default_factory=list)
    spans: list[tuple[int, int]] = field(init=False, default_factory=list)
    broken: str = field(init=False, default="")
    """Why the last place that looks like JSON does not parse."""

    def __post_init__(self) -> None:
        decoder = json.JSONDecoder(
            strict=False,  # Line breaks inside strings leave no doubt.
            parse_int=lambda token: token if token == "-0" else int(token),
            parse_float=str,
            parse_constant=_refuse,
            object_pairs_hook=self._object,
        )
        position, failed = 0, 0
        while match := _BEGIN.search(self.text, position):
            try:
                value, end = decoder.raw_decode(self.text, match.start())
            except (ValueError, RecursionError) as error:
                if isinstance(error, ReplyError):
                    raise
                position, failed = match.start() + 1, failed + 1
                self.broken = f"JSON that does not parse: {str(error)[:100]}"
                if failed > MAX_BROKEN:
                    raise ReplyError("the reply holds too much JSON that does not parse") from None
            else:
                self.values.append(value)
                self.spans.append((match.start(), end))
                position = end
        self._drop_reasoning()

    def _drop_reasoning(self) -> None:
        """Replace values in front of the last ``</think>`` by None; a tag inside a value is a quotation."""
        ended = -1
        for match in re.finditer(THINK_END, self.text):
            if not any(begin < match.start() < end for begin, end in self.spans):
                ended = match.start()
        if ended < 0 and self.text.lstrip().startswith(THINK_BEGIN):
            raise ReplyError("the reply is reasoning that no answer follows")
        self.values = [
            value if begin > ended else None for value, (begin, _) in zip(self.values, self.spans, strict=True)
        ]

    @property
    def only_values(self) -> bool:
        """Whether no bracket stands outside a complete value: objects in a row are then the entries."""
        around = self._outside(0, behind=False) + self._outside(0, behind=True)
        return not re.search(r"[\[\]{}]", around)

    def ends_at(self, place: int) -> bool:
        """Whether nothing follows a value."""
        return bool(_ENDS_ALONE.match(self.text, self.spans[place][1]))

    def encloses(self, place: int) -> bool:
        """Whether a value may stand inside JSON that does not parse: a key right in front of it, or a bracket behind it
        and fields around it."""
        front, behind = self._outside(place, behind=False), self._outside(place, behind=True)
        closes = re.search(r"[}\]]", behind) is not None
        return (closes and self._has_field(front + behind)) or re.search(r'"\s*:\s*\Z', front) is not None

    def broken_behind(self, place: int) -> str:
        """Why fields behind a value belong to no complete one; empty where there are none."""
        found = self._has_field(self._outside(place, behind=True))
        return (self.broken or "JSON that is not complete") if found else ""

    def _outside(self, place: int, *, behind: bool) -> str:
        """The text in front of a value or behind it that belongs to no value."""
        spans = self.spans[place:] if behind else self.spans[: place + 1]
        edges = [0, *(edge for span in spans for edge in span), len(self.text)]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        return "\n".join(self.text[begin:end] for begin, end in (gaps[1:] if behind else gaps[:-1]))

    def _has_field(self, text: str) -> bool:
        return bool(re.search(rf'"(?:{"|".join(self.kind.model_fields)})"\s*:', text))

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs) and not found.keys().isdisjoint(self.kind.model_fields):
            raise ReplyError("a key comes twice in one object; write every key once")
        return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _listed(value: Any) -> list[dict[str, Any]] | None:
    """The entries that a JSON value lists: an array of objects, or an object with one such array."""

    def objects(part: Any) -> bool:
        return isinstance(part, list) and all(isinstance(each, dict) for each in part)

    if isinstance(value, dict) and ENTRIES not in value:
        arrays = [part for part in value.values() if part and objects(part)]
        value = arrays[0] if len(arrays) == 1 else None
    elif isinstance(value, dict):
        value = value[ENTRIES]
    return value if objects(value) else None


def _entry(kind: type[EntryT], value: dict[str, Any], where: str = "") -> EntryT:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        found = "" if problem["type"] == "missing" else f", found {str(problem['input'])[:60]!r}"
        raise ReplyError(f"{where}field {name}: {problem['msg']}{found}") from None


def _normal(title: str) -> str:
    """Titles are compared without case, width, punctuation and spacing."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", title[:MAX_TITLE_CHARACTERS]).casefold()))


def _wanted(rubric: Sequence[Criterion]) -> str:
    listed = "; ".join(f"{index}: {criterion.title}" for index, criterion in enumerate(rubric))
    return f"answer exactly one entry for each of these, with rubric_index and rubric_title: {listed}"

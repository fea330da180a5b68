"""Judge replies: text in, checked values out, or one `ReplyError` whose message tells the judge what to mend.

A reply is used whole or not at all. In this order:

1. ``finish_reason`` (a reply cut at the token limit can look complete once it is repaired), emptiness, length.
   Reasoning in front of the answer is passed over (`after_thinking`).
2. JSON: strict, with prose or code fences around it; else json-repair, and only if the array visibly ends.
3. The schema of the phase. Scores are -1, 0 or 1; steps lie within the trajectory; nothing is coerced to zero.
4. One entry for each criterion, no more, no fewer: matched by ``rubric_index`` (else by position), cross-checked
   against the title. A title that names another criterion is a contradiction; so are duplicates. A title that names
   none (a translation, say) is accepted where the index is stated or only one criterion is left for it. Entries
   without an index whose titles are all known may come in any order.

What is tolerated is noted, never silent: criteria beyond the limit or with a title already taken are cut, a title that
names nothing, and, when asked to (`parse_attributions`), a step that does not exist and a verdict that cites none.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import json_repair
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draco_ray.errors import ReplyError
from draco_ray.records import Attribution, Criterion, ScoredCriterion, Verdict

MAX_REPLY_CHARACTERS = 400_000
"""Longer replies are refused unread: 24 criteria with evidence fill a tenth of it."""
MAX_REPAIR_CHARACTERS = 80_000
"""Longer broken replies are asked for again: repairing takes time quadratic in their brackets."""
MAX_TEXT_CHARACTERS = 8_000
"""Of one field: what a judge writes is repeated in later prompts."""
MAX_TITLE_CHARACTERS = 300

MAX_FAILURES = 1_000
"""Beginnings of JSON in reasoning that turn out to be none; each is looked at in time linear in the reply."""

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
        ReplyError: cut off, filtered, empty or absurdly long.
    """
    if finish_reason == "length":
        raise ReplyError("the reply was cut off at the token limit; answer with shorter texts")
    if finish_reason == "content_filter":
        raise ReplyError("the reply was withheld by the provider's content filter")
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
    """
    if THINK_END not in text:
        return text
    outside = _without_json(text)
    begin = 0
    opened = opened or text.lstrip().startswith(THINK_BEGIN)
    for closing in re.finditer(THINK_END, outside):
        if _FIELD.search(outside, begin, closing.start()) and not opened:
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
    entries = _entries(text, _CriterionReply)
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


def parse_scores(text: str, rubric: Sequence[Criterion]) -> Parsed[tuple[ScoredCriterion, ...]]:
    """Read the verdicts on a rubric, in the rubric's order.

    Raises:
        ReplyError: not exactly one entry per criterion, or a score outside -1, 0, 1.
    """
    entries = _entries(text, _ScoreReply)
    order, notes = _align(entries, rubric)
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


def parse_attributions(
    text: str, rubric: Sequence[Criterion], num_steps: int, *, lenient: bool = False
) -> Parsed[tuple[Attribution, ...]]:
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
    entries = _entries(text, _AttributionReply)
    order, alignment_notes = _align(entries, rubric)
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


def _integer(value: object) -> object:
    """Integers as judges write them: 1, 1.0, "1", "+1". Booleans, NaN and everything else stay as they are and fail."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,6}\s*", value):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return int(value)
    if isinstance(value, bool):
        return str(value)
    return value


def _verdict(value: object) -> object:
    if not isinstance(value, str):
        return value
    name = re.sub(r"[\s_/-]+", "_", value.strip().upper())
    return {"N_A": "NOT_APPLICABLE", "NA": "NOT_APPLICABLE"}.get(name, name)


_Title = Annotated[str, BeforeValidator(_text), Field(min_length=1, max_length=MAX_TITLE_CHARACTERS)]
_Body = Annotated[str, BeforeValidator(_text), Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
_Remark = Annotated[str, BeforeValidator(_optional_text), Field(max_length=MAX_TEXT_CHARACTERS)]
_Integer = Annotated[int, BeforeValidator(_integer), Field(strict=True)]


class _Entry(BaseModel):
    # Fields beyond the schema (grounding_references, trajectory_evidence, ...) stay in the archived reply.
    model_config = ConfigDict(extra="ignore")


class _CriterionReply(_Entry):
    title: _Title
    description: _Body
    evaluator_instruction: _Body


class _RubricEntry(_Entry):
    rubric_title: _Remark = ""
    rubric_index: _Integer | None = None


class _ScoreReply(_RubricEntry):
    score: Annotated[Literal[-1, 0, 1], BeforeValidator(_integer)]
    evidence: _Remark = ""
    justification: _Remark = ""


class _AttributionReply(_RubricEntry):
    verdict: Annotated[Literal["PASS", "FAIL", "NOT_APPLICABLE"], BeforeValidator(_verdict)]
    relevant_steps: Annotated[list[_Integer], BeforeValidator(lambda value: [] if value is None else value)]
    explanation: _Remark = ""


EntryT = TypeVar("EntryT", bound=_Entry)
RubricEntryT = TypeVar("RubricEntryT", bound=_RubricEntry)


# --- JSON -------------------------------------------------------------------------------------------------------------

# Where an array of objects or an object begins: `[3]` in prose is a citation, `{x}` a name.
_BEGIN = re.compile(r"\[\s*[{\]]|\{\s*[\"}]")
_ARRAY_BEGIN = re.compile(r"\[\s*\{")
_ARRAY_END = re.compile(r"\}\s*,?\s*\]")


# A field of any schema: JSON of the answer's kind, if it stands where no valid JSON is.
_NAMES = {name for schema in (_CriterionReply, _ScoreReply, _AttributionReply) for name in schema.model_fields}
_FIELD = re.compile(rf"""["'](?:{"|".join(sorted(_NAMES))})["']\s*:""")


def _without_json(text: str) -> str:
    """``text`` with every valid array of objects and every valid object blanked out, at its full length."""
    decoder = json.JSONDecoder(strict=False)
    parts: list[str] = []
    kept = position = failures = 0
    while failures < MAX_FAILURES and (match := _BEGIN.search(text, position)):
        try:
            _, end = decoder.raw_decode(text, match.start())
        except RecursionError:
            break
        except ValueError:
            position = match.start() + 1
            failures += 1
            continue
        parts += [text[kept : match.start()], " " * (end - match.start())]
        kept = position = end
    return "".join([*parts, text[kept:]])


def _entries(text: str, schema: type[EntryT]) -> list[EntryT]:
    """The one array of objects in ``text`` that fits ``schema``."""
    body = after_thinking(text)
    arrays = _strict_arrays(body)
    if not arrays:
        arrays = _repaired_arrays(body, list(schema.model_fields))
    if not arrays:
        raise ReplyError("no complete JSON array of objects was found in the reply")
    fitting: list[list[EntryT]] = []
    errors: list[str] = []
    for array in arrays:
        try:
            entries = [_entry(schema, position, value) for position, value in enumerate(array)]
        except ReplyError as error:
            errors.append(str(error))
            continue
        if entries not in fitting:
            fitting.append(entries)
    if not fitting:
        raise ReplyError(errors[-1])
    if len(fitting) > 1:
        raise ReplyError("the reply holds several different JSON arrays; answer with exactly one")
    return fitting[0]


def _entry(schema: type[EntryT], position: int, value: object) -> EntryT:
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        found = "" if problem["type"] == "missing" else f", found {str(problem['input'])[:60]!r}"
        raise ReplyError(f"entry {position}, field {field}: {problem['msg']}{found}") from None


def _strict_arrays(text: str) -> list[list[Any]]:
    """Top-level arrays of objects that are valid JSON; consecutive single objects count as one array.

    Stops at the first thing that starts like one and is not valid: what stands inside it may be a quotation of the
    trajectory, which must not be taken for the judge's word.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    arrays: list[list[Any]] = []
    objects: list[Any] = []
    position = 0
    while match := _BEGIN.search(text, position):
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            return []
        if isinstance(value, list):
            arrays.append(value)
        elif wrapped := _wrapped_array(value):
            arrays.append(wrapped)
        else:
            objects.append(value)
    if objects:
        arrays.append(objects)
    return [array for array in arrays if all(isinstance(entry, dict) for entry in array)]


def _repaired_arrays(text: str, fields: Sequence[str]) -> list[list[Any]]:
    """The array of objects in ``text`` after json-repair, if repairing it leaves no doubt about its structure.

    It must visibly end, because a cut reply must not be completed; and each of the ``fields`` must be written exactly
    as often as it is found, because a quotation with unescaped quotes can pose as further objects.
    """
    begin = _ARRAY_BEGIN.search(text)
    if begin is None:
        return []
    ends = [match.end() for match in _ARRAY_END.finditer(text, begin.start())]
    if not ends or ends[-1] - begin.start() > MAX_REPAIR_CHARACTERS:
        return []
    span = text[begin.start() : ends[-1]]
    try:
        value = json_repair.loads(span)
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return []
    for name in fields:
        written = len(re.findall(rf"""(?<!\\)["']{name}["']\s*:""", span))
        if written != sum(name in entry for entry in value):
            return []
    return [value]


def _wrapped_array(value: dict[str, Any]) -> list[Any] | None:
    """``{"rubrics": [...]}``: the array, if it is the object's only one of objects."""
    arrays = [
        part for part in value.values() if isinstance(part, list) and part and all(isinstance(e, dict) for e in part)
    ]
    return arrays[0] if len(arrays) == 1 else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# --- matching ---------------------------------------------------------------------------------------------------------


def _align(entries: Sequence[RubricEntryT], rubric: Sequence[Criterion]) -> tuple[list[int], tuple[str, ...]]:
    """For each criterion the position of its entry; see the module's rule 4."""
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
            if named and target not in named:
                raise ReplyError(
                    f"rubric_index {target} comes with the title of rubric_index {named[0]}; {_wanted(rubric)}"
                )
            if not named:
                notes.append(f"rubric_index {target} came with an unknown title: {entry.rubric_title[:80]!r}")
        elif named:
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


def _normal(title: str) -> str:
    """Titles compare without case, punctuation and spacing."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", title).casefold()))


def _wanted(rubric: Sequence[Criterion]) -> str:
    listed = "; ".join(f"{index}: {criterion.title}" for index, criterion in enumerate(rubric))
    return f"answer exactly one entry for each of these, with rubric_index and rubric_title: {listed}"

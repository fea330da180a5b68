"""The JSON of a judge's reply: writing the schema and the tag that are asked for, and reading the answer.

Providers write fields in the schema's order, so the schema has the order of the prompt's own example. A `ReplyError` is
sent back to the judge.

The answer is the object with the request's tag, whatever else the reply contains (`extract_tagged_answer`). Without a
tag, the last complete JSON value that satisfies the schema is the answer; text around it is ignored. The judge is asked
again in four cases: there is no such value; two of them differ; an answer that does not satisfy the schema follows; or
JSON around or after the answer does not parse but looks like an answer, since the value may then be a quotation of the
rollout. A truncated reply is always refused. Only what has a single meaning is repaired: a trailing comma, and a
backslash that begins no escape.

On the last attempt a complete answer counts even if a broken one follows it, with a note.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draco_ray.errors import ReplyError

MAX_REPLY_CHARACTERS = 400_000
"""Maximum length of a reply, in characters; longer ones are refused. 24 criteria with evidence take a tenth of it."""
MAX_TEXT_CHARACTERS = 8_000
"""Maximum length of one text, in characters; longer ones are truncated, because later prompts repeat them."""
MAX_TITLE_CHARACTERS = 300
MAX_BROKEN = 1_000
"""Maximum number of places that look like JSON and do not parse; bounds the parsing time."""

THINK_BEGIN, THINK_END = "<think>", "</think>"
_THINK = re.compile(r"\s*+(?:<think(?:ing)?>|\u25c1think\u25b7)")
_THINK_END = re.compile("</think(?:ing)?>|\u25c1/think\u25b7")
"""End of the reasoning; the last form is Kimi's."""
ENTRIES_KEY = "entries"
"""Key of the answer's list."""
TAG = "request_tag"
"""Key of the request's tag (`with_tag`)."""

_ENDED = {
    "length": "the reply was cut off at the token limit; answer with shorter texts",
    "content_filter": "the reply was withheld by the provider's content filter",
    "refusal": "the judge refused to answer",
    "tool_calls": "the judge called a tool instead of answering, but has no tools",
    "reasoning": "the reply contains reasoning but no answer",
}
_BEGIN = re.compile(r"\[\s*+[{\]]|\{\s*+[\"}]")
"""Start of an array of objects or an object; ``[3]`` in prose is a citation."""
JsonSchema = dict[str, Any]
EntryT = TypeVar("EntryT", bound="Entry")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[ValueT]):
    """A usable reply, and notes about its flaws."""

    value: ValueT
    notes: tuple[str, ...] = ()


def _text(limit: int) -> BeforeValidator:
    def clean(value: object) -> object:
        """Clean a text; a list of quotations becomes lines."""
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = "\n".join(value)
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode("utf-8").replace("\x00", "").strip()
            return value if len(value) <= limit else f"{value[: limit - 6]} [...]"
        return value

    return BeforeValidator(clean)


def integer(value: object) -> object:
    """An integer, also from "1" or 1.0; other values stay as they are."""
    text = value.strip(" \t\n\r") if isinstance(value, str) else ""
    if plain := re.fullmatch(r"(0|[+-]?[1-9][0-9]{0,5})(?:\.0{1,6})?", text):
        return int(plain[1])
    return str(value) if isinstance(value, bool) else value


def _remark(value: object) -> object:
    """A `Remark`, such as ``evidence``, as text: null becomes an empty text, a number or object its JSON."""
    if isinstance(value, int | dict) or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value


def verdict_name(value: object) -> object:
    """The name of a `Verdict`, also from "pass" or "N/A"; other values stay as they are."""
    name = re.sub(r"\W+", "_", value.strip(" \t\n*_`").upper()) if isinstance(value, str) else value
    return "NOT_APPLICABLE" if name in ("N_A", "NA") else name


Title = Annotated[str, _text(MAX_TITLE_CHARACTERS)]
Text = Annotated[str, _text(MAX_TEXT_CHARACTERS)]
Remark = Annotated[Text, BeforeValidator(_remark)]
Texts = Annotated[list[Remark], BeforeValidator(lambda value: [value] if isinstance(value, str) else value or [])]
VerdictName = Annotated[Literal["PASS", "FAIL", "NOT_APPLICABLE"], BeforeValidator(verdict_name)]
Integer = Annotated[int, BeforeValidator(integer), Field(strict=True)]
ScoreValue = Annotated[Literal[-1, 0, 1], BeforeValidator(integer)]


class Entry(BaseModel):
    """One entry of a reply; its fields are those of the JSON schema (`reply_schema`)."""

    model_config = ConfigDict(extra="allow")
    decides: ClassVar[tuple[str, ...]]
    """Fields that mark an object as an entry: it has at least one of them."""
    if_asked: ClassVar[tuple[str, ...]] = ()
    """Fields that are in the schema only if the prompt shows them."""

    @classmethod
    def decided(cls, value: dict[str, Any]) -> bool:
        """Whether a JSON object is meant as an entry: it has at least one of the fields `decides`."""
        return any(name in value for name in cls.decides)

    @classmethod
    def complete(cls, value: dict[str, Any]) -> bool:
        """Whether an object counts as an entry even outside a list."""
        return all(name in value for name in cls.decides)


def reply_schema(
    entry: type[Entry],
    template: str,
    *,
    least: int = 0,
    most: int | None = None,
    cases: Sequence[Mapping[str, Mapping[str, Any]]] = ({},),
) -> JsonSchema:
    """The JSON schema of a reply to ``template``, strict in OpenAI's sense: every field required, no others.

    Args:
        entry: schema of an entry.
        template: the prompt, whose example gives the fields' order.
        least: minimum number of entries.
        most: maximum number; None: any.
        cases: further constraints by field, such as a maximum; an entry satisfies one of the cases.
    """
    known = _fields(entry)
    place = {name: match.start() for name in known if (match := re.search(rf'"{name}"\s*:', template))}
    names = sorted(
        (name for name in known if name in place or name not in entry.if_asked),
        key=lambda name: place.get(name, len(template)),
    )
    items = [_object({name: known[name] | dict(case.get(name, {})) for name in names}) for case in cases]
    array = {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}, "minItems": least}
    return _object({TAG: {"type": "string"}, ENTRIES_KEY: array if most is None else array | {"maxItems": most}})


def with_tag(prompt: str) -> str:
    """The prompt with its tag at the end: six digits derived from it. The reply repeats them, so a reply to another
    request is noticed. The schema does not contain the digits, since providers compile and cache schemas."""
    tag = int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=8).digest(), "big") % 10**6
    return f'{prompt.rstrip()}\n\nBegin the JSON object with "{TAG}": "{tag:06d}", which names this request.\n'


def tag_of(prompt: str) -> str:
    """The tag at the end of a prompt; empty if there is none."""
    found = re.search(rf'"{TAG}": "([0-9]{{6}})"[^"]*\Z', prompt)
    return found[1] if found else ""


@functools.cache
def _fields(entry: type[Entry]) -> dict[str, JsonSchema]:
    """The JSON schema of each field; pydantic takes milliseconds to make it."""
    return {name: _plain(kind) for name, kind in entry.model_json_schema()["properties"].items()}


def _plain(kind: Mapping[str, Any]) -> JsonSchema:
    """A field's JSON schema without pydantic's titles, defaults and null."""
    kind = next((part for part in kind.get("anyOf", ()) if part.get("type") != "null"), kind)
    return {key: value for key, value in kind.items() if key not in ("title", "default")}


def _object(fields: Mapping[str, Any]) -> JsonSchema:
    return {"type": "object", "properties": dict(fields), "required": [*fields], "additionalProperties": False}


def check_finish(text: str, finish_reason: str) -> None:
    """Refuse a reply by its finish reason or length.

    Raises:
        ReplyError: truncated, interrupted, filtered, refused, only a tool call or reasoning, empty, or too long.
    """
    if finish_reason != "stop":
        why = _ENDED.get(finish_reason, f"the provider broke the reply off ({finish_reason[:60]!r}); answer again")
        said = " ".join(text.split())[:200] if finish_reason in ("refusal", "tool_calls") else ""
        raise ReplyError(f"{why}: {said!r}" if said else why)
    if not text.strip():
        raise ReplyError("the reply is empty")
    if len(text) > MAX_REPLY_CHARACTERS:
        raise ReplyError(f"the reply has {len(text)} characters; at most {MAX_REPLY_CHARACTERS} are read")


def extract_tagged_answer(text: str, tag: str, kind: type[Entry]) -> str:
    """The answer with the request's tag, or the whole text if nothing in it has a tag.

    Quotations of a rollout cannot contain the tag, which the rollout never saw.

    Raises:
        ReplyError: the answer has the tag of another request, or several different answers have this request's tag.
    """
    objects = [each for value in _scan(text, kind)[0] for each, _ in _walk(value, kind) if isinstance(each, dict)]
    tagged = [each for each in objects if re.fullmatch("[0-9]{6}", str(each.get(TAG)))]
    own = [each for each in tagged if str(each[TAG]) == tag]
    if tagged and not own:
        raise ReplyError(f"the reply has {TAG} {tagged[-1][TAG]}, that of another request; this request has {tag}")
    own = [each for each in own if len(each) > 1]
    if own and all(map(kind.complete, own)):
        return json.dumps(own)  # The judge put the tag into each entry.
    if any(each != own[-1] for each in own):
        raise ReplyError("the reply holds several different answers; give exactly one")
    return json.dumps(own[-1]) if own else text


def read_entries(
    text: str, kind: type[EntryT], count: int | None = None, *, last: bool = False
) -> Parsed[list[EntryT]]:
    """The entries of the reply's answer.

    Args:
        text: the reply.
        kind: schema of an entry.
        count: number of entries; None: any.
        last: whether this is the last attempt, after which the judge is not asked again.

    Raises:
        ReplyError: there is no answer, or several.
    """
    values, gaps, broken = _scan(text, kind)
    # If there are no brackets outside the JSON values, a row of objects is the entries, and a final "[]" the answer.
    only_values = not re.search(r"[\[\]{}]", "".join(gaps))
    ends_alone = only_values and not gaps[-1].strip(" \t\n\r`.")
    answers: list[tuple[int, list[EntryT]]] = []
    parts: list[EntryT] = []
    problem = reason = ""
    found = [(place, part) for place, value in enumerate(values) for part, is_part in _walk(value, kind) if is_part]
    for place, value in found:
        single = isinstance(value, dict)
        listed = [value] if single else value
        if values[place] == [] and not (ends_alone and len(found) == 1 and place == len(values) - 1):
            continue
        try:
            entries = [_entry(kind, each, f"entry {number}, ") for number, each in enumerate(listed)]
        except ReplyError as error:
            reason = str(error) if any(map(kind.decided, listed)) else reason
            problem = reason if any(map(kind.complete, listed)) else problem
            continue
        if single or len(entries) != (len(entries) if count is None else count):
            parts += entries
            reason = broken or f"{len(parts)} entries, expected {count}"
        else:
            answers.append((place, entries))
    if not answers and parts and not problem and len(parts) == (count or len(parts)) and only_values:
        answers.append((len(values) - 1, parts))
    if not answers:
        raise ReplyError(reason or broken or f"no JSON object with {ENTRIES_KEY!r} was found")
    place, answer = answers[-1]
    if any(entries != answer for _, entries in answers) or any(each not in answer for each in parts):
        raise ReplyError("the reply holds several different answers; give exactly one")
    front, behind = "\n".join(gaps[: place + 1]), "\n".join(gaps[place + 1 :])
    fields = re.compile(rf'"(?:{"|".join(kind.model_fields)})"\s*:')
    # The answer may be a quotation inside JSON that does not parse. Signs: a key directly before the answer; an entry's
    # fields around the answer and a closing bracket after it; fields and an unclosed bracket before it. For the last
    # sign, reasoning is ignored, because it contains drafts, unless the reply begins with a bracket.
    open_json = front if front.lstrip(" \n`json").startswith(("{", "[")) else _THINK_END.split(front)[-1]
    unclosed = _opened(open_json) > 0
    closed_behind = re.search(r"[}\]]", behind) and fields.search(front + behind)
    if re.search(r'"\s*:\s*\Z', front) or closed_behind or (unclosed and fields.search(open_json)):
        raise ReplyError(broken or "the answer stands inside JSON that does not parse")
    begun = (match[1] for match in re.finditer(r'\{\s*"(\w*)', behind))
    begins = any(name.startswith(key) for key in begun for name in kind.model_fields)
    unfinished = fields.search(behind) or begins or (re.search(r"\[\s*\{", behind) and _opened(behind) > 0)
    doubt = problem or (unfinished and (broken or "JSON that is not complete"))
    if doubt and not last:
        raise ReplyError(f"besides the answer there is another one that cannot be used: {doubt}; give exactly one")
    return Parsed(value=answer, notes=(f"left out what stands beside the answer: {doubt}",) if doubt else ())


def _scan(text: str, kind: type[Entry]) -> tuple[list[Any], list[str], str]:
    """The complete JSON values of a text (None for one inside reasoning), the texts before, between and after them, and
    the last parsing error."""

    decoder = _decoder(kind)
    # Keep a backslash that begins no escape of JSON (`\d`, `\'`) as a backslash, and drop trailing commas.
    text = re.sub(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\', lambda match: match[0] if len(match[0]) > 1 else r"\\", text)
    text = re.sub(r",(?=\s*+[\]}])", "", text)
    values: list[Any] = []
    gaps: list[str] = []
    broken, begin, position, failed = "", 0, 0, 0
    while match := _BEGIN.search(text, position):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ReplyError:
            raise
        except (ValueError, RecursionError) as error:
            position, failed = match.start() + 1, failed + 1
            broken = f"JSON that does not parse: {str(error)[:100]}"
            if failed > MAX_BROKEN:
                raise ReplyError("the reply holds too much JSON that does not parse") from None
            continue
        values.append(value)
        gaps.append(text[begin : match.start()])
        begin = position = end
    gaps.append(text[begin:])
    # Reasoning ends at the last tag outside JSON; a tag inside is a quotation.
    reasoned = max((place for place, gap in enumerate(gaps) if _THINK_END.search(gap)), default=-1)
    if reasoned < 0 and _THINK.match(text):
        raise ReplyError("the reply contains reasoning but no answer")
    return [value if place >= reasoned else None for place, value in enumerate(values)], gaps, broken


def _decoder(kind: type[Entry]) -> json.JSONDecoder:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) < len(found) and any(
            key in (ENTRIES_KEY, *kind.model_fields) or isinstance(each, dict | list) for key, each in found
        ):
            raise ReplyError("a key comes twice in one object; write every key once")
        return dict(found)

    def whole(token: str) -> object:
        return token if token == "-0" else int(token)

    # Not strict: line breaks inside strings are unambiguous.
    return json.JSONDecoder(strict=False, parse_int=whole, parse_float=str, object_pairs_hook=pairs)


def _walk(value: Any, kind: type[Entry]) -> Iterator[tuple[Any, bool]]:
    """Every value nested in a JSON value, in order, and whether it may be the answer or a part of the answer.

    That is the case for an entry, for an array of objects at least one of which is meant as an entry, and for an empty
    array of entries. Values inside such a value are not visited. Some models write the answer or its entries as a
    string that contains JSON; the string is parsed, too."""
    left = [(ENTRIES_KEY, value)]
    while left:
        name, each = left.pop()
        if name != TAG and isinstance(each, str) and each.lstrip().startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                each = _decoder(kind).decode(each)
        objects, meant = (each, kind.decided) if isinstance(each, list) else ([each], kind.complete)
        is_part = all(isinstance(part, dict) for part in objects) and any(map(meant, objects))
        is_part = is_part or (each == [] and name == ENTRIES_KEY)
        yield each, is_part
        if not is_part and isinstance(each, dict | list):
            inner = each.items() if isinstance(each, dict) else [("", part) for part in each]
            left += reversed([*inner])


def is_complete(text: str) -> bool:
    """Whether a reply that is still being written contains JSON and no open bracket outside complete JSON values."""
    try:
        values, gaps, broken = _scan(text, Entry)
    except ReplyError:
        return False
    return bool(values or broken) and _opened("".join(gaps)) <= 0


def _opened(text: str) -> int:
    """How many more brackets a text opens than it closes."""
    return len(re.findall(r"[\[{]", text)) - len(re.findall(r"[\]}]", text))


def _entry(kind: type[EntryT], value: dict[str, Any], where: str = "") -> EntryT:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        found = "" if problem["type"] == "missing" else f", found {str(problem['input'])[:60]!r}"
        raise ReplyError(f"{where}field {name}: {problem['msg']}{found}") from None

"""JSON in a judge's reply: arrays of objects, read strictly, else leniently where the text leaves no doubt.

Strict reading is JSON with four refusals more: a key that comes twice in an object, a number that is not written
plainly (``-0``, ``1e0``), NaN, and a second verdict where it is not read: under the name of a verdict's field or a
longer one (``final_score``), or behind the array, where only what says nothing of one may stand
(`draco_ray.judging.remarks`). Words in front of it are superseded; between two objects they count. Lenient reading
mends what judges get wrong in JSON of which every value can still be seen: trailing commas, ``+1``, other minus signs
than the ASCII one, line breaks and unescaped quotes in strings, escapes that JSON does not know. It never guesses: a
token that is not exactly a value, a field that is written more often than it is found, or an array that does not
visibly end makes the reply unusable, and the judge is asked again.

Both take time linear in the reply. Lenient reading is Python: `MAX_LENIENT_CHARACTERS` bounds it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from draco_ray.errors import ReplyError
from draco_ray.judging.escaping import ascii_like
from draco_ray.judging.remarks import taken_back

MAX_LENIENT_CHARACTERS = 80_000
"""Longer broken replies are asked for again."""
MAX_SCANNED = 20_000_000
"""Characters looked at in search of JSON among reasoning, beginnings that turn out to be none included."""
MAX_DEPTH = 20
MAX_COMPARED_CHARACTERS = 300
"""Of a name that is compared with others. Unicode's normal form of many accents takes time in the square of them."""

MAX_VALUE_CHARACTERS = 20
"""Of a verdict, however it is spelled; longer texts explain one."""

BEGIN = re.compile(r"\[\s*+[{\]]|\{\s*+(?:[\"}]|[^\w{]*+\Z)")
"""Where an array of objects or an object begins: ``[3]`` in prose is a citation, ``{x}`` a name."""
MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u207b\u208b\u2796\ufe58\ufe63\uff0d"
"""What is written for a minus sign besides ``-``."""
INTEGER = re.compile(r"\+?(?:0|[1-9][0-9]{0,5})|-[1-9][0-9]{0,5}")
"""An integer, written plainly. -0 is none: it may be what is left of something else."""

DECIDING = ("score", "verdict", "relevantsteps")
"""Fields, by `_name`, that must not stand where they are not read, nor under a longer name (``final_score``): which of
two counts would be a guess."""
_HEADING = re.compile(
    r"[\s#*>_]*+(?:-\s++)?(?:(?:criterion|rubric|item|entry)\s++#?\d{1,3}|\d{1,3}[.)])[:*]{0,4}(?=\s|\Z)", re.IGNORECASE
)
"""What numbers the object that follows."""

# "[]" in a sentence and "- [ ]" in a list of tasks are no answer.
_LINE_BEGINS = re.compile(r"(?:\A|\n|:)(?:[^\S\n]|[`*_>#]|</?\w++>)*+\Z")
_LINE_ENDS = re.compile(r"(?:[^\S\n]|[`*_.]|</?\w++>)*+(?:\n|\Z)")

_ASCII_MINUS = str.maketrans(dict.fromkeys(MINUS_SIGNS, "-"))
_ARRAY_BEGIN = re.compile(r"\[\s*+\{")
_WRAPPER = re.compile(r"\{\s*+\"\w++\"\s*+:\s*+")
# JSON's white space and no other: what stands in a minus sign's place is not passed over.
_SPACE = re.compile(r"[ \t\n\r]*+")
_KEY = re.compile(r"\"(\w[\w -]*+)\"[ \t\n\r]*+:[ \t\n\r]*+")
_KEY_INSIDE = re.compile(r"(?<!\\)\"[^\"\\\n]{1,60}+\"\s*+:")
_TOKEN = re.compile(r"[^ \t\n\r,\[\]{}\":]++")
_NUMBER = re.compile(rf"({INTEGER.pattern})(?:\.0{{1,6}})?")
_QUOTE = re.compile(r"\\.|\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})|\\|\"")
# A quotation mark ends a string only where the next thing is what follows a string: the next field, or the object's end
# and with it the next object or the array's end; in a list the next item or the list's end.
_ENDS_FIELD = re.compile(r"\"(?=\s*+(?:,\s*+\"\w[\w -]*+\"\s*+:|(?:,\s*+)?+\}\s*+(?:,\s*+)?+[{\]]))")
_ENDS_ITEM = re.compile(r"\"(?=\s*+(?:,\s*+\"|(?:,\s*+)?+\]))")
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None}
NO_ARRAY = "no complete JSON array of objects was found in the reply"


def integer(value: object) -> object:
    """Integers as judges write them: 1, "1", "+1", "−1". Everything else stays as it is, or becomes text, and fails."""
    if isinstance(value, str):
        plain = ascii_minus(value.strip(" \t\n\r"))
        return int(plain) if INTEGER.fullmatch(plain) else value
    return str(value) if isinstance(value, bool | float) else value


def ascii_minus(text: str) -> str:
    """``text`` with every minus sign the ASCII one."""
    return text.translate(_ASCII_MINUS)


def comparable(name: str) -> str:
    """The beginning of a name, whatever case and width its letters have."""
    return unicodedata.normalize("NFKC", name[:MAX_COMPARED_CHARACTERS]).casefold()


def arrays_of_objects(text: str, fields: Sequence[str]) -> list[list[Any]]:
    """The arrays in ``text`` that hold objects, or nothing; objects on their own count as one array together.

    Args:
        text: the reply behind its reasoning.
        fields: what an entry may hold; in broken JSON each must be written exactly as often as it is found.
    Raises:
        ReplyError: no such array, or one that cannot be read without guessing.
    """
    names = "|".join(map(re.escape, fields))
    named = re.compile(rf"""(?<!\\)["']({names})["']\s*+:""")
    decisive = _decisive(fields)
    strict, deciding = _strict_values(text)
    if strict.values:
        arrays = strict.arrays()
        behind = strict.behind(fields)
        if named.search(around := " ".join(strict.besides)) or re.search(rf"\{{\s*+(?:{names})\s*+:", around):
            raise ReplyError(f"{NO_ARRAY}: fields stand outside of it")
    else:
        deciding = Counter()
        array, rest = _lenient_array(text, named, deciding)
        arrays, behind = [array], [rest]
    read = Counter(key for array in arrays for entry in array if isinstance(entry, dict) for key in entry)
    for key, times in deciding.items():
        if any(name in _name(key) for name in decisive) and (key not in fields or times > read[key]):
            raise ReplyError(f"{key[:60]!r} stands where it is not read; write it once for each entry, under its name")
    if decisive and (words := next(filter(None, map(taken_back, behind)), None)):
        raise ReplyError(
            f"what stands behind the JSON array may take back a verdict of it: {words!r}; answer with the array alone"
        )
    return arrays


def _decisive(fields: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in map(_name, fields) if name in DECIDING)


def without_json(text: str) -> str:
    """``text`` with every valid array of objects and every valid object blanked out, at its full length.

    Raises:
        ReplyError: too many beginnings of JSON that are none.
    """
    decoder = json.JSONDecoder(strict=False)
    parts: list[str] = []
    kept = position = scanned = 0
    while match := BEGIN.search(text, position):
        if scanned > MAX_SCANNED:
            raise ReplyError("the reasoning holds too much broken JSON to tell where it ends; answer without it")
        begin = match.start()
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            # An unterminated string was read to the text's end, whatever place the error names; and to tell in which
            # line a place is, the error has counted from the text's beginning.
            known = isinstance(error, json.JSONDecodeError) and not error.msg.startswith("Unterminated")
            scanned += error.pos if known else len(text)  # type: ignore[union-attr]
            position = begin + 1
            continue
        scanned += end - begin
        parts += [text[kept:begin], " " * (end - begin)]
        kept = position = end
    return "".join([*parts, text[kept:]])


class _Strict:
    """The arrays and objects of a text and what stands around them."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.besides: list[str] = []
        """The texts in front of each value, and behind the last one."""

    def arrays(self) -> list[list[Any]]:
        """The values' arrays; objects in a row are one."""
        found: list[list[Any]] = []
        row = False
        for place, value in enumerate(self.values):
            if value == [] and not self._alone(place):
                continue
            name = None if isinstance(value, list) else _wrapped_array(value)
            alone = isinstance(value, dict) and name is None
            if alone and row:
                found[-1].append(value)
            else:
                found.append([value] if alone else value if name is None else value[name])
            row = alone
        return found

    def _alone(self, place: int) -> bool:
        """Whether a value has its line to itself, but for a label."""
        return bool(_LINE_BEGINS.search(self.besides[place]) and _LINE_ENDS.match(self.besides[place + 1]))

    def behind(self, fields: Collection[str]) -> list[object]:
        """What stands behind verdicts: behind the last array or object that holds fields, in the object that holds the
        array, and between two objects, but for the second one's heading."""
        answers = [place for place, value in enumerate(self.values) if _holds(value, fields)]
        if not answers:
            return []
        last = answers[-1]
        found: list[object] = [*self.besides[last + 1 :], *self.values[last + 1 :]]
        for place in answers:
            value = self.values[place]
            if isinstance(value, dict) and (name := _wrapped_array(value)):
                names = list(value)
                found += [{key: value[key]} for key in names[names.index(name) + 1 :]]
        for first, second in pairwise(answers):
            if isinstance(self.values[first], dict) and isinstance(value := self.values[second], dict):
                found += [_without_heading(text, value) for text in self.besides[first + 1 : second + 1]]
        return found


def _holds(value: Any, fields: Collection[str]) -> bool:
    name = _wrapped_array(value) if isinstance(value, dict) else None
    entries = value[name] if name else value if isinstance(value, list) else [value]
    return any(isinstance(entry, dict) and not entry.keys().isdisjoint(fields) for entry in entries)


def _without_heading(text: str, value: dict[str, Any]) -> str:
    """``text`` in front of an object without its number and title."""
    lines = text.split("\n")
    text = "\n".join(line[heading.end() :] if (heading := _HEADING.match(line)) else line for line in lines)
    for title in (part for key, part in value.items() if key.endswith("title") and isinstance(part, str) and part):
        text = text.replace(title, "\n")
    return text


def _strict_values(text: str) -> tuple[_Strict, Counter[str]]:
    """What there is of valid JSON, and how often keys that may name a field of `DECIDING` stand anywhere.

    Nothing where something starts like an array and is not valid: what stands inside it may be a quotation of the
    trajectory, which must not be taken for the judge's word.
    """
    deciding: Counter[str] = Counter()
    decoder = json.JSONDecoder(
        parse_constant=_refuse_constant,
        parse_int=_plain_int,
        parse_float=_plain_float,
        object_pairs_hook=partial(_object, deciding=deciding),
    )
    found = _Strict()
    position = 0
    while match := BEGIN.search(text, position):
        found.besides.append(text[position : match.start()])
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            return _Strict(), deciding
        found.values.append(value)
    found.besides.append(text[position:])
    return found, deciding


def _wrapped_array(value: dict[str, Any]) -> str | None:
    """``{"rubrics": [...]}``: the array's name, if it is the object's only one of objects."""
    arrays = [
        name
        for name, part in value.items()
        if isinstance(part, list) and part and all(isinstance(each, dict) for each in part)
    ]
    return arrays[0] if len(arrays) == 1 else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _plain_int(token: str) -> object:
    return token if token == "-0" else int(token)


def _plain_float(token: str) -> object:
    number = _NUMBER.fullmatch(token)
    return int(number[1]) if number else float(token)


def _object(pairs: Iterable[tuple[str, Any]], deciding: Counter[str]) -> dict[str, Any]:
    """The pairs as a dict; keys are counted in ``deciding`` that end with the name of a field of `DECIDING`, or under
    which a value stands: ``score_reason`` may hold a text.

    Raises:
        ReplyError: two keys differ by nothing but case, spaces and the like.
    """
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in pairs:
        name = _name(key)
        if name in seen:
            raise ReplyError(f"the key {key[:60]!r} comes twice in one object; write every key once")
        seen.add(name)
        found[key] = value
        if name.endswith(DECIDING) or _is_value(value):
            deciding[key] += 1
    return found


def _is_value(value: object) -> bool:
    """Whether it may be a verdict or steps: no text, nothing, or further objects."""
    if isinstance(value, list):
        return bool(value) and not any(isinstance(each, dict) for each in value)
    return not isinstance(value, dict) and value is not None and len(str(value)) <= MAX_VALUE_CHARACTERS


def _name(key: str) -> str:
    """A key without case, spaces, signs, accents and look-alike letters."""
    short = len(key) <= MAX_COMPARED_CHARACTERS
    plain = unicodedata.normalize("NFKD", comparable(ascii_like(key))) if short else ""
    return "".join(re.findall(r"[^\W_]+", plain)) or key


# --- lenient reading --------------------------------------------------------------------------------------------------


def _lenient_array(text: str, named: re.Pattern[str], deciding: Counter[str]) -> tuple[list[Any], str]:
    """The array, and what stands behind it."""
    begin = _ARRAY_BEGIN.search(text)
    if begin is None:
        raise ReplyError(NO_ARRAY)
    if len(text) - begin.start() > MAX_LENIENT_CHARACTERS:
        raise ReplyError(f"{NO_ARRAY}: it is broken, and too long to be mended")
    first = BEGIN.search(text)
    if first is not None and first.start() < begin.start():
        wrapper = _WRAPPER.fullmatch(text, first.start(), begin.start())
        if wrapper is None:
            raise ReplyError(f"{NO_ARRAY}: there is broken JSON in front of it")
    reader = _Lenient(text, begin.start(), named, deciding)
    entries = reader.entries()
    if named.search(text, reader.position) or _ARRAY_BEGIN.search(text, reader.position):
        raise ReplyError(f"{NO_ARRAY}: it is broken, and more follows it")
    return entries, text[reader.position :]


class _Lenient:
    """Reads one array of objects from ``text``, beginning at its bracket."""

    _where: str
    """The entry or field that is being read."""

    def __init__(self, text: str, position: int, named: re.Pattern[str], deciding: Counter[str]) -> None:
        self._text = text
        self._named = named
        self._deciding = deciding
        self.position = position

    def entries(self) -> list[dict[str, Any]]:
        """The array's objects. Raises ReplyError at the first thing that is not plain."""
        found: list[dict[str, Any]] = []

        def entry() -> None:
            self._where = f"entry {len(found)}"
            begin = self.position
            value = self._fields(0)
            written = Counter(match[1] for match in self._named.finditer(self._text, begin, self.position))
            if written != Counter(self._named_keys(value)):
                raise self._doubt("a field is written more often than it can be read")
            found.append(value)

        self._items("[", "]", entry)
        return found

    def _named_keys(self, value: dict[str, Any]) -> list[str]:
        return [key for key in value if self._named.match(f'"{key}":')]

    def _items(self, opening: str, closing: str, item: Callable[[], None]) -> None:
        """``[item, item,]``: commas between, one more at the end at most."""
        self._expect(opening)
        while not self._text.startswith(closing, self.position):
            item()
            self._skip()
            if not self._text.startswith(closing, self.position):
                self._expect(",")
        self._expect(closing)

    def _fields(self, depth: int) -> dict[str, Any]:
        pairs: list[tuple[str, Any]] = []
        entry = self._where

        def pair() -> None:
            key = _KEY.match(self._text, self.position)
            if key is None:
                raise self._doubt("a field's name was expected")
            self._where = f"{entry}, field {key[1]}"
            self.position = key.end()
            pairs.append((key[1], self._value(depth + 1, _ENDS_FIELD)))
            self._where = entry

        self._items("{", "}", pair)
        return _object(pairs, self._deciding)

    def _value(self, depth: int, ends: re.Pattern[str]) -> Any:
        character = self._text[self.position : self.position + 1]
        if depth > MAX_DEPTH:
            raise self._doubt("too deeply nested")
        if character == "{":
            return self._fields(depth)
        if character == "[":
            values: list[Any] = []
            self._items("[", "]", lambda: values.append(self._value(depth + 1, _ENDS_ITEM)))
            return values
        if character == '"':
            return self._string(ends)
        token = _TOKEN.match(self._text, self.position)
        if token is None:
            raise self._doubt("a value was expected")
        self.position = token.end()
        if token[0] in _WORDS:
            return _WORDS[token[0]]
        number = _NUMBER.fullmatch(ascii_minus(token[0]))
        if number is None:
            raise ReplyError(f"{self._where}: {token[0][:40]!r} is not a plain value")
        return int(number[1])

    def _string(self, ends: re.Pattern[str]) -> str:
        begin = self.position + 1
        for mark in _QUOTE.finditer(self._text, begin):
            if mark[0] == '"' and ends.match(self._text, mark.start()):
                if _KEY_INSIDE.search(self._text, begin, mark.start()):
                    raise self._doubt("a text may hold further fields")
                self.position = mark.end()
                written = _ESCAPE.sub(_escaped, self._text[begin : mark.start()])
                return str(json.loads(f'"{written}"', strict=False))
        raise ReplyError(f"{NO_ARRAY}: it ends within a string")

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self.position)
        self.position = space.end() if space else self.position

    def _expect(self, character: str) -> None:
        if not self._text.startswith(character, self.position):
            raise self._doubt(f"{character!r} was expected")
        self.position += 1
        self._skip()

    def _doubt(self, what: str) -> ReplyError:
        rest = self._text[self.position : self.position + 40]
        return ReplyError(f"{NO_ARRAY}: {self._where}: {what}" + (f" before {rest!r}" if rest else ", it ends there"))


def _escaped(match: re.Match[str]) -> str:
    """Keeps JSON's own escapes; a quotation mark or a backslash that escapes nothing becomes itself."""
    return match[0] if len(match[0]) > 1 else f"\\{match[0]}"

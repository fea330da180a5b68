"""The JSON schema of a phase's reply, and the tag of its request.

Providers write fields in the schema's order, so the schema has the order of the prompt's own example.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.judging.reply import ENTRIES, TAG, Entry

JsonSchema = dict[str, Any]


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
    return _object({TAG: {"type": "string"}, ENTRIES: array if most is None else array | {"maxItems": most}})


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

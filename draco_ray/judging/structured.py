"""The JSON schema of a phase's reply, and requests that send it.

Whether an endpoint takes a schema (``response_format``) is not looked up: schemas are sent until one is refused.

Providers write fields in the schema's order, so the schema has the order of the prompt's own example.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.reply import ENTRIES, TAG, Entry

log = logging.getLogger(__name__)

JsonSchema = dict[str, Any]
_REFUSALS = {400, 404, 422, 501}
_NOT_THE_SCHEMAS_FAULT = ("ContextWindowExceededError", "ContentPolicyViolationError")


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
    """A prompt that ends with its tag, six digits derived from it, which the reply repeats: so a reply to another
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


class StructuredOutput:
    """Sends requests with a schema for as long as the endpoint takes it."""

    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        self.constrained = config.structured_output
        """Whether replies are constrained by a schema, as far as is known."""

    async def complete(self, litellm: Any, schema: Mapping[str, Any] | None, **arguments: Any) -> Any:
        """``litellm.acompletion``, constrained by ``schema`` if the endpoint takes one.

        Raises:
            OpenAIError: whatever the request without a schema raises.
        """
        reason = ""
        if schema is not None and self.constrained:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
            try:
                # Do not consult LiteLLM's table of models that take a schema.
                return await litellm.acompletion(
                    **arguments, response_format=form, allowed_openai_params=["response_format"]
                )
            except Exception as error:
                refused = getattr(error, "status_code", None) in _REFUSALS
                if not refused or type(error).__name__ in _NOT_THE_SCHEMAS_FAULT:
                    raise
                reason = " ".join(str(error).split())[:200]
        response = await litellm.acompletion(**arguments)
        if reason:
            log.warning("%s refuses a JSON schema: %s; replies are parsed without one", self._model, reason)
            self.constrained = False
        return response

"""Hold a judge to a JSON schema: the schema of a phase's reply, and how the endpoint at hand is held to it.

Whether an endpoint honours a schema is tried, not looked up: once in the start-up check, and again whenever it refuses
one. ``response_format`` comes first, then a forced call of one function, then nothing. An endpoint that accepts a
schema and ignores it counts as unconstrained.

Providers write fields in the schema's order, so the schema has the order of the prompt's own example.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.reply import ENTRIES, TAG, Entry

log = logging.getLogger(__name__)

JsonSchema = dict[str, Any]
MODES = ("response_format", "function call", "none")
"""Ways to send a schema, in the order in which they are tried."""
UNCONSTRAINED = len(MODES) - 1
FUNCTION = "answer"
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
    """The JSON schema of a reply to ``template``, strict in OpenAI's sense: every field required, none besides.

    Args:
        entry: what an entry holds.
        template: the prompt, whose example gives the fields' order.
        least: minimum number of entries.
        most: maximum number; None: any.
        cases: by field, what holds of it besides, such as a maximum; an entry satisfies one of several cases.
    """
    known = entry.model_json_schema()["properties"]
    place = {name: match.start() for name in known if (match := re.search(rf'"{name}"\s*:', template))}
    names = sorted(
        (name for name in known if name in place or name not in entry.if_asked),
        key=lambda name: place.get(name, len(template)),
    )
    kinds = {name: _plain(known[name]) for name in names}
    items = [_object({name: kinds[name] | dict(case.get(name, {})) for name in names}) for case in cases]
    array = {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}, "minItems": least}
    return _object({TAG: {"type": "string"}, ENTRIES: array if most is None else array | {"maxItems": most}})


def with_tag(prompt: str) -> str:
    """A prompt that ends with its tag, six digits derived from it, which the reply repeats: so a reply to another
    request is noticed. The schema does not hold the tag, since providers compile and cache schemas."""
    tag = int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=8).digest(), "big") % 10**6
    return f'{prompt.rstrip()}\n\nBegin the JSON object with "{TAG}": "{tag:06d}", which names this request.\n'


def tag_of(prompt: str) -> str:
    """The tag at the end of a prompt; empty where there is none."""
    found = re.search(rf'"{TAG}": "([0-9]{{6}})"[^"]*\Z', prompt)
    return found[1] if found else ""


def _plain(kind: Mapping[str, Any]) -> JsonSchema:
    """A field's JSON schema without pydantic's titles, defaults and null."""
    kind = next((part for part in kind.get("anyOf", ()) if part.get("type") != "null"), kind)
    return {key: value for key, value in kind.items() if key not in ("title", "default")}


def _object(fields: Mapping[str, Any]) -> JsonSchema:
    return {"type": "object", "properties": dict(fields), "required": [*fields], "additionalProperties": False}


PROBE = "Reply with the word OK."
PROBE_SCHEMA = _object(
    {ENTRIES: {"type": "array", "items": {"anyOf": [{"type": "string", "enum": ["OK"]}]}, "minItems": 1, "maxItems": 1}}
)
"""Who is held to it answers `PROBE` with JSON; who is not, with a word."""


def keeps_to(text: str) -> bool:
    """Whether the reply to `PROBE` keeps to its schema."""
    try:
        return bool(json.loads(text) == {ENTRIES: ["OK"]})
    except ValueError:
        return False


class StructuredOutput:
    """Sends requests with a schema, in the first of `MODES` that the endpoint honours."""

    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        self._mode = 0 if config.structured_output else UNCONSTRAINED
        self._honoured = False
        """Whether a request in this mode was answered."""

    @property
    def constrained(self) -> bool:
        """Whether replies are held to a schema, as far as is known."""
        return self._mode < UNCONSTRAINED

    async def complete(self, litellm: Any, schema: Mapping[str, Any] | None, **arguments: Any) -> Any:
        """``litellm.acompletion``, held to ``schema`` where that is possible.

        Raises:
            OpenAIError: whatever the request without a schema raises.
        """
        reason = ""
        modes = range(UNCONSTRAINED if schema is None else self._mode, UNCONSTRAINED + 1)
        # Where the endpoint took a schema before, a refusal is most likely the request's own: one try without tells.
        for mode in (self._mode, UNCONSTRAINED) if self._honoured and len(modes) > 2 else modes:
            try:
                response = await litellm.acompletion(**arguments, **_form(mode, schema))
            except Exception as error:
                refused = getattr(error, "status_code", None) in _REFUSALS
                if mode == UNCONSTRAINED or not refused or type(error).__name__ in _NOT_THE_SCHEMAS_FAULT:
                    raise
                reason = " ".join(str(error).split())[:200]
                continue
            if schema is not None and mode == self._mode:
                self._honoured = True
            if schema is not None and mode > self._mode:
                self._next(mode, f"refuses a schema as {MODES[self._mode]}: {reason}")
            return _with_arguments_as_text(response) if MODES[mode] == "function call" else response
        raise AssertionError("the last mode returns or raises")

    def ignored(self) -> None:
        """Note that a schema was accepted and not kept to."""
        self._next(self._mode + 1, f"ignores a schema as {MODES[self._mode]}")

    def _next(self, mode: int, why: str) -> None:
        level = logging.WARNING if mode == UNCONSTRAINED else logging.INFO
        log.log(level, "%s %s; next: %s", self._model, why, MODES[mode])
        self._mode, self._honoured = mode, False


def _form(mode: int, schema: Mapping[str, Any] | None) -> JsonSchema:
    """The arguments that hold a reply to ``schema``; LiteLLM's table of who takes them is not asked."""
    if MODES[mode] == "response_format":
        form = {"type": "json_schema", "json_schema": {"name": FUNCTION, "strict": True, "schema": schema}}
        return {"response_format": form, "allowed_openai_params": ["response_format"]}
    if MODES[mode] == "function call":
        function = {"name": FUNCTION, "description": "Give the answer.", "parameters": schema, "strict": True}
        return {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": FUNCTION}},
            "allowed_openai_params": ["tools", "tool_choice"],
        }
    return {}


def _with_arguments_as_text(response: Any) -> Any:
    """A response whose forced function call stands as its text."""
    for choice in response.choices:
        for call in getattr(choice.message, "tool_calls", None) or ():
            if call.function.name == FUNCTION:
                choice.message.content, choice.message.tool_calls = call.function.arguments, None
                if choice.finish_reason in ("tool_calls", "function_call"):
                    choice.finish_reason = "stop"
                break
    return response

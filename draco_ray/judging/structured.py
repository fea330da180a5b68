"""Structured output: the JSON schema of a phase's reply, and whether the endpoint at hand takes one.

A reply that the provider holds to a schema needs no guessing. The schema names the fields in the order in which the
prompt's own example does, because providers write them in the schema's order and a verdict should come after its
reasons where the prompt wants it so. The root is an object, as OpenAI demands; `draco_ray.judging.parsing` reads the
array in it like a bare one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.phases.base import Phase

log = logging.getLogger(__name__)

ENTRIES = "entries"
"""The one field of the root: the array that the prompt asks for."""

_REFUSALS = {400, 422, 501}
_NOT_THE_SCHEMAS_FAULT = ("ContextWindowExceededError", "ContentPolicyViolationError")


def reply_schema(phase: Phase, template: str) -> dict[str, object]:
    """The JSON schema of a reply to ``template``, strict in OpenAI's sense: every field required, none besides."""
    known = {**phase.reply_fields, **phase.optional_reply_fields}
    place = {name: match.start() for name in known if (match := re.search(rf'"{name}"\s*:', template))}
    fields = {name: kind for name, kind in known.items() if name in place or name in phase.reply_fields}
    ordered = sorted(fields, key=lambda name: place.get(name, len(template)))
    entry = {
        "type": "object",
        "properties": {name: fields[name] for name in ordered},
        "required": ordered,
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {ENTRIES: {"type": "array", "items": entry}},
        "required": [ENTRIES],
        "additionalProperties": False,
    }


class StructuredOutput:
    """Sends requests with a schema for as long as the endpoint takes it.

    It is tried where LiteLLM's table says that the model supports it, and at endpoints of one's own, of which the table
    knows nothing. An endpoint that refuses it and answers without it is not asked for it again.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._wanted: bool | None = None if config.structured_output else False

    async def complete(self, litellm: Any, schema: Mapping[str, object] | None, **arguments: Any) -> Any:
        """``litellm.acompletion``, held to ``schema`` where that is possible.

        Raises:
            OpenAIError: whatever the request without a schema raises.
        """
        if schema is None or not self._wants(litellm):
            return await litellm.acompletion(**arguments)
        form = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": schema}}
        try:
            return await litellm.acompletion(**arguments, response_format=form)
        except Exception as error:
            if getattr(error, "status_code", None) not in _REFUSALS or type(error).__name__ in _NOT_THE_SCHEMAS_FAULT:
                raise
            reason = " ".join(str(error).split())[:200]
        response = await litellm.acompletion(**arguments)
        if self._wanted:
            log.info("%s takes no JSON schema, replies are asked for without: %s", self._config.model, reason)
        self._wanted = False
        return response

    def _wants(self, litellm: Any) -> bool:
        if self._wanted is None:
            own = self._config.local.enabled or self._config.api_base is not None
            self._wanted = own or bool(litellm.supports_response_schema(model=self._config.model))
        return self._wanted

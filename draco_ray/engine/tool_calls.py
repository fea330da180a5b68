"""Reads the calls of tools off a turn, with vLLM's parsers: as many forms as there are families of models."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draco_ray.engine.chat import ChatTokens
from draco_ray.errors import ConfigError

_FORMS = {
    "<tool_call><function=NAME>": "qwen3_xml",
    '<tool_call>{"name":"NAME"': "hermes",
    "<tool_call>NAME<arg_key>": "glm47",
    # vLLM's own for Mistral reads the list of earlier models only with Mistral's tokenizer.
    '[TOOL_CALLS][{"name":"NAME"': "xlam",
    "[TOOL_CALLS]NAME": "mistral",
    "<|tool_call>call:NAME": "gemma4",
    '<|python_tag|>{"name":"NAME"': "llama3_json",
    '{"name":"NAME"': "llama3_json",
    '{"type":"function","name":"NAME"': "llama3_json",
    "[NAME(": "pythonic",
}
"""How a template writes a call, blanks left out -> vLLM's parser for it."""
_CHOICES = ("anyOf", "oneOf", "allOf")
_SAYS_TYPE = {"type", "enum", "properties", "items", *_CHOICES}
_DEEPEST = 2
"""References one within the other that are followed: a schema may refer to itself."""
_OPENING = re.compile(r"<[^>\s]+>|\[[A-Z_]+\]|\S+?(?=NAME)|\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the policy asks for it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a turn asks for; at least one call, or the reason why there is none that could be made."""

    text: str
    """The part of the turn in which the calls stand, as sampled."""
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    """What is wrong with it, told to the policy; nothing is called then."""


class ToolCallReader:
    """Finds the calls in turns of one model."""

    def __init__(self, chat: ChatTokens, parser: str | None) -> None:
        """Choose a parser.

        Args:
            chat: the model's chat template, studied.
            parser: ``agent.tool_parser``; None: by the form in which the template writes calls.

        Raises: ConfigError where the template has no tools, there is no parser for its form, or none of that name.
        """
        written = chat.written_call()
        self._tokenizer = chat.tokenizer
        self._name = parser or _parser_for(written)
        from vllm.tool_parsers import ToolParserManager

        # A call that cannot be read is the policy's mistake, of which it is told.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
        try:
            self._parser = ToolParserManager.get_tool_parser(self._name)
        except KeyError:
            raise ConfigError(
                f"agent.tool_parser={self._name!r}: unknown; vLLM has {', '.join(ToolParserManager.list_registered())}"
            ) from None
        self._opening = _opening(written)
        self.opens_thinking = chat.opens_thinking
        """Whether the chat template leaves a turn inside a ``<think>`` to begin with."""
        self.read("-", "[]", thinking=False)

    def read(self, text: str, tools: str, *, thinking: bool) -> ToolUse | None:
        """What a turn that its policy has ended asks for; None where it calls nothing.

        Args:
            text: the turn as sampled.
            tools: a JSON array of function schemas; some forms leave the types of arguments to it.
            thinking: whether the turn begins inside a ``<think>`` that the chat template opened.

        Raises: ConfigError where the parser does not work with this tokenizer.
        """
        said = after_reasoning(text, thinking=thinking)
        found = self._extract(said, [_in_place(tool) for tool in json.loads(tools)])
        opening = self._opening.search(said)
        if not found and opening is None:
            return None
        # Some parsers take a call without its opening.
        asked = said[opening.start() if opening else 0 :].strip()
        if not found:
            return ToolUse(text=asked, problem=f"the call cannot be read (as {self._name} writes calls)")
        calls = []
        for name, arguments in found:
            try:
                given = json.loads(arguments or "{}")
                # Arguments that were spelled as a text of their own.
                given = json.loads(given) if isinstance(given, str) else given
                json.dumps(given)
            except (ValueError, RecursionError):
                given = None
            if not isinstance(given, dict):
                return ToolUse(text=asked, problem=f"the arguments of {name} are no JSON object")
            calls.append(ToolCall(name=name, arguments=given))
        return ToolUse(text=asked, calls=tuple(calls))

    def _extract(self, said: str, tools: list[dict[str, Any]]) -> list[tuple[str, str]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        request = ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], model="-", tools=tools or None)
        try:
            # One for each turn: they keep what they have seen.
            parser = self._parser(self._tokenizer, [ChatCompletionToolsParam.model_validate(tool) for tool in tools])
        except Exception as error:
            raise ConfigError(
                f"agent.tool_parser={self._name!r} does not work with this tokenizer: {' '.join(str(error).split())}"
            ) from error
        try:
            read = parser.extract_tool_calls(said, request)
        except Exception:
            return []
        return [(call.function.name, call.function.arguments) for call in read.tool_calls] if read.tools_called else []


def check_calls(chat: ChatTokens, parser: str | None) -> None:
    """See whether a model's calls can be read at all, without loading a parser.

    Raises: ConfigError where its template has no tools, or writes calls in a form without a known parser.
    """
    written = chat.written_call()
    if parser is None:
        _parser_for(written)


def after_reasoning(text: str, *, thinking: bool) -> str:
    """What of a turn is said behind its reasoning; nothing where that is never closed.

    >>> after_reasoning("<think>a</think> b", thinking=False)
    ' b'
    """
    if not thinking and not text.lstrip().startswith("<think>"):
        return text
    return text.partition("</think>")[2]


def _in_place(tool: dict[str, Any]) -> dict[str, Any]:
    """A function's schema with what it refers to where it refers to it, and without what says nothing of its type.

    Parsers of forms without types take those from the schema. They follow no reference, and take for a text what says
    nothing: an argument that is an object of a named kind would be one, and a number that may be anything.
    """
    parameters = tool["function"].get("parameters")
    if not isinstance(parameters, dict):
        return tool
    properties = (_typed(parameters, parameters, 0) or {}).get("properties", {})
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "properties": properties}}}


def _typed(schema: Any, whole: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """See `_in_place`; ``depth`` references have been followed to get here. None: it may be anything.

    >>> whole = {"$defs": {"Kind": {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}}}}
    >>> _typed({"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}]}, whole, 0)
    {'anyOf': [{'type': 'object', 'properties': {'b': {'type': 'integer'}}}, {'type': 'null'}]}
    """
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        target = _target(schema["$ref"], whole) if depth < _DEEPEST else None
        beside = {name: each for name, each in schema.items() if name != "$ref"}
        return None if target is None else _typed({**target, **beside}, whole, depth + 1)
    if not _SAYS_TYPE & schema.keys():
        return None
    told = dict(schema)
    if "properties" in told:
        listed = told["properties"] if isinstance(told["properties"], dict) else {}
        read = {name: _typed(each, whole, depth) for name, each in listed.items()}
        told["properties"] = {name: each for name, each in read.items() if each is not None}
    if "items" in told and (items := _typed(told.pop("items"), whole, depth)) is not None:
        told["items"] = items
    for name in _CHOICES:
        if isinstance(told.get(name), list):
            told[name] = [_typed(each, whole, depth) or {} for each in told[name]]
    return told


def _target(reference: Any, whole: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``#/$defs/NAME`` and its like stands for in a schema; None where that is not in it."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = whole
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _parser_for(written: str) -> str:
    form = "".join(written.split())
    for beginning, parser in _FORMS.items():
        if form.startswith(beginning):
            return parser
    raise ConfigError(
        f"agent.tool_parser: the chat template writes calls as {written[:60]!r}; name vLLM's parser for it"
    )


def _opening(written: str) -> re.Pattern[str]:
    """What begins a call, by which one that cannot be read is told from a turn without any."""
    first = _OPENING.match(written.lstrip())
    mark = first[0] if first else written
    if mark.startswith("{"):
        # Without a mark of its own: an object with a name at the beginning of a line.
        return re.compile(r'^\s*(?:<\|python_tag\|>|\{\s*"(?:name|type)")', re.MULTILINE)
    return re.compile(re.escape(mark))

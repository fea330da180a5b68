"""Parses the tool calls of a turn with vLLM's parsers, one for each model family's format."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draco_ray.engine.chat import ChatTokenizer
from draco_ray.errors import ConfigError

_FORMS = {
    "<tool_call><function=NAME>": "qwen3_xml",
    '<tool_call>{"name":"NAME"': "hermes",
    "<tool_call>NAME<arg_key>": "glm47",
    # vLLM's parser `mistral` reads this older list format only with Mistral's own tokenizer.
    '[TOOL_CALLS][{"name":"NAME"': "xlam",
    "[TOOL_CALLS]NAME": "mistral",
    "<|tool_call>call:NAME": "gemma4",
    '<|python_tag|>{"name":"NAME"': "llama3_json",
    '{"name":"NAME"': "llama3_json",
    '{"type":"function","name":"NAME"': "llama3_json",
    "[NAME(": "pythonic",
}
"""Beginning of a call in a template, without blanks -> vLLM's parser."""
_CHOICES = ("anyOf", "oneOf", "allOf")
_SAYS_TYPE = {"type", "enum", "properties", "items", *_CHOICES}
_DEEPEST = 2
"""Maximum depth of references that are followed, since schemas may be recursive."""
_OPENING = re.compile(r"<[^>\s]+>|\[[A-Z_]+\]|\S+?(?=NAME)|\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call made by the policy."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToolCalls:
    """The tool use of a turn: at least one call, or why it cannot be parsed."""

    text: str
    """The part of the turn with the calls, as sampled."""
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    """An error message for the policy; if it is set, no tool is called."""


class ToolCallReader:
    """Parses the calls in turns of a model."""

    def __init__(self, chat: ChatTokenizer, parser: str | None) -> None:
        """Choose a parser.

        Args:
            chat: the model's chat template.
            parser: ``agent.tool_parser``; None: derived from how the template writes calls.

        Raises: ConfigError: the template has no tools, its format has no known parser, or vLLM has no such parser.
        """
        written = chat.written_call()
        self._tokenizer = chat.tokenizer
        self._name = parser or _parser_for(written)
        from vllm.tool_parsers import ToolParserManager

        # Calls that cannot be parsed are reported to the policy and not logged.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
        try:
            self._parser = ToolParserManager.get_tool_parser(self._name)
        except KeyError:
            raise ConfigError(
                f"agent.tool_parser={self._name!r}: unknown; expected one of "
                f"{', '.join(ToolParserManager.list_registered())}"
            ) from None
        self._opening = _opening(written)
        self.opens_thinking = chat.opens_thinking
        """Whether turns begin inside a ``<think>`` opened by the chat template."""
        self.read("-", "[]", thinking=False)

    def read(self, text: str, tools: str, *, thinking: bool) -> ParsedToolCalls | None:
        """The tool use of a complete turn; None if it has no calls.

        Args:
            text: the turn as sampled.
            tools: a JSON array of function schemas; some formats take the types of arguments from it.
            thinking: whether the turn begins inside a ``<think>`` that the chat template opened.

        Raises: ConfigError: the parser does not work with this tokenizer.
        """
        said = after_reasoning(text, thinking=thinking)
        found = self._extract(said, [_in_place(tool) for tool in json.loads(tools)])
        opening = self._opening.search(said)
        if not found and opening is None:
            return None
        # Some parsers accept a call without its opening mark.
        asked = said[opening.start() if opening else 0 :].strip()
        if not found:
            return ParsedToolCalls(text=asked, problem=f"the call cannot be read in the format of {self._name}")
        calls = []
        for name, arguments in found:
            try:
                given = json.loads(arguments or "{}")
                # The arguments are JSON within a JSON string.
                given = json.loads(given) if isinstance(given, str) else given
                json.dumps(given)
            except (ValueError, RecursionError):
                given = None
            if not isinstance(given, dict):
                return ParsedToolCalls(text=asked, problem=f"the arguments of {name} are not a JSON object")
            calls.append(ToolCall(name=name, arguments=given))
        return ParsedToolCalls(text=asked, calls=tuple(calls))

    def _extract(self, said: str, tools: list[dict[str, Any]]) -> list[tuple[str, str]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        request = ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], model="-", tools=tools or None)
        try:
            # Make a new parser for each turn, because parsers have state.
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


def check_tool_calls_parsable(chat: ChatTokenizer, parser: str | None) -> None:
    """Check that a model's calls can be parsed, without loading a parser.

    Raises: ConfigError: the chat template has no tools, or writes calls in an unknown format.
    """
    written = chat.written_call()
    if parser is None:
        _parser_for(written)


def after_reasoning(text: str, *, thinking: bool) -> str:
    """The part of a turn after its reasoning; empty if the reasoning is never closed.

    >>> after_reasoning("<think>a</think> b", thinking=False)
    ' b'
    """
    if not thinking and not text.lstrip().startswith("<think>"):
        return text
    return text.partition("</think>")[2]


def _in_place(tool: dict[str, Any]) -> dict[str, Any]:
    """A function's schema with references resolved and untyped parts removed.

    If a format does not show the types of arguments, vLLM's parser takes them from the schema. It does not follow
    references and treats untyped values as text, so an argument that is defined by a reference or has no type would
    become text.
    """
    parameters = tool["function"].get("parameters")
    if not isinstance(parameters, dict):
        return tool
    properties = (_typed(parameters, parameters, 0) or {}).get("properties", {})
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "properties": properties}}}


def _typed(schema: Any, whole: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """``schema`` with references resolved and untyped parts removed; None if it states no type.

    Args:
        whole: the schema that contains the targets of references.
        depth: number of references that led to ``schema``.

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
    """The part of a schema that ``#/$defs/NAME`` or the like refers to; None if it is missing."""
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
        f"agent.tool_parser: the chat template writes calls as {written[:60]!r}; set agent.tool_parser to vLLM's "
        "parser for this format"
    )


def _opening(written: str) -> re.Pattern[str]:
    """The opening mark of a call, to distinguish malformed calls from turns without calls."""
    first = _OPENING.match(written.lstrip())
    mark = first[0] if first else written
    if mark.startswith("{"):
        # The format has no mark: a call is a JSON object with a name at the beginning of a line.
        return re.compile(r'^\s*(?:<\|python_tag\|>|\{\s*"(?:name|type)")', re.MULTILINE)
    return re.compile(re.escape(mark))

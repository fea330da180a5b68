"""Parts of a message's content: text, reasoning, calls, results and media, in the forms of all providers.

=================  =====================================================================================================
OpenAI             ``text``, ``input_text``, ``output_text``, ``refusal``, ``image_url``, ``input_audio``, ``file``
Anthropic          ``text``, ``thinking``, ``tool_use``, ``tool_result``, ``server_tool_use``, ``search_result``, ...
Bedrock Converse   ``{"text"}``, ``{"toolUse"}``, ``{"toolResult"}``, ``{"reasoningContent"}``, ``{"image"}``
Gemini             ``{"text"}``, ``{"functionCall"}``, ``{"functionResponse"}``, ``{"executableCode"}``, snake case too
OpenAI Responses   items: ``reasoning``, ``function_call``, ``function_call_output``, ``web_search_call``, ...
Vercel AI SDK      ``tool-call``, ``tool-result``, ``tool-NAME``, ``dynamic-tool``, ``tool-invocation``, ``step-start``
Pydantic AI        ``tool-call``, ``tool-return``, ``retry-prompt`` as ``part_kind``
OpenTelemetry      ``tool_call``, ``tool_call_response``, ``blob``, ``uri``, ...
=================  =====================================================================================================

Media are described (``[image: image/png, 12 kB]``); a part of an unknown kind is shown as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draco_ray.traces.entry import (
    BadTrace,
    Entry,
    ToolCall,
    compact_json,
    decode_if_json,
    decoded_size,
    first_of,
    json_type_name,
    object_of,
    strip_base64,
    text_of,
    truncated_json,
    wrap_thinking,
)
from draco_ray.traces.model import escape_surrogates

HIDDEN = "<think>[thinking that the provider does not show]</think>"
MARKERS = ("step-start", "step-finish", "finish-step", "snapshot", "ghost_snapshot", "cachePoint")
"""Types of parts and items without content."""
CALL_SUFFIXES = ("tool_use", "tool_call", "tool-call", "function_call", "toolUse", "functionCall")
RESULT_SUFFIXES = (
    *("tool_result", "tool_call_response", "tool-result", "tool-error", "tool_call_result", "toolResult"),
    *("functionResponse", "function_response", "tool-return", "retry-prompt", "_call_output"),
    *("functionResult", "function_result"),
)
"""`CALL_SUFFIXES` and `RESULT_SUFFIXES`: suffixes by which the type of a message part is that of a call or a result."""
CALL_IDS = ("toolUseId", "tool_call_id", "toolCallId", "call_id", "callId", "id")
OUTCOMES = ("result", "results", "outputs", "output", "error", "errorText")
"""Fields of a call that may contain its result."""
OUTPUT_TYPES = ("text", "json", "content", "error-text", "error-json")
"""Values of ``type`` in the objects that the AI SDK puts around a tool's output. An object with another ``type`` is the
output itself."""
MEDIA = ("image", "audio", "video", "document", "file", "blob", "uri", "screenshot")
TYPE_KEYS = (
    *(*CALL_SUFFIXES, *RESULT_SUFFIXES),
    *("executableCode", "executable_code", "codeExecutionResult", "code_execution_result"),
    *("reasoningContent", "reasoning_content", "cachePoint"),
)
"""Keys of a part without ``type`` that stand for its type."""
UNTYPED = ({"call_id", "content"}, {"toolCallId", "result"}, {"toolCallId", "output"})
"""Sets of fields that identify a result without a type."""
FILE_KEYS = ("inlineData", "inline_data", "fileData", "file_data", *MEDIA)
"""Keys of a file's part that stand for its type, if it has neither ``type`` nor ``text``."""


def parts(content: object) -> Iterator[Entry]:
    """The parts of a content as entries, in order; their role is ``tool`` for results and empty otherwise.

    Raises:
        BadTrace: the content is neither text nor a list of parts.
    """
    if content is None:
        return
    if isinstance(content, bytes) or not isinstance(content, Mapping | Sequence):
        raise BadTrace(f"expected the message's content as text or a list of parts, found {json_type_name(content)}")
    for each in [content] if isinstance(content, str | Mapping) else content:
        if isinstance(each, str):
            yield Entry(role="", text=result_text(each))
        elif isinstance(each, Mapping):
            yield from part(each)
        else:
            raise BadTrace(f"expected text or an object as a part of the content, found {json_type_name(each)}")


def part(each: Mapping[str, Any]) -> list[Entry]:
    """The entries of one part: one, or two if the part holds a call and its result; none for a marker."""
    found = _known(each)
    if found is not None:
        return found
    return [Entry(role="", text=f"[{_typed(each)[0] or 'part'}: {truncated_json(each)}]")]


def _typed(each: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A part's type, empty if it has none, and its fields. Bedrock and Gemini write ``{TYPE: FIELDS}``; AutoGen and the
    first AI SDK write calls and results without a type."""
    each = object_of(each, "message_content") or each
    type_ = str(first_of(each, "type", "block_type", "part_kind", "$type") or "")
    if type_ in ("toolRequest", "toolResponse"):
        # Goose wraps the call or its result in a serialized Rust ``Result``.
        held = object_of(each, "toolCall" if type_ == "toolRequest" else "toolResult")
        inner = held.get("value", held.get("error"))
        given = inner if isinstance(inner, Mapping) else {"content": inner}
        type_ = "tool_call" if type_ == "toolRequest" else "tool_result"
        return type_, {"id": each.get("id"), **given, "status": held.get("status")}
    if type_ == "tool-invocation":
        return "dynamic-tool", object_of(each, "toolInvocation")
    if type_ == "tool" and isinstance(each.get("state"), Mapping):
        # OpenCode
        return "dynamic-tool", {**each["state"], "id": each.get("callID"), "name": each.get("tool")}
    if type_:
        return type_, each
    if (key := next((name for name in TYPE_KEYS if isinstance(each.get(name), Mapping)), None)) is not None:
        return key, each[key]
    if thought := text_of(each, "reasoningContent", "reasoning_content"):
        return "thinking", {"text": thought}
    if isinstance(each.get("text"), str):
        return ("thinking" if each.get("thought") is True else "text"), each
    if isinstance(each.get("json"), Mapping | list):
        return "json", each
    if (key := next((name for name in FILE_KEYS if isinstance(each.get(name), Mapping)), None)) is not None:
        return ("file" if key.startswith("inline") else key), each[key]
    if any(names <= each.keys() for names in UNTYPED):
        return "tool_result", each
    called = {"name", "arguments"} <= each.keys() or {"toolCallId", "toolName"} <= each.keys()
    return ("tool_call" if called else ""), each


def _known(each: Mapping[str, Any]) -> list[Entry] | None:
    """The entries of a part; None if its kind is unknown."""
    type_, fields = _typed(each)
    if type_ in MARKERS or not each:
        return []
    if found := _tool(type_, fields):
        return found
    text = _text(type_, fields)
    return None if text is None else [Entry(role="", text=text)]


def is_call(each: Mapping[str, Any]) -> bool:
    """Whether a part is a call."""
    return any(entry.calls for entry in _tool(*_typed(each)))


def _tool(type_: str, fields: Mapping[str, Any]) -> list[Entry]:
    """The call of a tool, its result, or both; empty if the part is neither."""
    if type_ in ("executableCode", "executable_code"):
        return [Entry(role="", calls=(ToolCall(name="code", arguments={"code": fields.get("code", fields)}),))]
    if type_ in ("codeExecutionResult", "code_execution_result"):
        return [Entry(role="tool", text=result_text(fields.get("output", fields)))]
    if type_.endswith(RESULT_SUFFIXES):
        return [result_of(fields, type_)]
    if type_.endswith(CALL_SUFFIXES):
        return [Entry(role="", calls=(call_of(fields, type_ if "type" in fields else "tool"),))]
    if type_ in ("dynamic-tool", "mcp_call") or (type_.startswith("tool-") and "toolCallId" in fields):
        if fields.get("state") == "output-denied":
            reason = text_of(object_of(fields, "approval"), "reason") or "Tool execution denied."
            fields = {**fields, "error": reason}
        called = Entry(role="", calls=(call_of(fields, type_.removeprefix("tool-")),))
        # An empty result counts as a result, too.
        ended = any(fields.get(name) is not None for name in OUTCOMES)
        return [called, result_of(fields)] if ended else [called]
    return provider_tool_entries(type_.removesuffix("_call"), fields) if _is_own_tool(type_) else []


def _is_own_tool(type_: str) -> bool:
    return type_.endswith("_call") and not type_.endswith(CALL_SUFFIXES)


def provider_tool_entries(name: str, item: Mapping[str, Any], outcomes: Sequence[str] = OUTCOMES) -> list[Entry]:
    """The call of a tool that the provider itself runs (web search, ...), and its results if the item has some."""
    call_id = text_of(item, "call_id", "id")
    about = {key: item[key] for key in item if key not in ("id", "type", "status", "call_id", *outcomes)}
    found = [Entry(role="", calls=(ToolCall(name=name, arguments=about, call_id=call_id),))]
    results = {key: item[key] for key in outcomes if item.get(key) not in (None, "", [])}
    return [*found, Entry(role="tool", text=result_text(results), call_id=call_id)] if results else found


def call_of(fields: Mapping[str, Any], name: str = "") -> ToolCall:
    """The call of a tool in any form; ``name`` is used if the call has none."""
    return ToolCall(
        name=text_of(fields, "name", "toolName", "tool_name", "function_name") or name,
        arguments=first_of(
            fields, "input", "arguments", "args", "tool_kwargs", "server_tool_call", "parameters", "params_as_json"
        ),
        call_id=text_of(fields, *CALL_IDS),
    )


def result_of(fields: Mapping[str, Any], type_: str = "", content: object = None) -> Entry:
    """The result of a tool in any form, marked if the tool failed; ``content``, if given, replaces the fields' own."""
    names = ("content", "response", "result", "output", "tool_return", "result_value", type_)
    said = first_of(fields, *names) if content is None else content
    if isinstance(said, Mapping) and "value" in said and said.get("type") in OUTPUT_TYPES:
        type_, said = f"{type_} {said['type']}", said["value"]
    error = fields.get("errorText") or fields.get("error")
    if isinstance(error, Mapping):
        error = error.get("message") or truncated_json(error)
    failed = fields.get("is_error") or fields.get("isError") or fields.get("status") == "error"
    marked = "[error] " if error or failed or "error" in type_ or type_ == "retry-prompt" else ""
    # Gemini stores a result's media in a field beside the result.
    media = parts(fields.get("parts")) if content is None else ()
    texts = [result_text(said), *(medium.text for medium in media)]
    return Entry(
        role="tool",
        text=marked
        + "\n".join([*([escape_surrogates(str(error))] if error and error is not True else []), *filter(None, texts)]),
        call_id=text_of(
            {**object_of(fields, "origin"), **fields},
            *("tool_use_id", *CALL_IDS),
        ),
        name=text_of(fields, "name", "toolName", "tool_name"),
    )


def _text(type_: str, fields: Any) -> str | None:
    """The text of a part that is no call or result; None if its kind is unknown."""
    if type_ in ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"):
        said = first_of(fields, "text", "content", "refusal")
        said = said.get("value", said) if isinstance(said, Mapping) else said
        return ("[refusal] " if type_ == "refusal" else "") + result_text(said)
    if type_ in ("thinking", "reasoning", "reasoning.text", "reasoning.summary"):
        names = ("summary",) if fields.get("redacted") else ("thinking", "reasoning", "text", "content", "summary")
        return wrap_thinking(result_text(next((fields[name] for name in names if fields.get(name)), None))) or HIDDEN
    if type_ in ("redacted_thinking", "reasoning.encrypted"):
        return HIDDEN
    if type_ in ("reasoningContent", "reasoning_content"):
        return wrap_thinking(text_of(object_of(fields, "reasoningText") or fields, "text")) or HIDDEN
    if type_ == "search_result":
        head = ", ".join(filter(None, [text_of(fields, "title"), text_of(fields, "source", "url")]))
        return f"[search result: {head}]\n{result_text(fields.get('content'))}".rstrip()
    if type_ == "json" and "json" in fields:
        return compact_json(fields["json"])
    return _medium(type_, fields)


def _medium(type_: str, each: Mapping[str, Any]) -> str | None:
    """A description of a non-text part: kind, format, and size or address; None if it is no medium."""
    name = next((medium for medium in MEDIA if medium in type_), None)
    if name is None:
        return None
    modality = each.get("modality")
    label = str(modality) if isinstance(modality, str) and modality else name
    if name == "audio" and (said := text_of(each, "transcript")):
        return said
    holder = first_of(each, type_, "source", name, "image_url", "input_audio", "file")
    holder = object_of(holder, name) or holder if isinstance(holder, Mapping) else holder
    holder = {"url": holder} if isinstance(holder, str) else holder if isinstance(holder, Mapping) else each
    format_ = text_of(holder, "media_type", "mime_type", "mimeType", "mediaType", "format") or text_of(
        each, "mime_type", "media_type", "mediaType", "format"
    )
    names = ("data", "bytes", "file_data", "content", "url", "uri", "fileUri", "file_uri", "file_id", "id", "filename")
    data = text_of(holder, *names)
    if data.startswith("data:"):
        head, _, data = data[5:].partition(",")
        return f"[{label}: {head.partition(';')[0] or 'unknown format'}, {decoded_size(data)}]"
    if len(data) < 120 or "://" in data[:20] or data.startswith("attachment:"):
        return f"[{label}: {', '.join(filter(None, [format_, escape_surrogates(data[:300])])) or 'not in the trace'}]"
    return f"[{label}: {format_ or 'unknown format'}, {decoded_size(data)}]"


def result_text(value: object) -> str:
    """The complete text of a tool's result, with a short description in place of encoded data such as images."""
    if value is None:
        return ""
    if isinstance(value, str):
        return escape_surrogates(str(strip_base64(value)))
    each = [value] if isinstance(value, Mapping) else value
    if isinstance(each, list) and each and all(isinstance(p, Mapping) and _is_part(p) for p in each):
        return "\n".join(_shown_part(p) for p in each)
    return compact_json(value)


def _is_part(each: Mapping[str, Any]) -> bool:
    named = isinstance(first_of(each, "type", "block_type"), str)
    return named or each.keys() <= {"text", "json", "image", "document", "video", "functionResponse", "inlineData"}


def _shown_part(each: Mapping[str, Any]) -> str:
    """A part of a result: text and media as in `part`, other kinds as complete JSON."""
    found = _known(each)
    if not found or any(entry.calls for entry in found):
        return compact_json(each)
    return "\n".join(entry.text for entry in found)


def decode_stored_parts(content: object) -> object:
    """Decode parts that a database keeps as JSON text; other text may be a model's answer and is returned unchanged."""
    value = decode_if_json(content, "[")
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        return content
    known = [_known(each) if "type" in each or len(each) == 1 else None for each in value]
    if any(_is_own_tool(str(each.get("type"))) for each in value):
        # A type such as phone_call may be part of JSON that the model wrote.
        return content
    said = [entry for each in known for entry in each or ()]
    telling = any("text" in each for each in value) or any(entry.calls or entry.role for entry in said)
    return value if telling and None not in known else content

"""A message of whatever dialect as entries: who said what, called which tools, and what came back.

The dialects do not contradict each other, so one reader takes them all:

=================  =====================================================================================================
OpenAI chat        ``role``, ``content`` (text or parts), ``tool_calls``, ``role: tool`` with ``tool_call_id``
OpenAI Responses   items: ``message``, ``reasoning``, ``function_call``, ``function_call_output``, ...
Anthropic          blocks: ``text``, ``thinking``, ``tool_use``, ``tool_result``, ``image``, ...
Inspect            OpenAI's form with ``function`` and ``arguments`` flat in a tool call, ``reasoning`` parts, ``error``
OpenTelemetry      ``parts``: ``text``, ``reasoning``, ``tool_call``, ``tool_call_response``, ``blob``, ``uri``, ...
=================  =====================================================================================================

Nothing is dropped: what is no text is described (``[image: image/png, 12 kB]``), a part of an unknown kind is shown as
the JSON it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draco_ray.traces.model import clean

AGENT = "assistant"
AGENT_ROLES = ("assistant", "model", "ai", "agent")
RESULT_ROLES = ("tool", "function", "environment", "ipython")
MAX_SHOWN = 2_000
"""Characters of a part of an unknown kind."""


class BadTrace(ValueError):
    """A record that is not what its format says; the message tells what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: Any = None
    call_id: str = ""

    def __str__(self) -> str:
        """The call as the judge sees it: ``search({"from": "JFK"})``; text of several lines stays as it is."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                return f"{self.name}({clean(arguments)})"
        if isinstance(arguments, Mapping) and any(isinstance(v, str) and "\n" in v for v in arguments.values()):
            return "\n".join([f"{self.name}(", *(_argument(*item) for item in arguments.items()), ")"])
        return f"{self.name}({compact({} if arguments is None else arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that happened."""

    role: str
    """``assistant`` is the agent; ``tool`` a result; anything else somebody who spoke."""
    text: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    """Of the call that this result answers; empty: the earliest that is open."""
    tokens: int | None = None
    item: bool = False
    """Whether it is an item of the Responses API, several of which make a turn."""


def entries(messages: object, where: str = "message") -> list[Entry]:
    """Entries of a list of messages or items, in order.

    Raises:
        BadTrace: it is no list, or one of them is no message.
    """
    if isinstance(messages, str):
        return [Entry(role="user", text=clean(messages))]
    if not isinstance(messages, Sequence):
        raise BadTrace(f"expected a list of {where}s, found {kind(messages)}")
    found: list[Entry] = []
    for number, message in enumerate(messages, 1):
        try:
            of_message = _entries(message)
            item = isinstance(message, Mapping) and (message.get("type") == "message" or "role" not in message)
            found += (replace(entry, item=True) for entry in of_message) if item else of_message
        except BadTrace as problem:
            raise BadTrace(f"{where} {number}: {problem}") from None
    return found


def _entries(message: object) -> Iterator[Entry]:
    if not isinstance(message, Mapping):
        raise BadTrace(f"expected an object with a role, found {kind(message)}")
    role = message.get("role")
    if role is None and isinstance(message.get("type"), str):
        yield from _item(message)
        return
    if not isinstance(role, str) or not role.strip():
        raise BadTrace(f'expected "role" as text, found {kind(role)}')
    role = _role(role, message)
    parts = [*_parts(message.get("parts" if "parts" in message else "content"))]
    results = [part for part in parts if part.role == "tool"]
    own = [part for part in parts if part.role != "tool"]
    text = "\n".join(part.text for part in own if part.text)
    calls = tuple(call for part in own for call in part.calls) + tuple(_calls(message))
    if role == "tool" and not results:
        yield Entry(
            role="tool", text=_result(text, message), call_id=_text_of(message, "tool_call_id", "call_id", "id")
        )
        return
    if role != AGENT:
        yield from results
    else:
        thought = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
        if isinstance(thought, str) and thought.strip():
            text = f"{thinking(thought)}\n{text}".rstrip()
        refusal = message.get("refusal")
        if isinstance(refusal, str) and refusal:
            text = f"{text}\n[refusal] {clean(refusal)}".strip()
    if text or calls or not results:
        yield Entry(role=role, text=text, calls=calls, tokens=_tokens(message))
    if role == AGENT:
        # Of the provider's own tools, whose calls are in the same message.
        yield from results


def _role(role: str, message: Mapping[str, Any]) -> str:
    role = role.strip().casefold()
    if role in AGENT_ROLES:
        return AGENT
    if role in RESULT_ROLES:
        return "tool"
    if role in ("developer", "system"):
        return "system"
    name = message.get("name")
    return (
        "user" if role == "human" else f"{role} {name}" if isinstance(name, str) and name and role != "user" else role
    )


def _item(item: Mapping[str, Any]) -> Iterator[Entry]:
    """One item of the Responses API that has no role."""
    name, type_ = _text_of(item, "name"), str(item["type"])
    call_id = _text_of(item, "call_id", "id")
    if type_ in ("function_call", "custom_tool_call", "mcp_call"):
        arguments = item.get("arguments", item.get("input"))
        yield Entry(role=AGENT, calls=(Call(name=name or type_, arguments=arguments, call_id=call_id),))
        if type_ == "mcp_call" and (item.get("output") is not None or item.get("error")):
            yield Entry(role="tool", text=_result(_plain(item.get("output")), item), call_id=call_id)
    elif type_.endswith("_output"):
        yield Entry(role="tool", text=_plain(item.get("output")), call_id=call_id)
    elif type_.endswith("_call"):
        # The provider's own tools (web search, code interpreter, ...), whose results are in the item.
        about = {key: value for key, value in item.items() if key not in ("id", "type", "status", "call_id", *_RESULTS)}
        call = Call(name=type_.removesuffix("_call"), arguments=about, call_id=call_id)
        yield Entry(role=AGENT, calls=(call,))
        if results := {key: item[key] for key in _RESULTS if item.get(key)}:
            yield Entry(role="tool", text=_plain(results), call_id=call_id)
    else:
        for part in _part(item):
            yield replace(part, role=AGENT if part.role == "" else part.role)


_RESULTS = ("result", "results", "outputs", "output")


def _parts(content: object) -> Iterator[Entry]:
    """Parts of a message's content; their role is empty but for results of tools."""
    if content is None:
        return
    if isinstance(content, str):
        yield Entry(role="", text=clean(content))
    elif isinstance(content, Mapping):
        yield from _part(content)
    elif isinstance(content, Sequence):
        for part in content:
            if isinstance(part, str):
                yield Entry(role="", text=clean(part))
            elif isinstance(part, Mapping):
                yield from _part(part)
            else:
                raise BadTrace(f"expected text or an object as a part of its content, found {kind(part)}")
    else:
        raise BadTrace(f"expected its content as text or a list of parts, found {kind(content)}")


def _part(part: Mapping[str, Any]) -> Iterator[Entry]:
    type_ = str(part.get("type", "text" if "text" in part else ""))
    if type_ in ("text", "input_text", "output_text", "refusal", "summary_text"):
        said = part.get("text", part.get("content", part.get("refusal")))
        yield Entry(role="", text=("[refusal] " if type_ == "refusal" else "") + _plain(said))
    elif type_ in ("thinking", "reasoning"):
        said = part.get("thinking") or part.get("reasoning") or part.get("content") or part.get("summary")
        hidden = part.get("redacted") or not said
        yield Entry(role="", text="[thinking that the provider does not show]" if hidden else thinking(_plain(said)))
    elif type_ == "redacted_thinking":
        yield Entry(role="", text="[thinking that the provider does not show]")
    elif type_ in ("tool_use", "server_tool_use", "mcp_tool_use", "tool_call", "server_tool_call"):
        arguments = part.get("input", part.get("arguments", part.get("server_tool_call")))
        call = Call(name=_text_of(part, "name") or type_, arguments=arguments, call_id=_text_of(part, "id"))
        yield Entry(role="", calls=(call,))
    elif type_.endswith(("tool_result", "tool_call_response")):
        said = next((part[key] for key in ("content", "response", "result", type_) if part.get(key) is not None), None)
        text = _plain(said)
        failed = "[error] " if part.get("is_error") else ""
        yield Entry(role="tool", text=failed + text, call_id=_text_of(part, "tool_use_id", "id", "tool_call_id"))
    elif medium := _medium(type_, part):
        yield Entry(role="", text=medium)
    else:
        yield Entry(role="", text=f"[{type_ or 'part'}: {shown(part)}]")


def _medium(type_: str, part: Mapping[str, Any]) -> str | None:
    """What is no text, described: kind, format, and its size or address."""
    name = next(
        (each for each in ("image", "audio", "video", "document", "file", "blob", "uri") if each in type_), None
    )
    if name is None:
        return None
    modality = part.get("modality")
    label = str(modality) if isinstance(modality, str) and modality else name
    holder = next(
        (part[key] for key in (type_, "source", name, "image_url", "input_audio", "file") if key in part), part
    )
    if isinstance(holder, str):
        holder = {"url": holder}
    if not isinstance(holder, Mapping):
        holder = part
    format_ = _text_of(holder, "media_type", "mime_type", "format") or _text_of(part, "mime_type", "media_type")
    data = _text_of(holder, "data", "file_data", "content", "url", "uri", "file_id", "id", "filename")
    if data.startswith("data:"):
        head, _, data = data[5:].partition(",")
        return f"[{label}: {head.partition(';')[0] or 'unknown format'}, {_size(data)}]"
    if data.startswith(("http:", "https:", "gs:", "s3:", "file:", "attachment:")) or len(data) < 120:
        return f"[{label}: {', '.join(filter(None, [format_, clean(data[:300])])) or 'not in the trace'}]"
    return f"[{label}: {format_ or 'unknown format'}, {_size(data)}]"


def _size(base64: str) -> str:
    size = len(base64) * 3 // 4
    return f"{size} bytes" if size < 1000 else f"{size / 1000:.0f} kB" if size < 1_000_000 else f"{size / 1e6:.1f} MB"


def _calls(message: Mapping[str, Any]) -> Iterator[Call]:
    calls = message.get("tool_calls") or ()
    if isinstance(calls, Mapping | str) or not isinstance(calls, Sequence):
        raise BadTrace(f'expected "tool_calls" as a list, found {kind(calls)}')
    older = message.get("function_call")
    for call in [*calls, *([older] if isinstance(older, Mapping) else [])]:
        if not isinstance(call, Mapping):
            raise BadTrace(f"expected a tool call as an object, found {kind(call)}")
        function = call.get("function", call.get("custom", call))
        if isinstance(function, str):
            function = {"name": function, "arguments": call.get("arguments")}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadTrace(f"expected a tool call with the name of a function, found {shown(call)[:200]}")
        yield Call(
            name=clean(name),
            arguments=function.get("arguments", function.get("input", function.get("args"))),
            call_id=_text_of(call, "id", "call_id", "tool_call_id"),
        )


def _result(text: str, message: Mapping[str, Any]) -> str:
    error = message.get("error")
    if isinstance(error, Mapping):
        error = error.get("message") or shown(error)
    if error is True:
        return f"[error] {text}"
    return f"[error] {clean(str(error))}\n{text}".rstrip() if error else text


def _tokens(message: Mapping[str, Any]) -> int | None:
    usage = message.get("usage")
    if not isinstance(usage, Mapping):
        return None
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def thinking(text: str) -> str:
    """What a model thought, in the tags in which it is shown everywhere."""
    text = clean(text).strip()
    return text if text.startswith("<think>") else f"<think>{text}</think>"


def _plain(value: object) -> str:
    """Text of whatever a tool returned."""
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    parts = [value] if isinstance(value, Mapping) else value
    if isinstance(parts, Sequence) and parts and all(isinstance(p, Mapping) and "type" in p for p in parts):
        return "\n".join(entry.text for part in parts for entry in _part(part))
    return clean(compact(value))


def _argument(name: object, value: object) -> str:
    return f"  {name} =\n{clean(value)}" if isinstance(value, str) and "\n" in value else f"  {name} = {compact(value)}"


def _text_of(holder: Mapping[str, Any], *names: str) -> str:
    return next((clean(holder[name]) for name in names if isinstance(holder.get(name), str) and holder[name]), "")


def compact(value: object) -> str:
    """JSON on one line, in the letters it was written with."""
    return clean(json.dumps(value, ensure_ascii=False, default=str))


def shown(value: object) -> str:
    """JSON on one line, not endless."""
    text = compact(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... {len(text)} characters in all"


def kind(value: object) -> str:
    """What JSON calls it.

    >>> kind([1])
    'a list'
    """
    if value is None:
        return "nothing"
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)

"""Convert messages of all dialects to entries: speakers, texts, tool calls and results.

=================  =====================================================================================================
OpenAI chat        ``role``, ``content`` (text or parts), ``tool_calls``, ``role: tool`` with ``tool_call_id``
OpenAI Responses   items: ``message``, ``reasoning``, ``function_call``, ``function_call_output``, ...
Inspect            OpenAI's form with ``function`` and ``arguments`` flat in a tool call, ``reasoning`` parts, ``error``
LangChain          ``type: human | ai | tool``, also below ``data``, and in LangChain's own serialisation
AutoGen            ``source`` and ``type: TextMessage | ToolCallRequestEvent | AssistantMessage | ...``
ShareGPT           ``from: human | gpt`` and ``value``
smolagents         roles ``tool-call`` and ``tool-response``
Letta              ``message_type: user_message | tool_call_message | tool_return_message | ...``
Gemini CLI         ``type: user | gemini``, ``toolCalls`` with their ``result``, ``thoughts``
Vercel AI SDK      ``parts`` of its user interface, ``toolInvocations``
=================  =====================================================================================================

Parts of a message's content are read by `draco_ray.traces.parts`. Nothing is dropped.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draco_ray.traces.entry import AGENT, BadTrace, Call, Entry, decoded, kind, object_of, shown, text_of, thinking
from draco_ray.traces.model import clean
from draco_ray.traces.parts import HIDDEN, part, parts, plain, stored
from draco_ray.traces.streams import whole
from draco_ray.traces.templates import tagged, templated

AGENT_ROLES = ("assistant", "model", "ai", "agent", "bot", "gpt", "chatgpt", "gemini")
RESULT_ROLES = ("tool", "function", "environment", "ipython", "tool-response", "observation")
LANGCHAIN = ("human", "ai", "system", "tool", "function", "developer")
"""LangChain's message types (also prefixes of its class names), which are roles."""
USER_PROXIES = ("user_proxy", "userproxy", "User_proxy", "UserProxy")
"""Names of the user's side in AutoGen's first versions, in which its role may be ``assistant``."""
GEMINI_CLI = ("user", "gemini", "info", "warning", "error")
"""Types of the messages in sessions of Gemini CLI."""
AUTOGEN = ("Message", "Event")
"""Suffixes of AutoGen's message types."""
_RESULTS = ("result", "results", "outputs", "output")
_CONTAINERS = ("message", "output", "messages", "body", "response", "outputBodyJson", "body_raw")
"""Fields of a response that may contain the answer."""
_CONTENTS = ("parts", "content", "blocks", "text", "system_prompt")
"""Fields of a message that may contain its text."""
_REPLY_KEYS = ("role", "content", "tool_calls", "toolCalls", "text", "choices", "candidates", "output", "message")


def entries(messages: object, where: str = "message") -> list[Entry]:
    """Entries of a list of messages or items, in order.

    Raises:
        BadTrace: it is not a list of messages.
    """
    if isinstance(messages, str):
        messages = templated(messages) or [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence):
        raise BadTrace(f"expected a list of {where}s, found {kind(messages)}")
    if any(isinstance(each, Mapping) and each.get("name") in USER_PROXIES for each in messages):
        messages = [_of_proxy(each) for each in messages]
    if messages and all(isinstance(each, Mapping) and each.get("object") == "thread.message" for each in messages):
        # OpenAI's Assistants list the latest message first.
        messages = sorted(messages, key=lambda each: each["created_at"])
    found: list[Entry] = []
    for number, message in enumerate(messages, 1):
        try:
            found += [each for entry in message_entries(message) for each in tagged(entry)]
        except BadTrace as problem:
            raise BadTrace(f"{where} {number}: {problem}") from None
    return found


def reply_entries(reply: object, where: str = "response") -> list[Entry]:
    """Entries of a model's answer, in the form of any provider's API; empty if the form is unknown.

    Raises:
        BadTrace: it contains something that is not a message.
    """
    reply = whole(reply)
    if isinstance(reply, str):
        return entries([{"role": AGENT, "content": reply}], where) if reply.strip() else []
    if isinstance(reply, list):
        return [each for part_ in reply for each in reply_entries(part_, where)]
    if not isinstance(reply, Mapping):
        return []
    if "finishReason" in reply and ("toolCalls" in reply or isinstance(reply.get("content"), list)):
        # A step of the AI SDK, with its calls and their results.
        said = {"role": AGENT, "content": reply.get("content") or reply.get("text"), "tool_calls": ()}
        if "content" not in reply:
            said = {**said, "reasoning": reply.get("reasoning"), "tool_calls": reply["toolCalls"]}
        results = reply.get("toolResults") if "content" not in reply else None
        return entries([said, *([{"role": "tool", "content": results}] if results else [])], where)
    if ("role" in reply or "type" in reply or "parts" in reply) and not isinstance(reply.get("message"), Mapping):
        known = _langchain(reply) is not None or "role" in reply or reply.get("type") not in (None, "message")
        return entries([reply if known else {"role": AGENT, **reply}], where)
    for name in ("choices", "candidates", "generations"):
        if isinstance(reply.get(name), list) and reply[name]:
            first = reply[name][0]
            first = first[0] if isinstance(first, list) and first else first
            return reply_entries(first, where)
    inner = next(
        (value for name in _CONTAINERS if isinstance(value := whole(reply.get(name)), Mapping | list)),
        reply.get("content"),
    )
    if isinstance(inner, Mapping) or (isinstance(inner, list) and inner is not reply.get("content")):
        return reply_entries(inner, where)
    if not any(name in reply for name in _REPLY_KEYS):
        return []
    calls = reply.get("tool_calls") or reply.get("toolCalls") or ()
    content = reply.get("content", reply.get("text", reply.get("output")))
    named = {name: reply[name] for name in ("usage", "reasoning", "reasoning_content") if name in reply}
    return entries([{**named, "role": AGENT, "content": content, "tool_calls": calls}], where)


def message_entries(value: object) -> list[Entry]:
    """The entries of one message or item.

    Raises:
        BadTrace: it is not a message.
    """
    if not isinstance(value, Mapping):
        raise BadTrace(f"expected an object with a role, found {kind(value)}")
    message = _unwrapped(value)
    if isinstance(message.get("tool_responses"), list):
        return entries(message["tool_responses"], "result")
    if message.get("object") == "response":
        return entries(message["output"], "item")
    if message.get("kind") in ("request", "response") and "parts" in message:
        return [each for part_ in message["parts"] for each in _pydantic(part_)]
    if "author" in message and not message.get("content"):
        # An event of Google's ADK without content.
        return []
    converted = _letta(message) or _gemini_cli(message) or _langchain(message) or _sharegpt(message)
    if converted is None and is_autogen(message):
        return list(_autogen(message))
    message = message if converted is None else converted
    role = message.get("role")
    if role is None and isinstance(message.get("parts"), list):
        # In Gemini's requests the user's role may be left out.
        role = "user"
    if role is None and isinstance(message.get("type"), str):
        return [replace(each, item=True) for each in _item(message)]
    if not isinstance(role, str) or not role.strip():
        raise BadTrace(f'expected "role" as text, found {kind(role)}')
    found = list(_message(_role(role, message), message))
    return [replace(each, item=True) for each in found] if message.get("type") == "message" else found


def is_wrapped(value: Any) -> bool:
    """Whether the value is a message wrapped by a framework: Google's ADK, OpenCode, Pydantic AI."""
    if not isinstance(value, Mapping):
        return False
    adk = "author" in value and isinstance(value.get("content"), Mapping | None)
    return adk or ("parts" in value and ("info" in value or value.get("kind") in ("request", "response")))


def _unwrapped(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without the wrapping of a framework."""
    if isinstance(message.get("message"), Mapping) and message.get("role") is None:
        # A choice of an API response, as stored by ART.
        return object_of(message, "message")
    if isinstance(message.get("content"), Mapping) and "parts" in message["content"]:
        return object_of(message, "content")
    # OpenCode has the role beside the parts, LlamaIndex the calls beside the blocks.
    beside = {**object_of(message, "info"), **(object_of(message, "additional_kwargs") if "role" in message else {})}
    return {**beside, **message} if beside else message


def _pydantic(each: Mapping[str, Any]) -> list[Entry]:
    """A part of a message of Pydantic AI."""
    kind_ = str(each.get("part_kind"))
    if kind_.endswith("tool-return") or kind_ == "retry-prompt":
        error = {"error": kind_ == "retry-prompt"}
        return list(_message("tool" if each.get("tool_name") else "user", {**each, **error}))
    role = {"system-prompt": "system", "user-prompt": "user"}.get(kind_, AGENT)
    content = [{**each, "type": kind_}] if role == AGENT else each.get("content")
    return [replace(entry, item=True) for entry in _message(role, {"content": content})]


def _message(role: str, message: Mapping[str, Any]) -> Iterator[Entry]:
    held = [message[name] for name in _CONTENTS if message.get(name) is not None]
    content = next((each for each in held if not _is_empty(each)), held[-1] if held else None)
    if role != "tool" or _holds_results(stored(content)):
        content = stored(content)
    if role == "tool-call":
        yield Entry(role=AGENT, calls=tuple(_smolagents(plain(content))), item=True)
        return
    if role == "tool" and not _holds_results(content):
        said = plain(content).removeprefix("Observation:\n")
        yield Entry(
            role="tool",
            text=_marked(said, message),
            call_id=text_of(message, "tool_call_id", "call_id", "toolCallId", "id"),
            name=text_of(message, "name", "tool_name", "toolName"),
        )
        return
    invoked = [each for each in message.get("toolInvocations") or () if isinstance(each, Mapping)]
    pieces = list(_steps(content if message.get("parts") or not invoked else _invoked(invoked, content)))
    inside = [call for piece in pieces for call in piece.calls]
    # Calls in the content are often repeated in another field.
    calls = [call for call in _calls(message) if not any(_same_call(call, each) for each in inside)]
    if role != AGENT:
        results = [piece for piece in pieces if piece.role == "tool"]
        text = "\n".join(piece.text for piece in pieces if piece.role != "tool" and piece.text)
        if role == "tool" and results:
            # Media of a result are separate parts.
            results[-1] = replace(results[-1], text="\n".join(filter(None, [results[-1].text, text])))
            text = ""
        yield from results
        calls = [*inside, *calls]
        if text or calls or not results:
            yield Entry(role=role, text=text, calls=tuple(calls))
        return
    # Reasoning in the content is often repeated, too.
    thought = [Entry(role="", text=t) for t in _thoughts(message) if not any(t in piece.text for piece in pieces)]
    refusal = text_of(message, "refusal")
    after = [Entry(role="", text=f"[refusal] {refusal}")] if refusal else []
    yield from _turns([*thought, *pieces, *after, *(Entry(role="", calls=(call,)) for call in calls)], _tokens(message))


def _is_empty(content: object) -> bool:
    """Whether a content is empty text or has only parts of empty text; another field may contain the text."""
    found = content if isinstance(content, list) else [content]
    return all((each.get("text") if isinstance(each, Mapping) else each) == "" for each in found)


def _steps(content: object) -> Iterator[Entry]:
    """The parts of a content. In a step that the AI SDK marks, parallel calls, each with its result, come first."""
    steps: list[list[Any]] = [[]]
    for each in content if isinstance(content, list) else ():
        if isinstance(each, Mapping) and each.get("type") == "step-start":
            steps.append([])
        else:
            steps[-1].append(each)
    if len(steps) == 1:
        yield from parts(content)
        return
    for step in steps:
        found: list[Entry] = []
        for piece in parts(step):
            place = len(found)
            while piece.calls and place and found[place - 1].role == "tool":
                place -= 1
            found.insert(place, piece)
        yield from found


def _same_call(one: Call, other: Call) -> bool:
    """Whether two calls are the same, compared by id or else by name and arguments."""
    if one.call_id and other.call_id:
        return one.call_id == other.call_id
    return str(one) == str(other)


def _turns(pieces: Iterable[Entry], tokens: int | None) -> Iterator[Entry]:
    """An agent's message as turns, in order: text after results of the provider's own tools becomes a later turn."""
    said: list[Entry] = []
    empty = True
    for piece in [*pieces, None]:
        if (piece is None or piece.role == "tool") and (said or (piece is None and empty)):
            text = "\n".join(each.text for each in said if each.text)
            calls = tuple(call for each in said for call in each.calls)
            yield Entry(role=AGENT, text=text, calls=calls, tokens=tokens if piece is None else None)
            said = []
        if piece is not None and piece.role == "tool":
            yield piece
        elif piece is not None:
            said.append(piece)
        empty = False


def _thoughts(message: Mapping[str, Any]) -> Iterator[str]:
    for name in ("reasoning_content", "reasoning", "thinking"):
        if text := thinking(text_of(message, name)):
            yield text
            return
    details = message.get("reasoning_details")
    found = [each.text for each in parts(details)] if isinstance(details, list) else []
    yield from dict.fromkeys(text for text in found if text != HIDDEN or len(found) == 1)


def _role(role: str, message: Mapping[str, Any]) -> str:
    if message.get("name") in USER_PROXIES and role != "tool":
        return "user"
    role = role.strip().casefold().removeprefix("messagerole.").replace("_", "-")
    if role in AGENT_ROLES:
        return AGENT
    if role in RESULT_ROLES:
        return "tool"
    if role in ("developer", "system"):
        return "system"
    name = message.get("name")
    named = f"{role} {name}" if isinstance(name, str) and name and role not in ("user", "tool-call") else role
    return "user" if role == "human" else named


def _of_proxy(message: Any) -> Any:
    """A message in a history of AutoGen's first versions, in which the agents have the role ``user``."""
    named = isinstance(message, Mapping) and message.get("role") == "user" and message.get("name")
    return {**message, "role": AGENT} if named else message


def _item(item: Mapping[str, Any]) -> Iterator[Entry]:
    """The entries of a Responses API item without a role."""
    name, type_ = text_of(item, "name"), str(item["type"])
    call_id = text_of(item, "call_id", "id")
    if type_ in ("function_call", "custom_tool_call", "mcp_call"):
        arguments = item.get("arguments", item.get("input"))
        yield Entry(role=AGENT, calls=(Call(name=name or type_, arguments=arguments, call_id=call_id),))
        if type_ == "mcp_call" and (item.get("output") is not None or item.get("error")):
            yield Entry(role="tool", text=_marked(plain(item.get("output")), item), call_id=call_id)
    elif type_.endswith("_output"):
        yield Entry(role="tool", text=plain(item.get("output")), call_id=call_id)
    elif type_.endswith("_call"):
        # The provider's own tools (web search, code interpreter, ...): the item contains their results.
        about = {key: item[key] for key in item if key not in ("id", "type", "status", "call_id", *_RESULTS)}
        call = Call(name=type_.removesuffix("_call"), arguments=about, call_id=call_id)
        yield Entry(role=AGENT, calls=(call,))
        if results := {key: item[key] for key in _RESULTS if item.get(key)}:
            yield Entry(role="tool", text=plain(results), call_id=call_id)
    else:
        for each in part(item):
            yield replace(each, role=each.role or ("system" if type_ == "mcp_list_tools" else AGENT))


def _langchain(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """A LangChain message in OpenAI's form; None if it is not one."""
    type_, data = message.get("type"), message
    if type_ == "constructor" and isinstance(message.get("kwargs"), Mapping):
        names, data = message.get("id"), message["kwargs"]
        type_ = data.get("type") or (names[-1] if isinstance(names, list) and names else None)
    elif isinstance(message.get("data"), Mapping) and "role" not in message:
        data = message["data"]
    if not isinstance(type_, str) or "role" in message:
        return None
    short = type_.removesuffix("Chunk").removesuffix("Message").casefold()
    if type_ == "chat" or short == "chat":
        return {**data, "type": None}
    if short not in LANGCHAIN or "content" not in data:
        return None
    further = object_of(data, "additional_kwargs")
    older = () if data.get("tool_calls") else ("reasoning_content", "function_call")
    # The id of the message is not the id of a call.
    names = ("content", "tool_call_id", "name", "reasoning_content")
    return {
        **{key: further[key] for key in older if key in further},
        **{key: data[key] for key in names if key in data},
        "error": data.get("status") == "error",
        "role": short,
        "tool_calls": [
            *(data.get("tool_calls") or further.get("tool_calls") or ()),
            *(data.get("invalid_tool_calls") or ()),
        ],
        "usage": data.get("usage_metadata"),
    }


def is_autogen(message: Mapping[str, Any]) -> bool:
    """Whether the value is a message or event of AutoGen; ``FunctionExecutionResultMessage`` has no ``source``."""
    return str(message.get("type")).endswith(AUTOGEN) and (
        "source" in message or isinstance(message.get("content"), list)
    )


def _autogen(message: Mapping[str, Any]) -> Iterator[Entry]:
    """An AutoGen message; every source except the user counts as the agent, since a team acts as one."""
    type_, source, content = str(message["type"]), str(message.get("source")), message.get("content")
    held = content if isinstance(content, list) and all(isinstance(each, Mapping) for each in content) else []
    role = "user" if source.casefold() in ("user", "user_proxy", "human") else AGENT
    usage = message.get("models_usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if type_ == "CodeGenerationEvent":
        blocks = [text_of(each, "code") for each in message.get("code_blocks") or ()]
        yield Entry(role=AGENT, text=plain(content), code="\n\n".join(blocks) or None, tokens=tokens or None)
    elif type_ == "CodeExecutionEvent":
        result = object_of(message, "result")
        failed: dict[str, Any] = {"error": f"exit code {result['exit_code']}"} if result.get("exit_code") else {}
        yield Entry(role="tool", text=_marked(plain(result.get("output")), failed))
    elif held and all("arguments" in each for each in held):
        thought = thinking(text_of(message, "thought"))
        yield Entry(role=AGENT, text=thought, calls=tuple(_calls({"tool_calls": held})), tokens=tokens or None)
    elif held and all("call_id" in each for each in held):
        for each in held:
            yield from _message("tool", {**each, "error": bool(each.get("is_error"))})
    elif type_ == "ThoughtEvent":
        yield Entry(role=AGENT, text=thinking(plain(content)), item=True)
    else:
        yield Entry(role=role, text=plain(content), tokens=tokens or None)


def _gemini_cli(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """A message of a Gemini CLI session in Gemini's form; None if it is not one."""
    if "role" in message or message.get("type") not in GEMINI_CLI or "content" not in message:
        return None
    thoughts = [
        {
            "type": "thinking",
            "thinking": "\n".join(filter(None, [text_of(each, "subject"), text_of(each, "description")])),
        }
        for each in message.get("thoughts") or ()
    ]
    called = message.get("toolCalls") or ()
    results = [result for each in called for result in each.get("result") or ()]
    said = message["content"] if isinstance(message["content"], list) else [message["content"]]
    content = [*thoughts, *filter(None, said), *({"functionCall": each} for each in called), *results]
    return {"role": message["type"] if message["type"] in ("user", "gemini") else "system", "content": content}


def _letta(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """A message of Letta in OpenAI's form; None if it is not one. A turn has several."""
    type_ = text_of(message, "message_type").removesuffix("_message")
    if not type_ or "role" in message:
        return None
    form: dict[str, Any]
    if type_ in ("tool_call", "approval_request"):
        form = {"role": AGENT, "tool_calls": [message.get("tool_call")]}
    elif type_ == "tool_return":
        error = message.get("status") == "error"
        form = {**message, "role": "tool", "content": message.get("tool_return"), "error": error}
    elif type_ == "reasoning":
        form = {"role": AGENT, "reasoning": message.get("reasoning")}
    else:
        form = {"role": type_, "content": message.get("content")}
    return {**form, "type": "message"}


def _sharegpt(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """A turn of a ShareGPT conversation in OpenAI's form; None if it is not one."""
    if not {"from", "value"} <= message.keys():
        return None
    value = message["value"]
    if message["from"] != "function_call":
        return {"role": str(message["from"]), "content": plain(value)}
    called = decoded(value.strip()) if isinstance(value, str) else value
    return {"role": AGENT, "tool_calls": called if isinstance(called, list) else [called]}


def _smolagents(text: str) -> Iterator[Call]:
    """The calls that smolagents writes as a Python list after "Calling tools:"."""
    try:
        listed = ast.literal_eval(text.partition("Calling tools:")[2].strip() or text)
        yield from _calls({"tool_calls": listed if isinstance(listed, list) else [listed]})
    except (ValueError, SyntaxError, MemoryError, RecursionError, BadTrace):
        yield Call(name="tool", arguments=text)


def _invoked(invoked: Sequence[Mapping[str, Any]], content: object) -> list[Any]:
    """The calls of a message of the AI SDK 4 as parts, in steps. Its text comes last, unless a call has no result."""
    found: list[Any] = []
    for before, each in zip([{}, *invoked], invoked, strict=False):
        if not found or each.get("step") != before.get("step"):
            found.append({"type": "step-start"})
        found.append({"type": "tool-invocation", "toolInvocation": each})
    text = content if isinstance(content, list) else [content or ""]
    finished = all("result" in each for each in invoked)
    return [*found, {"type": "step-start"}, *text] if finished else [*text, *found]


def _holds_results(content: object) -> bool:
    """Whether a content has parts that are tool results."""
    if not isinstance(content, list) or not all(isinstance(each, Mapping) for each in content):
        return False
    return any(piece.role == "tool" for each in content for piece in part(each))


def _calls(message: Mapping[str, Any]) -> Iterator[Call]:
    calls = decoded(message.get("tool_calls")) or message.get("toolCalls") or ()
    if isinstance(calls, Mapping | str) or not isinstance(calls, Sequence):
        raise BadTrace(f'expected "tool_calls" as a list, found {kind(calls)}')
    older = message.get("function_call")
    for call in [*calls, *([older] if isinstance(older, Mapping) else [])]:
        if isinstance(call, str):
            # verifiers stores each call as JSON text.
            try:
                call = json.loads(call)
            except (ValueError, RecursionError):
                raise BadTrace(f"expected a tool call as an object, found the text {call[:60]!r}") from None
        if not isinstance(call, Mapping):
            raise BadTrace(f"expected a tool call as an object, found {kind(call)}")
        function = decoded(call.get("function", call.get("custom", call)))
        if isinstance(function, str):
            function = {"name": function, "arguments": call.get("arguments")}
        name = (
            text_of(function, "name", "toolName", "tool_name", "function_name") if isinstance(function, Mapping) else ""
        )
        if not name:
            raise BadTrace(f"expected a tool call with the name of a function, found {shown(call)[:200]}")
        names = ("arguments", "input", "args")
        yield Call(
            name=name,
            arguments=next((function[each] for each in names if function.get(each) is not None), None),
            call_id=text_of(call, "id", "call_id", "tool_call_id", "toolCallId"),
        )


def _marked(text: str, message: Mapping[str, Any]) -> str:
    """A tool's result with the error in its message."""
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

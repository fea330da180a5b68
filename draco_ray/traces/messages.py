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
Vapi, Retell       roles ``tool_calls``, ``tool_call_invocation``, ``tool_call_result``; ``message``, ``result``
ElevenLabs         ``message``, ``tool_calls``, ``tool_results``
Coze               ``type: function_call | tool_response`` beside the role
Google ADK         ``author`` and ``content``
=================  =====================================================================================================

Parts of a message's content are read by `draco_ray.traces.parts`. Nothing is dropped.
"""

from __future__ import annotations

import ast
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from draco_ray.traces.entry import (
    AGENT,
    EARLIER_AGENT,
    BadTrace,
    Entry,
    ToolCall,
    decode_if_json,
    first_of,
    json_type_name,
    object_of,
    text_of,
    truncated_json,
    wrap_thinking,
)
from draco_ray.traces.parts import HIDDEN, call_of, decode_stored_parts, is_call, part, parts, result_of, result_text
from draco_ray.traces.streams import reassemble_stream
from draco_ray.traces.templates import parse_chat_template, parse_tagged_calls

Fields = Mapping[str, Any]
AGENT_ROLES = ("assistant", "model", "ai", "agent", "bot", "gpt", "chatgpt", "gemini")
RESULT_ROLES = ("tool", "function", "environment", "ipython", "observation")
RESULT_ROLE = re.compile(r"(tool|function)(-calls?)?-(result|response|output)s?")
CALL_ROLE = re.compile(r"(tool|function)-(call|use)s?(-invocation)?")
"""Roles of messages that contain only tool calls, in fields or in the text (smolagents: a Python list, ShareGPT: JSON).
If a message's role is an agent's, its type is matched too. `RESULT_ROLE` is the same for tool results."""
TOOL_CALL_ROLE = "tool-call"
LANGCHAIN = ("human", "ai", "system", "tool", "function", "developer")
"""Types of LangChain's messages, used as roles; its class names begin with them."""
GEMINI_CLI = ("user", "gemini", "info", "warning", "error")
"""Types of Gemini CLI's messages."""
USERS = ("user", "user_proxy", "human")
"""Sources in AutoGen that are the user; every other counts as the agent, since a team acts as one."""
USER_PROXIES = ("user_proxy", "userproxy", "User_proxy", "UserProxy")
"""Names of the user's side in AutoGen's first versions, in which its role may be ``assistant``."""
ITEM_TYPE_PATTERN = re.compile(r"message|reasoning|item_reference|compaction|mcp_\w+|\w+_call|\w+_output")
"""Item types of OpenAI's Responses API."""
_LETTA = {
    "tool_call_message": AGENT,
    "approval_request_message": AGENT,
    "reasoning_message": AGENT,
    "tool_return_message": "tool",
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts", "tool_plan")
_CONTENTS = ("parts", "content", "contents", "blocks", "text", "system_prompt", "tool_return", "message")
"""Fields of a message that may contain its text."""
_CONTAINERS = ("message", "output", "messages", "body", "response", "outputBodyJson", "body_raw")
"""Fields of a response that may contain the answer."""
ANSWER_FIELDS = ("choices", "candidates", "generations")
"""Fields of a response that list alternative answers; the first answer is read."""
_REPLY_KEYS = ("role", "content", "tool_calls", "toolCalls", "text", "output", "response", *ANSWER_FIELDS)


def entries(messages: object, where: str = "message") -> list[Entry]:
    """Entries of a list of messages or items, in order.

    Raises:
        BadTrace: it is not a list of messages.
    """
    if isinstance(messages, str):
        messages = parse_chat_template(messages) or [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence):
        raise BadTrace(f"expected a list of {where}s, found {json_type_name(messages)}")
    if any(isinstance(each, Mapping) and each.get("name") in USER_PROXIES for each in messages):
        messages = [_of_proxy(each) for each in messages]
    if messages and all(isinstance(each, Mapping) and each.get("object") == "thread.message" for each in messages):
        # OpenAI's Assistants list the latest message first.
        messages = sorted(messages, key=lambda each: each["created_at"])
    found: list[Entry] = []
    for number, message in enumerate(messages, 1):
        try:
            found += [each for entry in message_entries(message) for each in parse_tagged_calls(entry)]
        except BadTrace as problem:
            raise BadTrace(f"{where} {number}: {problem}") from None
    return found


def reply_entries(reply: object, where: str = "response") -> list[Entry]:
    """Entries of a model's answer, in the form of any provider's API; empty if the form is unknown.

    Raises:
        BadTrace: it contains something that is not a message.
    """
    reply = reassemble_stream(reply)
    if isinstance(reply, str):
        return entries([{"role": AGENT, "content": reply}], where) if reply.strip() else []
    if isinstance(reply, list):
        return [each for part_ in reply for each in reply_entries(part_, where)]
    if not isinstance(reply, Mapping):
        return []
    if "finishReason" in reply and ("toolCalls" in reply or isinstance(reply.get("content"), list)):
        # A step of the AI SDK, with its calls and their results.
        said = reply.get("content") or [
            *([text] if (text := reply.get("text")) else []),
            *(reply.get("toolCalls") or ()),
            *(reply.get("toolResults") or ()),
        ]
        return entries([{"role": AGENT, "content": said, "reasoning": reply.get("reasoning")}], where)
    if reply.get("done") is False and "model" in reply:
        # A piece of a streamed answer of Ollama.
        return []
    for name in () if reply.get("role") else ANSWER_FIELDS:
        if isinstance(reply.get(name), list) and reply[name]:
            first = reply[name][0]
            while isinstance(first, list) and first:
                first = first[0]
            # Hide the field `type` of the answer: its value is not the type of a message.
            return reply_entries(_over({"type": None}, first) if isinstance(first, Mapping) else first, where)
    known = "role" in reply or reply.get("type") is not None or is_call(reply)
    if (known or "parts" in reply) and not isinstance(reply.get("message"), Mapping):
        return entries([reply if known else _over({"role": AGENT}, reply)], where)
    for name in _CONTAINERS:
        if isinstance(inner := reassemble_stream(reply.get(name)), Mapping | list):
            return reply_entries(inner, where)
    if isinstance(reply.get("content"), Mapping):
        return reply_entries(reply["content"], where)
    if not any(name in reply for name in _REPLY_KEYS):
        return []
    content = first_of(reply, "content", "text", "output", "response")
    return entries([_over({"role": AGENT, "content": content}, reply)], where)


def message_entries(value: object) -> list[Entry]:
    """The entries of one message or item.

    Raises:
        BadTrace: it is not a message.
    """
    if not isinstance(value, Mapping):
        raise BadTrace(f"expected an object with a role, found {json_type_name(value)}")
    if isinstance(value.get("tool_responses"), list):
        return entries(value["tool_responses"], "result")
    if value.get("object") == "response":
        return entries(value["output"], "item")
    if value.get("kind") in ("request", "response") and "parts" in value:
        return [each for part_ in value["parts"] for each in _pydantic(part_)]
    if "author" in value and not value.get("role") and not value.get("message") and _is_silent(value):
        return []
    message = unwrapped(value)
    role = _speaker(message)
    if role is None and (isinstance(value.get("type"), str) or is_call(value)):
        role = "system" if value.get("type") == "mcp_list_tools" else AGENT
        return [replace(each, role=each.role or role, item=True) for each in part(value)]
    if not isinstance(role, str) or not role.strip():
        raise BadTrace(f'expected "role" as text, found {json_type_name(role)}')
    found = list(_message(_role(role, message), message))
    item = message.get("type") in ("message", "ThoughtEvent") or "message_type" in message
    return [replace(each, item=True) for each in found] if item else found


def _is_silent(event: Fields) -> bool:
    """Whether an event of Google's ADK adds nothing to the other events: its content has only a role, or it is a piece
    of a streamed answer."""
    content = event.get("content") or {}
    empty = isinstance(content, Mapping) and not any(content[name] for name in content if name != "role")
    return empty or event.get("partial") is True


def is_message(value: object) -> bool:
    """Whether the value is a chat message or an item, in any dialect."""
    if not isinstance(value, Mapping):
        return False
    if "role" in value or ("author" in value and isinstance(value.get("content"), Mapping | None)):
        return True
    if isinstance(value.get("message"), Mapping):
        # A choice of a response; other objects with a message are events or answers.
        return "finish_reason" in value or "index" in value
    message = unwrapped(value)
    if message is value.get("content"):
        return False
    return _speaker(message) is not None or bool(ITEM_TYPE_PATTERN.fullmatch(str(message.get("type"))))


def unwrapped(message: Fields) -> Fields:
    """The message inside a framework's wrapper, with the fields that the framework keeps beside it."""
    inner = object_of(message, "message")
    bare = first_of(message, "content", "parts", "tool_calls") is None
    if inner and (message.get("role") is None or (bare and inner.get("role") is not None)):
        # A choice of an API response, as stored by ART.
        return inner
    if isinstance(message.get("content"), Mapping) and "parts" in message["content"]:
        # The content may have no role. Then the message has it: as `role`, or in Google's ADK as `author`.
        content, author = object_of(message, "content"), message.get("author")
        role = first_of(message, "role") or (author and ("user" if author == "user" else AGENT))
        return _over({"role": role}, content) if role and not content.get("role") else content
    if message.get("type") == "CodeExecutionEvent":
        result = object_of(message, "result")
        failed = f"exit code {result['exit_code']}" if result.get("exit_code") else None
        return _over({"role": "tool", "content": result.get("output"), "error": failed}, message)
    if "role" not in message and message.get("type") == "constructor":
        # LangChain's own serialisation
        names = message.get("id")
        named = {"type": names[-1] if isinstance(names, list) and names else None}
        message = _over(object_of(message, "kwargs"), named)
    elif "role" not in message:
        message = _over(message, object_of(message, "data"))
    return _over(message, object_of(message, "info"), object_of(message, "additional_kwargs"))


def _over(*layers: Fields) -> Fields:
    """The objects merged; the first one that has a field determines its value."""
    held = [layer for layer in layers if layer]
    return ChainMap(*cast("list[dict[str, Any]]", held)) if len(held) > 1 else held[0] if held else {}


def _speaker(message: Fields) -> Any:
    """The role of a message; None for an item or a value without a role."""
    if message.get("role") is not None:
        return message["role"]
    if "from" in message and "value" in message:
        return str(message["from"])
    type_, letta = str(message.get("type")), text_of(message, "message_type")
    if type_ == "message":
        return AGENT
    if letta.endswith("_message"):
        return _LETTA.get(letta, letta.removesuffix("_message"))
    short = type_.removesuffix("Chunk").removesuffix("Message").casefold()
    if short in LANGCHAIN and "content" in message:
        return short
    if type_.endswith(("Message", "Event")) and ("source" in message or isinstance(message.get("content"), list)):
        return "user" if str(message.get("source")).casefold() in USERS else AGENT
    if short in GEMINI_CLI and "content" in message:
        return short if short in ("user", "gemini") else "system"
    if not isinstance(message.get("parts"), list):
        return None
    # In Gemini's requests the user's role may be left out.
    return AGENT if message.get("kind") == "response" else "user"


def _role(role: str, message: Fields) -> str:
    if message.get("name") in USER_PROXIES and role != "tool":
        return "user"
    role = role.strip().casefold().removeprefix("messagerole.").replace("_", "-")
    # The type can mark an agent's message as a call or a result; other speakers keep their role.
    kinds = (role, str(message.get("type")).replace("_", "-") if role in AGENT_ROLES else "")
    if role in RESULT_ROLES or any(map(RESULT_ROLE.fullmatch, kinds)):
        return "tool"
    if any(map(CALL_ROLE.fullmatch, kinds)):
        return TOOL_CALL_ROLE
    if role in AGENT_ROLES:
        # Inspect marks what an agent was given. If no model wrote it, such as an example, the policy did not sample it.
        return EARLIER_AGENT if message.get("source") == "input" and not message.get("model") else AGENT
    if role in ("developer", "system"):
        return "system"
    name = message.get("name")
    named = f"{role} {name}" if isinstance(name, str) and name and role != "user" else role
    return "user" if role == "human" else named


def _of_proxy(message: Any) -> Any:
    """Set the role of an agent's message from AutoGen's first versions to `AGENT`.

    There, an agent's message has the role ``user`` and the agent's name. Other messages are returned unchanged.
    """
    named = isinstance(message, Mapping) and message.get("role") == "user" and message.get("name")
    return {**message, "role": AGENT} if named else message


def _pydantic(each: Fields) -> list[Entry]:
    """A part of a message of Pydantic AI."""
    kind_ = str(each.get("part_kind"))
    role = {"system-prompt": "system", "user-prompt": "user"}.get(kind_, AGENT)
    if kind_.endswith(("tool-return", "retry-prompt")) and not each.get("tool_name"):
        role = "user"
    content = [each] if role == AGENT else each.get("content")
    return [replace(entry, item=True) for entry in _message(role, {"content": content})]


def _message(role: str, message: Fields) -> Iterator[Entry]:
    held = [message[name] for name in _CONTENTS if message.get(name) is not None]
    if (message.get("role") is None or not held) and "from" in message and "value" in message:
        held = [result_text(message["value"])]
    content = next((each for each in held if not _is_empty(each)), held[-1] if held else None)
    if role != "tool" or _holds_results(decode_stored_parts(content)):
        content = decode_stored_parts(content)
    if role == TOOL_CALL_ROLE:
        single, said = call_of(message), result_text(content)
        blocks = content if isinstance(content, list) else ()
        if single.name and (single.arguments is not None or not said):
            yield Entry(role=AGENT, text=said, calls=(single,), item=True)
        elif any(_calls(message)) or any(piece.calls for piece in parts(blocks)):
            yield from (replace(each, item=True) for each in _message(AGENT, message))
        else:
            yield Entry(role=AGENT, calls=tuple(_written(said)), item=True)
        return
    if role == "tool" and not _holds_results(content):
        # Hide the id of a message without a role (LangChain): it is not the id of the call.
        named = message if message.get("role") is not None else _over({"id": None}, message)
        yield result_of(named, content=None if content is None else result_text(content).removeprefix("Observation:\n"))
        return
    if content and message.get("type") == "ThoughtEvent":
        content = [{"type": "thinking", "thinking": content}]
    invoked = [each for each in message.get("toolInvocations") or () if isinstance(each, Mapping)]
    pieces = list(_steps(content if message.get("parts") or not invoked else _invoked(invoked, content)))
    inside = [call for piece in pieces for call in piece.calls]
    # Calls in the content are often repeated in another field; AutoGen's summary repeats those of earlier events.
    listed = () if message.get("type") == "ToolCallSummaryMessage" else _calls(message)
    calls = [call for call in listed if not any(_same_call(call, each) for each in inside)]
    if role != AGENT:
        results = [piece for piece in pieces if piece.role == "tool"]
        text = "\n".join(piece.text for piece in pieces if piece.role != "tool" and piece.text)
        if role == "tool" and results:
            # Media of a result are separate parts: append their text to the result.
            results[-1] = replace(results[-1], text="\n".join(filter(None, [results[-1].text, text])))
            text = ""
        yield from results
        calls = [*inside, *calls]
        if text or calls or not results:
            yield Entry(role=role, text=text, calls=tuple(calls))
        return
    # Reasoning in the content is often repeated in another field, too.
    thought = [Entry(role="", text=t) for t in _thoughts(message) if not any(t in piece.text for piece in pieces)]
    refusal, aloud = text_of(message, "refusal"), text_of(object_of(message, "audio"), "transcript")
    if any(aloud in piece.text for piece in pieces):
        aloud = ""
    after = [Entry(role="", text=text) for text in (refusal and f"[refusal] {refusal}", aloud) if text]
    called = [Entry(role="", calls=(call,)) for call in calls]
    # Gemini CLI, whose messages have no role, stores the results in the calls.
    own: Any = message.get("toolCalls") if message.get("role") is None else ()
    answers = [result_of(each) for each in own or () if each.get("result")]
    given: Any = message.get("tool_results")
    answers += [result_of(each) for each in given if isinstance(each, Mapping)] if isinstance(given, list) else []
    snippets: Any = message.get("code_blocks") if message.get("type") == "CodeGenerationEvent" else None
    ran = "\n\n".join(text_of(each, "code") for each in snippets or ())
    for entry in _turns([*thought, *pieces, *after, *called, *answers], _tokens(message)):
        yield replace(entry, code=ran) if ran else entry


def _is_empty(content: object) -> bool:
    """Whether a content is empty text or has only parts of empty text; another field may contain the text."""
    found = content if isinstance(content, list) else [content]
    return all((each.get("text") if isinstance(each, Mapping) else each) == "" for each in found)


def _steps(content: object) -> Iterator[Entry]:
    """The parts of a message's content. Within a step of the AI SDK, all calls are put before all results."""
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


def _same_call(one: ToolCall, other: ToolCall) -> bool:
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


def _thoughts(message: Fields) -> Iterator[str]:
    own = ("thought",) if "source" in message else ()
    if text := wrap_thinking(text_of(message, *_THOUGHTS, *own)):
        yield text
        return
    thoughts = message.get("thoughts")
    for each in thoughts if isinstance(thoughts, list) else ():
        told = each if isinstance(each, Mapping) else {"subject": each}
        yield wrap_thinking("\n".join(filter(None, [text_of(told, "subject"), text_of(told, "description")])))
    details = message.get("reasoning_details")
    found = [each.text for each in parts(details)] if isinstance(details, list) else []
    yield from dict.fromkeys(text for text in found if text != HIDDEN or len(found) == 1)


def _written(text: str) -> Iterator[ToolCall]:
    """Calls that are written as JSON, or as a Python list after "Calling tools:"."""
    text = text.partition("Calling tools:")[2].strip() or text.strip()
    try:
        listed = decode_if_json(text)
        listed = ast.literal_eval(text) if isinstance(listed, str) else listed
        yield from _calls({"tool_calls": listed if isinstance(listed, list) else [listed]})
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        yield ToolCall(name="tool", arguments=text)


def _invoked(invoked: Sequence[Mapping[str, Any]], content: object) -> list[Any]:
    """The calls of an AI SDK 4 message as parts, in steps. Its own text comes last, unless a call has no result."""
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
    return any(first.role == "tool" for each in content for first in part(each)[:1])


def _calls(message: Fields) -> Iterator[ToolCall]:
    listed = decode_if_json(message.get("tool_calls")) or message.get("toolCalls")
    # LangChain keeps the provider's form of the calls in additional_kwargs.
    listed = listed or object_of(message, "additional_kwargs").get("tool_calls") or ()
    if isinstance(listed, Mapping | str) or not isinstance(listed, Sequence):
        raise BadTrace(f'expected "tool_calls" as a list, found {json_type_name(listed)}')
    single = (message.get(name) for name in ("tool_call", "function_call"))
    # A table may have a call whose fields are all null where a message has no call.
    older = [] if listed else [each for each in single if isinstance(each, Mapping) and any(each.values())]
    for each in [*listed, *older, *(message.get("invalid_tool_calls") or ())]:
        # verifiers stores each call as JSON text.
        call = decode_if_json(each)
        if not isinstance(call, Mapping):
            raise BadTrace(f"expected a tool call as an object, found {truncated_json(call)[:60]}")
        call = object_of(call, "tool_call") or call
        function = decode_if_json(first_of(call, "function", "custom"))
        named = {"name": function} if isinstance(function, str) else function if isinstance(function, Mapping) else {}
        called = call_of(_over(named, call))
        if not called.name:
            raise BadTrace(f"expected a tool call with the name of a function, found {truncated_json(call)[:200]}")
        yield called


def _tokens(message: Fields) -> int | None:
    usage = first_of(message, "usage", "usage_metadata", "models_usage")
    count = first_of(usage, "completion_tokens", "output_tokens") if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None

"""Records that contain a list of messages or items, and logs of model requests with their responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from draco_ray.records import EpisodeEnd
from draco_ray.traces.calls import ModelCall, split_threads
from draco_ray.traces.entry import AGENT, UNREADABLE_ERRORS, BadTrace, Entry, text_of, truncated_json
from draco_ray.traces.formats import ReadOptions, build_trace, get_field, number, path_value, register_format
from draco_ray.traces.messages import entries, is_message, reply_entries
from draco_ray.traces.model import Trace, escape_surrogates
from draco_ray.traces.model_request import SYSTEM, TOOLS, first_path_value, is_messages, request_in, system_entries
from draco_ray.traces.streams import reassemble_stream
from draco_ray.traces.templates import parse_chat_template

REPLY_FIELDS = (
    "outputs",
    "response.content.text",
    "response",
    "response_body",
    "result.message",
    "completion",
    "output",
    "output_message",
    "message",
    "choices",
    "candidates",
    "generations",
    "steps",
)
"""Fields that may contain the model's answer."""
STOP_PATHS = (
    *("incomplete_details.reason", "choices.0.finish_reason", "candidates.0.finishReason", "stop_reason"),
    *("finish_reason", "done_reason"),
)
"""Possible paths of the reason why an answer ended."""
TRUNCATED = ("length", "max_tokens", "max_output_tokens")
DIALECTS = {
    "anthropic": 'an object with "messages", whose content is a list of blocks (tool_use, ...), and perhaps "system"',
    "openai-responses": 'an object with "input" and "output" items (function_call, function_call_output)',
    "openai-chat": 'an object with "messages", each with "role" and "content" or "tool_calls"',
    "messages": "messages of LangChain, AutoGen, Gemini, ShareGPT and similar formats",
}
"""Dialect -> description of its records."""
ANTHROPIC_BLOCKS = {"tool_use", "tool_result", "thinking", "server_tool_use", "redacted_thinking"}
RESPONSE_ITEMS = {"function_call", "function_call_output", "reasoning", "custom_tool_call", "mcp_call"}


class _Parts(NamedTuple):
    """The parts of a record that contains a conversation."""

    request: Mapping[str, Any]
    """The record, or the request in it."""
    history: Any
    reply: Any
    """The model's answer; None if the history is the whole conversation."""


def _parts(record: object) -> _Parts | None:
    """The conversation in a record; None if there is none."""
    if isinstance(record, list):
        return _Parts(request={}, history=record, reply=None) if is_messages(record) else None
    if not isinstance(record, Mapping):
        return None
    if (found := request_in(record)) is not None:
        request, name, history = found
        reply = _reply(record, request, name)
        called = get_field(reply, "automatic_function_calling_history")
        return _Parts(request=request, history=called or history, reply=reply)
    if is_single_message(record):
        return _Parts(request={}, history=[record], reply=None)
    # A record with `custom_id` and no messages is a result of a batch, whose requests are in another file.
    reply = _reply(record, record, "") if "custom_id" in record else record if _is_answer(record) else None
    return None if reply is None else _Parts(request={}, history=[], reply=reply)


def _is_answer(record: Mapping[str, Any]) -> bool:
    """Whether a record is a model's complete answer, whose request was not logged."""
    first = (path_value(record, path) for path in ("choices.0.message", "candidates.0.content"))
    ended = record.get("object") == "response" or ("model" in record and record.get("done") is True)
    return ended or any(isinstance(each, Mapping) for each in first)


def _reply(record: Mapping[str, Any], request: Mapping[str, Any], history: str) -> Any:
    """The model's answer, reassembled if it was streamed; None if the history is the whole conversation."""
    for path in REPLY_FIELDS:
        if path != history:
            value = path_value(record, path) or path_value(request, path)
            if path == "message" and not is_message(value):
                continue
            if value and (path != "steps" or path_value(value, "0.finishReason")):
                # Of several choices, the first is the answer.
                return reassemble_stream({path: value} if path in ("choices", "candidates", "generations") else value)
    return None


def is_single_message(record: Mapping[str, Any]) -> bool:
    """Whether a record is a single message of a conversation with one line per message."""
    return isinstance(record.get("role"), str) and bool({"content", "tool_calls", "parts"} & record.keys())


def _types(messages: object) -> set[str]:
    """The types of the messages or items and of the parts of their contents."""
    found: set[str] = set()
    if isinstance(messages, Mapping):
        messages = messages.get("output") or [messages]
    for message in messages if isinstance(messages, list) else ():
        content = get_field(message, "content")
        found |= {str(get_field(each, "type")) for each in [message, *(content if isinstance(content, list) else ())]}
    return found


def is_dialect(name: str) -> Callable[[object], bool]:
    """A function that tests whether a record is in the dialect ``name``."""
    return lambda record: _dialect(record) == name


def _dialect(record: object) -> str | None:
    known = _parts(record)
    if known is None:
        return None
    types = _types(known.history) | _types(known.reply)
    roles = [get_field(each, "role") is not None for each in known.history] if is_messages(known.history) else []
    if roles and all(roles) and (types & ANTHROPIC_BLOCKS or "system" in known.request):
        return "anthropic"
    items = types & RESPONSE_ITEMS or "input" in known.request or get_field(record, "object") == "response"
    if items and not {"messages", "contents"} & known.request.keys():
        return "openai-responses"
    chat = all(roles[:3]) if roles else "messages" in known.request
    return "openai-chat" if chat else "messages"


def session(record: Any, file: str) -> str | None:
    """The session ID of a record.

    For logged requests it is the file, because each later request repeats the conversation so far; for a batch
    request, whose response is in another file, the request's ID; for a graph's state, the thread's ID.
    """
    if isinstance(record, Mapping) and "custom_id" in record:
        return f"{Path(file).parent} {record['custom_id']}"
    threads_ = (path_value(record, path) for path in ("config.configurable.thread_id", "checkpoint.thread_id"))
    if (thread := next(filter(None, threads_), None)) is not None:
        return str(thread)
    known = _parts(record)
    # A request without a logged answer is read with the later ones, which contain its messages.
    logged = known is not None and any(get_field(record, name) is known.request for name in ("request", "body"))
    whole_ = known is None or (known.reply is None and known.history != [record] and not logged)
    return None if whole_ else file


def read(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The traces of a record, or of the calls in a log. Raises: BadTrace if no agent says anything."""
    if not reading.wheres:
        yield _trace(record, split_threads([_call(record)])[0].entries, reading)
        return
    logged: list[tuple[str, Any]] = []
    calls: list[ModelCall] = []
    for where, each in _answered(record, reading.wheres):
        try:
            calls.append(_call(each))
            logged.append((where, each))
        except UNREADABLE_ERRORS as problem:
            reading.unreadable(where, problem)
    # Files with one call each have no order: sort them by name or by length, whichever joins more calls.
    orders = (list(range(len(calls))), sorted(range(len(calls)), key=lambda n: len(calls[n].inputs)))
    joined = [(order, split_threads([calls[n] for n in order])) for order in orders]
    order, threads_ = min(joined, key=lambda each: len(each[1]))
    found = [(sorted(order[n] for n in thread.calls), thread) for thread in threads_]
    for own, thread in sorted(found, key=lambda each: each[0]):
        where = logged[own[0]][0]
        try:
            yield _trace(logged[own[-1]][1], thread.entries, replace(reading, where=where))
        except UNREADABLE_ERRORS as problem:
            reading.unreadable(where, problem)


def _answered(records: Sequence[Any], wheres: Sequence[str]) -> list[tuple[str, Any]]:
    """The records of a session with their locations: batch requests are joined with their responses, and duplicate
    responses are dropped."""
    found = list(zip(wheres, records, strict=True))
    if all(isinstance(each, Mapping) and is_single_message(each) for each in records):
        return [(found[0][0], list(records))]
    if all(isinstance(each, Mapping) and "custom_id" in each for each in records):
        asked = [each for each in records if (known := _parts(each)) is not None and known.reply is None]
        return [(where, {**(asked or [{}])[0], **each}) for where, each in found if each not in asked] or found
    once: dict[object, tuple[str, Any]] = {}
    for where, each in found:
        known = _parts(each)
        named = known is not None and get_field(known.reply, "id") is not None
        key = repr((known.history, known.reply)) if known is not None and named else len(once)
        once.setdefault(key, (where, each))
    return list(once.values())


def _trace(record: Any, said: Sequence[Entry], reading: ReadOptions) -> Trace:
    known = _parts(record) or _Parts(request=record, history=[], reply=record)
    stopped = str(first_path_value((known.reply, record), STOP_PATHS)).casefold() in TRUNCATED
    trace = build_trace(
        said,
        record,
        reading,
        tools=_told(record, known, TOOLS),
        outcome=number(get_field(record, "reward")),
        ended=EpisodeEnd.RESPONSE_LIMIT if stopped else None,
    )
    if trace.ended is EpisodeEnd.UNSTATED:
        trace = replace(trace, notes=(*trace.notes, "the trace ends without an answer of the agent"))
    return trace


def _told(record: Any, known: _Parts, paths: Sequence[str]) -> Any:
    """The value at the first of these paths that exists in the request, the record or the response."""
    first = known.history[0] if is_messages(known.history) else None
    return first_path_value((known.request, record, known.reply, first), paths)


def _intermediate(record: Any) -> list[Entry]:
    """Intermediate steps of a LangChain agent executor."""
    found: list[Entry] = []
    for place, (action, observation) in enumerate(get_field(record, "intermediate_steps") or ()):
        call = {"id": f"step {place}", "name": action["tool"], "arguments": action.get("tool_input")}
        said = {"role": AGENT, "content": action.get("log"), "tool_calls": [call]}
        found += entries([said, {"role": "tool", "content": observation, "tool_call_id": call["id"]}])
    return found


def _call(record: Any) -> ModelCall:
    """A record as a model call: history and output."""
    known = _parts(record)
    if known is None:
        raise BadTrace("expected messages, or a model's answer")
    history, reply = known.history, known.reply
    inputs = entries(history, "item" if "input" in known.request else "message")
    answered = reply_entries(reply)
    if isinstance(history, str) and isinstance(reply, str) and parse_chat_template(history):
        # The prompt may end within the agent's message, which the answer continues.
        inputs = inputs[:-1] if inputs and inputs[-1].role == AGENT else inputs
        answered = entries(history + reply)[len(inputs) :]
    asked = text_of(record, "instruction") if isinstance(record, Mapping) else ""
    if asked and not any(asked in each.text for each in inputs):
        inputs = [Entry(role="user", text=asked), *inputs]
    inputs = system_entries(_told(record, known, SYSTEM)) + inputs
    if isinstance(reply, list) and reply and not answered and not (inputs and inputs[-1].role == AGENT):
        raise BadTrace(f"the model's answer is a list of an unknown form: {truncated_json(reply)[:200]}")
    # Ignore an empty answer: the next call may be a retry.
    outputs = [*_intermediate(record), *(each for each in answered if each.role == "tool" or each.text or each.calls)]
    # Some logs repeat the history before the answer.
    if len(outputs) >= len(inputs) > 0 and outputs[: len(inputs)] == inputs:
        outputs = outputs[len(inputs) :]
    if outputs == inputs[-len(outputs) :]:
        outputs = []
    conversation = known.request.get("conversation")
    kept = str(get_field(conversation, "id") or conversation or "") if not isinstance(conversation, list) else ""
    return ModelCall(
        names=tuple(filter(None, [str(get_field(reply, "id") or ""), kept])),
        follows=str(known.request.get("previous_response_id") or get_field(reply, "previous_response_id") or kept),
        inputs=inputs,
        outputs=[each if each.role != "" else Entry(role=AGENT, text=escape_surrogates(each.text)) for each in outputs],
    )


for _name, _shape in DIALECTS.items():
    register_format(_name, _shape, is_dialect(_name), session=session)(read)

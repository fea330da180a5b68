"""OpenAI's Responses API, with function tools, custom tools (their one argument is a text), and namespaces of both.

Chat templates know only functions. So the policy sees a custom tool as a function with one text argument, ``input``,
and a tool of a namespace under the name ``NAMESPACE__NAME``. The policy's calls are converted back with
`TurnRequest.call_forms`. A turn is sampled as a whole, so a stream sends each message, and the arguments of each call,
in one delta event.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draco_ray.rollout.endpoint import fields
from draco_ray.rollout.endpoint.chat_completions import error
from draco_ray.rollout.endpoint.turns import Conversations, Json, Refused, TurnReply, TurnRequest, arguments_json

__all__ = ["error", "events", "read", "reply"]

_KNOWN = {"input", "max_output_tokens", "instructions", "previous_response_id", "text"}
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "top_logprobs": (0,),
    "background": (False,),
    "truncation": ("disabled",),
}


def read(body: Any, stored: Conversations) -> TurnRequest:
    """Parse the body of a request.

    Args:
        stored: id of an earlier response -> the conversation up to it.

    Raises: Refused.
    """
    fields.check(body, _KNOWN, _NEUTRAL)
    if (fields.mapping(body, "text").get("format") or {"type": "text"}) != {"type": "text"}:
        raise fields.unsupported("text.format: only plain text is supported")
    if "message.output_text.logprobs" in fields.listed(body, "include"):
        raise fields.unsupported("include: log-probs are not supported here")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused("input: expected a text, or a list of at least one item")
    before: list[Mapping[str, Any]] = []
    if (previous := body.get("previous_response_id")) is not None:
        if not isinstance(previous, str) or previous not in stored:
            raise Refused(
                f"previous_response_id={fields.short(previous)}: not a response of this episode", 404, "not_found"
            )
        before = list(stored[previous])
    conversation = [*before, *_merged([_item(item, f"input[{index}]") for index, item in enumerate(items)])]
    instructions = fields.text(body.get("instructions") or "", "instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools: list[Json] = []
    forms: dict[str, Json] = {}
    for index, tool in enumerate(fields.listed(body, "tools")):
        for shown, form in _tools(tool, f"tools[{index}]"):
            tools.append(shown)
            forms[shown["function"]["name"]] = form
    return fields.turn_request(
        body,
        fields.one_system([*system, *conversation]),
        tools,
        max_tokens=fields.count(body, "max_output_tokens"),
        call_forms=forms,
        conversation=tuple(conversation),
    )


def reply(request: TurnRequest, turn: TurnReply) -> Json:
    """The body of the response: OpenAI's object ``response``."""
    cut = turn.finish_reason == "length"
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": request.model,
        "output": _output(request, turn),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in json.loads(request.tools)],
        "instructions": None,
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        },
    }


def events(request: TurnRequest, whole: Json) -> Iterator[Json | str]:
    """The reply ``whole`` as the data of server-sent events."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    several: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        empty, parts = _parts(item)
        at = {"output_index": index, "item_id": item["id"]}
        several += [
            {"type": "response.output_item.added", "output_index": index, "item": {**empty, "status": "in_progress"}},
            *({**part, **at} for part in parts),
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
    several.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(several):
        yield {**event, "sequence_number": number}


def _parts(item: Json) -> tuple[Json, list[Json]]:
    """An output item without its content, and the events that deliver the content."""
    if item["type"] == "message":
        (part,) = item["content"]
        at = {"content_index": 0}
        return {**item, "content": []}, [
            {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
            {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
    if item["type"] == "reasoning":
        return item, []
    custom = item["type"] == "custom_tool_call"
    field = "input" if custom else "arguments"
    kind = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
    return {**item, field: ""}, [
        {"type": f"{kind}.delta", "delta": item[field]},
        {"type": f"{kind}.done", "name": item["name"], field: item[field]},
    ]


def _output(request: TurnRequest, turn: TurnReply) -> list[Json]:
    items: list[Json] = []
    if turn.reasoning:
        thought = {"type": "reasoning_text", "text": turn.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [thought]})
    if turn.content or not turn.calls:
        part = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        items.append({**message, "status": "completed", "content": [part]})
    for each, made in turn.calls:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": each, "name": made.name}
        item |= {"status": "completed", **request.call_forms.get(made.name, {})}
        if item["type"] == "custom_tool_call":
            item["input"] = str(made.arguments.get("input", ""))
        else:
            item["arguments"] = arguments_json(made)
        items.append(item)
    return items


def _item(item: Any, where: str) -> Json:
    """An input item as a chat message; a reasoning item becomes an empty message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return fields.chat_message(item, where)
    if kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        arguments = {"input": fields.text(item.get("input"), f"{where}.input")} if custom else item.get("arguments")
        name = _joined(item.get("namespace"), fields.text(item.get("name"), f"{where}.name"))
        made = fields.parse_tool_call(item.get("call_id"), name, arguments, where)
        return {"role": "assistant", "content": "", "tool_calls": [made]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        identity = fields.text(item.get("call_id"), f"{where}.call_id")
        return {"role": "tool", "content": fields.content(item.get("output"), where), "tool_call_id": identity}
    if kind == "reasoning":
        return {"role": "assistant", "content": ""}
    raise fields.unsupported(f"{where}: an item of type {fields.short(kind)} is not supported here")


def _merged(items: Sequence[Json]) -> list[Json]:
    """The messages, with the items of each turn of the policy merged into one message."""
    messages: list[Json] = []
    for item in items:
        before = messages[-1] if messages else None
        if before is None or before["role"] != "assistant" or item["role"] != "assistant":
            messages.append(item)
            continue
        calls = [*before.get("tool_calls", ()), *item.get("tool_calls", ())]
        joined = "\n".join(filter(None, (before["content"], item["content"])))
        messages[-1] = {"role": "assistant", "content": joined, **({"tool_calls": calls} if calls else {})}
    return messages


def _tools(tool: Any, where: str, namespace: str | None = None) -> Iterator[tuple[Json, Json]]:
    """The functions of a tool, each with the fields of its call items that differ from a plain function call."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "namespace" and namespace is None:
        for index, each in enumerate(fields.listed(tool, "tools")):
            yield from _tools(each, f"{where}.tools[{index}]", fields.text(tool.get("name"), f"{where}.name"))
        return
    if kind not in ("function", "custom"):
        raise fields.unsupported(
            f"{where}: only tools of type function or custom, and namespaces of them, are supported"
        )
    name, parameters = fields.text(tool.get("name"), f"{where}.name"), tool.get("parameters")
    form: Json = {"name": name, "namespace": namespace} if namespace else {}
    description = tool.get("description")
    if kind == "custom":
        form |= {"type": "custom_tool_call"}
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        if isinstance(tool.get("format"), dict) and (grammar := tool["format"].get("definition")):
            description = f"{description or ''}\n\nThe input follows this grammar:\n{grammar}".strip()
    yield fields.function(_joined(namespace, name), description, parameters, where), form


def _joined(namespace: Any, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name

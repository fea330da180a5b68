"""OpenAI's chat completions. A turn is sampled as a whole, so a stream has one event for each of its parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draco_ray.rollout.endpoint import fields
from draco_ray.rollout.endpoint.turns import Conversations, Json, Refused, TurnReply, TurnRequest, arguments_json

_KNOWN = {"messages", "max_tokens", "max_completion_tokens", "stop"}
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
}


def read(body: Any, stored: Conversations) -> TurnRequest:
    """Parse the body of a request. Raises: Refused."""
    fields.check(body, _KNOWN, _NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: expected a list of at least one message")
    return fields.turn_request(
        body,
        [fields.chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        [_tool(each, f"tools[{index}]") for index, each in enumerate(fields.listed(body, "tools"))],
        max_tokens=fields.count(body, "max_completion_tokens") or fields.count(body, "max_tokens"),
        stop=fields.texts(body.get("stop"), "stop"),
        usage_in_stream=bool(fields.mapping(body, "stream_options").get("include_usage")),
    )


def reply(request: TurnRequest, turn: TurnReply) -> Json:
    """The body of the response: OpenAI's object ``chat.completion``."""
    message: Json = {"role": "assistant", "content": turn.content or None, "refusal": None}
    if turn.reasoning:
        message |= {"reasoning_content": turn.reasoning}
    if turn.calls:
        message |= {
            "tool_calls": [
                {"id": each, "type": "function", "function": {"name": call.name, "arguments": arguments_json(call)}}
                for each, call in turn.calls
            ]
        }
    elif not turn.content:
        message |= {"content": ""}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": None,
        "choices": [{"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
        },
    }


def events(request: TurnRequest, whole: Json) -> Iterator[Json | str]:
    """The reply ``whole`` as the data of server-sent events."""
    (choice,), usage = whole["choices"], whole["usage"]
    head = {**whole, "object": "chat.completion.chunk"}
    del head["usage"]
    message = {**choice["message"], "content": choice["message"]["content"] or ""}
    del message["refusal"]
    calls = message.pop("tool_calls", ())
    deltas: list[tuple[Json, str | None]] = [(message, None)]
    deltas += [({"tool_calls": [{"index": index, **call}]}, None) for index, call in enumerate(calls)]
    deltas.append(({}, choice["finish_reason"]))
    for delta, reason in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}
    if request.usage_in_stream:
        yield {**head, "choices": [], "usage": usage}
    yield "[DONE]"


def error(refused: Refused) -> Json:
    """The body of the response to a refused request, as OpenAI's APIs write it."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    told = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(told, dict) or tool.get("type") != "function":
        raise fields.unsupported(f"{where}: only tools of type function are supported")
    return fields.function(told.get("name"), told.get("description"), told.get("parameters"), where)

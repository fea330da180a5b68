"""Anthropic's Messages. A turn is sampled as a whole, so a stream has one delta for each content block."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draco_ray.rollout.endpoint import fields
from draco_ray.rollout.endpoint.turns import Conversations, Json, Refused, TurnReply, TurnRequest

_KNOWN = {"messages", "max_tokens", "system", "stop_sequences", "thinking", "output_config", "context_management"}
_KNOWN |= {"cache_control", "betas", "inference_geo", "speed", "diagnostics"}
_NEUTRAL: Mapping[str, Sequence[Any]] = {"mcp_servers": ([],), "container": ()}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}


def read(body: Any, stored: Conversations) -> TurnRequest:
    """Parse the body of a request. Raises: Refused."""
    fields.check(body, _KNOWN, _NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: expected a list of at least one message")
    if fields.mapping(body, "output_config").get("format") is not None:
        raise fields.unsupported("output_config.format: only plain text is supported")
    system = fields.content(body.get("system"), "system")
    conversation = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(messages):
        conversation += _messages(message, f"messages[{index}]")
    return fields.turn_request(
        body,
        fields.one_system(conversation),
        [_tool(each, f"tools[{index}]") for index, each in enumerate(fields.listed(body, "tools"))],
        max_tokens=fields.count(body, "max_tokens"),
        stop=fields.texts(body.get("stop_sequences"), "stop_sequences"),
        reasoning_shown=fields.mapping(body, "thinking").get("type") in ("enabled", "adaptive"),
    )


def reply(request: TurnRequest, turn: TurnReply) -> Json:
    """The response's body: a ``message`` object of Anthropic's API."""
    blocks: list[Json] = []
    if turn.reasoning and request.reasoning_shown:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": "unsigned"})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    blocks += [
        {"type": "tool_use", "id": each, "name": made.name, "input": dict(made.arguments)} for each, made in turn.calls
    ]
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": "stop_sequence" if turn.stopped_by else _STOP_REASONS[turn.finish_reason],
        "stop_sequence": turn.stopped_by or None,
        "usage": {
            "input_tokens": turn.prompt_tokens - turn.cached_tokens,
            "cache_read_input_tokens": turn.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": turn.completion_tokens,
        },
    }


def events(request: TurnRequest, whole: Json) -> Iterator[Json | str]:
    """The reply ``whole`` as the data of server-sent events."""
    ending = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**begun, "usage": {**whole["usage"], "output_tokens": 0}}}
    for index, block in enumerate(whole["content"]):
        empty: Json = {**block}
        if block["type"] == "text":
            deltas, empty["text"] = [{"type": "text_delta", "text": block["text"]}], ""
        elif block["type"] == "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            empty |= {"thinking": "", "signature": ""}
        else:
            deltas, empty["input"] = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}], {}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ending, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def error(refused: Refused) -> Json:
    """The body of the response to a refused request."""
    message = str(refused)
    if refused.code == "context_length_exceeded":
        # Clients recognize by these words that they have to compact the history.
        message = f"prompt is too long: {message}"
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def _messages(message: Any, where: str) -> Iterator[Json]:
    """A message as chat messages: each tool result becomes a message of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise Refused(f"{where}: expected an object with a role, one of user, assistant, system")
    blocks = message.get("content")
    if not isinstance(blocks, list):
        blocks = [{"type": "text", "text": fields.text(blocks, f"{where}.content")}]
    said: list[Any] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}.content[{index}]"
        if kind == "tool_result" and role == "user":
            if said:
                yield {"role": role, "content": fields.content(said, where)}
                said = []
            identity = fields.text(block.get("tool_use_id"), f"{at}.tool_use_id")
            yield {"role": "tool", "content": fields.content(block.get("content"), at), "tool_call_id": identity}
        elif kind == "tool_use" and role == "assistant":
            calls.append(fields.parse_tool_call(block.get("id"), block.get("name"), block.get("input"), at))
        elif kind not in ("thinking", "redacted_thinking"):
            said.append(block)
    if role == "assistant":
        yield {"role": role, "content": fields.content(said, where), **({"tool_calls": calls} if calls else {})}
    elif said:
        yield {"role": role, "content": fields.content(said, where)}


def _tool(tool: Any, where: str) -> Json:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = fields.short(tool.get("type") if isinstance(tool, dict) else tool)
        raise fields.unsupported(f"{where}: a tool of type {kind}: only tools with an input_schema are supported")
    return fields.function(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)

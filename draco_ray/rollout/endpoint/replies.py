"""The policy's turn as OpenAI's APIs give it: whole, or as the events of a stream.

A turn is sampled as a whole, so a stream has one event for each of its parts.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from draco_ray.engine.sampler import Sample
from draco_ray.rollout.endpoint.turns import Answer, Ask, TokenAsk

Json = dict[str, Any]


def chat_completion(ask: Ask, answer: Answer) -> Json:
    """The object ``chat.completion``."""
    message: Json = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning}
    if answer.calls:
        message |= {"tool_calls": _chat_calls(answer)}
    elif not answer.content:
        message |= {"content": ""}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    return {**_chat_head(ask, "chat.completion"), "choices": [choice], "usage": _chat_usage(answer)}


def chat_events(ask: Ask, answer: Answer) -> Iterator[str]:
    """The same as server-sent events."""
    head = _chat_head(ask, "chat.completion.chunk")
    said: Json = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        said |= {"reasoning_content": answer.reasoning}
    deltas: list[tuple[Json, str | None]] = [(said, None)]
    deltas += [({"tool_calls": [{"index": index, **call}]}, None) for index, call in enumerate(_chat_calls(answer))]
    deltas.append(({}, answer.finish_reason))
    for delta, reason in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    if ask.usage_in_stream:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _chat_usage(answer)})}\n\n"
    yield "data: [DONE]\n\n"


def generated(ask: TokenAsk, sample: Sample) -> Json:
    """What vLLM's ``/inference/v1/generate`` answers."""
    said: list[Json] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": sample.token_ids,
        "logprobs": {"content": said},
        "finish_reason": sample.finish_reason,
    }
    return {"request_id": ask.request_id or f"gen-{secrets.token_hex(16)}", "choices": [choice]}


def response(ask: Ask, answer: Answer) -> Json:
    """The object ``response``."""
    cut = answer.finish_reason == "length"
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": time.time(),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": ask.model,
        "output": _output(answer),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in json.loads(ask.tools)],
        "instructions": None,
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def response_events(whole: Json) -> Iterator[str]:
    """``whole``, an object ``response``, as server-sent events."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        open_item = {**item, "status": "in_progress"}
        if item["type"] == "message":
            part = item["content"][0]
            events += [
                {"type": "response.output_item.added", "output_index": index, "item": {**open_item, "content": []}},
                {"type": "response.content_part.added", **at, "content_index": 0, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **at, "content_index": 0, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **at, "content_index": 0, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
            ]
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            events += [
                {"type": "response.output_item.added", "output_index": index, "item": {**open_item, "arguments": ""}},
                {"type": "response.function_call_arguments.delta", **at, "delta": arguments},
                {
                    "type": "response.function_call_arguments.done",
                    **at,
                    "name": item["name"],
                    "arguments": arguments,
                },
            ]
        else:
            events.append({"type": "response.output_item.added", "output_index": index, "item": open_item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"


def _chat_head(ask: Ask, kind: str) -> Json:
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    return {**head, "model": ask.model, "system_fingerprint": None}


def _chat_calls(answer: Answer) -> list[Json]:
    return [
        {"id": each, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
        for each, call in answer.calls
    ]


def _chat_usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _output(answer: Answer) -> list[Json]:
    items: list[Json] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [thought]})
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        items.append({**message, "status": "completed", "content": [part]})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": each,
            "name": call.name,
            "arguments": _arguments(call.arguments),
            "status": "completed",
        }
        for each, call in answer.calls
    ]
    return items


def _arguments(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)

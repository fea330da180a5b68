"""Streamed answers: reassemble the events of any provider's API into one answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.traces.entry import AGENT, decode_if_json, object_of, text_of

RESPONSE = {"choices", "candidates", "role", "object", "stopReason", "usage", "done"}
"""Every response of a provider's API has at least one of these fields."""
Events = Sequence[Mapping[str, Any]]


def parse_sse(text: str) -> list[Any]:
    """The JSON values of server-sent events (``data: {...}`` lines); empty if the text is something else."""
    if not text.lstrip().startswith(("data:", "event:", ": ")):
        return []
    found = []
    # Not splitlines: it also splits at characters that JSON strings may contain, such as U+2028.
    for line in text.replace("\r", "\n").split("\n"):
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            try:
                found.append(json.loads(data))
            except (ValueError, RecursionError):
                return []
    return found


def reassemble_stream(reply: Any) -> Any:
    """An answer, reassembled if it was streamed (a list of events, or the text of server-sent events), and decoded if
    it is the JSON text of a response."""
    value = decode_if_json(reply)
    first = value[0] if isinstance(value, list) and value else value
    # If the model's answer itself is JSON, it stays text.
    reply = value if isinstance(first, Mapping) and first.keys() & RESPONSE else reply
    events = parse_sse(reply) if isinstance(reply, str) else reply
    if not isinstance(events, list) or not events or not all(isinstance(each, Mapping) for each in events):
        return reply
    if all("choices" in each or ("done" in each and each.keys() & {"message", "response"}) for each in events):
        return _chat(events)
    if all("candidates" in each for each in events):
        return _gemini(events)
    type_ = str(events[0].get("type"))
    return (
        _responses(events)
        if type_.startswith("response.")
        else _anthropic(events)
        if type_ == "message_start"
        else reply
    )


def _chat(chunks: Events) -> dict[str, Any]:
    """Join chunks of OpenAI's chat completions, or of Ollama's API, whose chunks have no ``choices``."""
    said = dict.fromkeys(("content", "reasoning_content", "reasoning", "thinking", "refusal"), "")
    calls: dict[int, dict[str, str]] = {}
    latest: dict[int, int] = {}
    listed = [chunk.get("choices", [chunk]) or () for chunk in chunks]
    choices = [each for several in listed for each in several if isinstance(each, Mapping)]
    first = min((choice.get("index") or 0 for choice in choices), default=0)
    for choice in choices:
        # A request may ask for several answers (n > 1): read the first.
        if (choice.get("index") or 0) == first:
            delta = object_of(choice, "delta") or object_of(choice, "message") or choice
            for name in said:
                said[name] += text_of(delta, *((name, "response", "text") if name == "content" else (name,)))
            older = [{"index": 0, "function": delta["function_call"]}] if delta.get("function_call") else ()
            for call in delta.get("tool_calls") or older:
                function = call.get("function") or {}
                index = call.get("index", len(calls))
                place = latest.get(index, index)
                another = place in calls and text_of(call, "id") not in ("", calls[place]["id"])
                if another and text_of(function, "name"):
                    # Some providers give every call the index 0: a new id and a name begin another call. Others give
                    # each piece of one call a new id, but no name.
                    place = len(calls)
                latest[index] = place
                known = calls.setdefault(place, {"id": "", "name": "", "arguments": ""})
                if isinstance(function.get("arguments"), Mapping):
                    function = {**function, "arguments": json.dumps(function["arguments"])}
                known["id"] = known["id"] or text_of(call, "id")
                known["name"] += text_of(function, "name")
                known["arguments"] += text_of(function, "arguments")
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    return {"role": AGENT, **said, "tool_calls": [calls[index] for index in sorted(calls)], "usage": usage}


def _responses(events: Events) -> Mapping[str, Any]:
    """Join events of OpenAI's Responses API: the final response, or else the finished items."""
    last = next((object_of(each, "response") for each in reversed(events) if "response" in each), {})
    done = [each["item"] for each in events if each.get("type") == "response.output_item.done" and "item" in each]
    return last if last.get("output") else {**last, "output": done}


def _anthropic(events: Events) -> dict[str, Any]:
    """Join events of Anthropic's Messages API."""
    message = dict(object_of(events[0], "message"))
    blocks: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event.get("type") == "content_block_start":
            blocks[event.get("index")] = dict(object_of(event, "content_block"))
        block = blocks.get(event.get("index"), {})
        for name, value in object_of(event, "delta").items():
            name = "input" if name == "partial_json" else name
            if name != "type" and isinstance(value, str):
                block[name] = (block[name] if isinstance(block.get(name), str) else "") + value
        message["usage"] = event.get("usage") or message.get("usage")
    return {**message, "role": AGENT, "content": list(blocks.values())}


def _gemini(chunks: Events) -> dict[str, Any]:
    """Join chunks of Gemini's streamed answers."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        for candidate in [each for each in chunk["candidates"] or () if isinstance(each, Mapping)][:1]:
            for part in object_of(candidate, "content").get("parts") or ():
                same = parts and text_of(part, "text") and text_of(parts[-1], "text")
                if same and part.get("thought") == parts[-1].get("thought"):
                    parts[-1]["text"] += part["text"]
                else:
                    parts.append(dict(part))
    return {"role": "model", "parts": parts}

"""Requests, read: OpenAI's chat completions and responses to one form, and vLLM's for tokens.

How a turn is sampled is the run's business (``engine.temperature`` and its like), or the recorded log-probs would be of
another policy: what a request says of that is passed over. What would change the meaning of an answer and cannot be had
is refused, and so is what is not known.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.rollout.endpoint.turns import Ask, Refused, TokenAsk

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"}
_SAMPLING |= {"repetition_penalty", "reasoning_effort", "reasoning", "verbosity", "logprobs", "top_logprobs"}
_BOOKS = {"metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include", "background"}
_BOOKS |= {"prompt_cache_retention", "prompt_cache_options", "truncation", "parallel_tool_calls", "tool_choice"}
_CHAT = {"messages", "model", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"}
_RESPONSES = {"input", "model", "tools", "max_output_tokens", "stream", "stream_options", "instructions"}
_RESPONSES |= {"previous_response_id", "text"}
# Parameter -> the values with which it asks for nothing special.
_ONLY: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "background": (False,),
    "truncation": ("disabled",),
}
_GENERATE = {"token_ids", "sampling_params", "model", "request_id", "stream", "priority", "cache_salt"}
_GENERATE |= {"return_token_ids", "output_mode"}
_TOKEN_SAMPLING = {"max_tokens", "stop_token_ids", "detokenize", "skip_special_tokens", "output_kind"}
_TOKEN_SAMPLING |= {"spaces_between_special_tokens", "include_stop_str_in_output", "stop", "prompt_logprobs"}
_TOKEN_SAMPLING |= {"logprobs", "flat_logprobs", *_SAMPLING}
# From where on a mixture's routes are told, which are not told here: verifiers' client says it in every later turn.
_TOKEN_SAMPLING |= {"routed_experts_prompt_start"}
_ONLY_TOKENS: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "stop": ([], ""),
    "prompt_logprobs": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stream": (False,),
    "output_mode": ("tokens",),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_chat(body: Any) -> Ask:
    """A chat completion's request. Raises: Refused."""
    _check(body, _CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: expected a list of at least one message")
    options = body.get("stream_options") or {}
    return Ask(
        messages=tuple(
            by_call([_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)])
        ),
        tools=_tools([_chat_tool(each, f"tools[{index}]") for index, each in enumerate(_listed(body, "tools"))], body),
        max_tokens=_count(body, "max_completion_tokens") or _count(body, "max_tokens"),
        stop=_stop(body.get("stop")),
        stream=_flag(body, "stream"),
        usage_in_stream=isinstance(options, dict) and bool(options.get("include_usage")),
        model=_text(body.get("model") or "policy", "model"),
        side_call=_side_call(body),
    )


def read_responses(body: Any, stored: Mapping[str, Sequence[Mapping[str, Any]]]) -> Ask:
    """A response's request.

    Args:
        stored: id of an earlier response -> the conversation up to it.

    Raises: Refused.
    """
    _check(body, _RESPONSES)
    form = body.get("text") or {}
    if not isinstance(form, dict) or (form.get("format") or {"type": "text"}) != {"type": "text"}:
        raise Refused("text.format: only plain text can be had", code="unsupported_parameter")
    if "message.output_text.logprobs" in _listed(body, "include"):
        raise Refused("include: log-probs are not supported here", code="unsupported_parameter")
    said = body.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list) or not items:
        raise Refused("input: expected a text, or a list of at least one item")
    before: list[Mapping[str, Any]] = []
    if (previous := body.get("previous_response_id")) is not None:
        if not isinstance(previous, str) or previous not in stored:
            raise Refused(f"previous_response_id={_short(previous)}: not of this episode", 404, "not_found")
        before = list(stored[previous])
    instructions = _text(body.get("instructions") or "", "instructions")
    if instructions:
        before.insert(0, {"role": "system", "content": instructions})
    messages = [*before, *_merged([_item(item, f"input[{index}]") for index, item in enumerate(items)])]
    return Ask(
        messages=tuple(by_call(messages)),
        tools=_tools([_response_tool(each, f"tools[{i}]") for i, each in enumerate(_listed(body, "tools"))], body),
        max_tokens=_count(body, "max_output_tokens"),
        stream=_flag(body, "stream"),
        model=_text(body.get("model") or "policy", "model"),
        side_call=_side_call(body),
        instructed=bool(instructions),
    )


def _side_call(body: Mapping[str, Any]) -> bool:
    metadata = body.get("metadata")
    return isinstance(metadata, dict) and bool(metadata.get("side_call"))


def read_generate(body: Any) -> TokenAsk:
    """A request of vLLM's ``/inference/v1/generate``. Raises: Refused."""
    _check(body, _GENERATE, _ONLY_TOKENS)
    parameters = body.get("sampling_params") or {}
    _check(parameters, _TOKEN_SAMPLING, _ONLY_TOKENS)
    return TokenAsk(
        token_ids=_token_ids(body, "token_ids"),
        max_tokens=_count(parameters, "max_tokens"),
        stop_token_ids=frozenset(_token_ids(parameters, "stop_token_ids") if parameters.get("stop_token_ids") else ()),
        request_id=_text(body.get("request_id") or "", "request_id"),
    )


def _token_ids(body: Mapping[str, Any], name: str) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise Refused(f"{name}: expected a list of at least one token id")
    return ids


def finite(number: str) -> float:
    """A number of JSON. Raises: ValueError for NaN and infinities, which Python reads and no answer could repeat."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:20]} is no number that can be had")
    return value


def clean(value: Any) -> Any:
    """A JSON value whose texts can be encoded: a lone surrogate could not be put into tokens."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [clean(each) for each in value]
    if isinstance(value, dict):
        return {clean(key): clean(each) for key, each in value.items()}
    return value


def _check(body: Any, known: set[str], only: Mapping[str, Sequence[Any]] | None = None) -> None:
    if not isinstance(body, dict):
        raise Refused("expected a JSON object")
    known, only = (known | _SAMPLING | _BOOKS, _ONLY) if only is None else (known, only)
    for name, value in body.items():
        if value is None:
            continue
        if name in only and value not in only[name]:
            expected = " or ".join(json.dumps(each) for each in only[name])
            raise Refused(
                f"{name}={_short(value)}: not supported here; expected {expected}", 400, "unsupported_parameter"
            )
        if name not in known | only.keys():
            raise Refused(f"{_short(name)[1:-1]}: not a parameter that is supported here", 400, "unsupported_parameter")


def _chat_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refused(f"{where}: expected an object with a role, one of {', '.join(_ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), where)}
    if role == "assistant" and message.get("function_call"):
        raise Refused(f"{where}.function_call: not supported here; expected tool_calls", 400, "unsupported_parameter")
    if role == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise Refused(f"{where}.tool_calls: expected a list")
        read["tool_calls"] = [_chat_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if role == "tool":
        read["tool_call_id"] = _text(message.get("tool_call_id"), f"{where}.tool_call_id")
    return read


def _chat_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Refused(f"{where}: expected a call of a function")
    return _call(call.get("id"), function.get("name"), function.get("arguments"), where)


def _call(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    return {
        "id": _text(identity, f"{where}.id"),
        "type": "function",
        "function": {"name": _text(name, f"{where}.name"), "arguments": _arguments(arguments, where)},
    }


def _arguments(arguments: Any, where: str) -> Any:
    """The arguments as an object, which is what chat templates take; a text that is none stays."""
    text = _text("{}" if arguments is None else arguments, f"{where}.arguments")
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return clean(read) if isinstance(read, dict) else text


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return _text(content or "", where)
    if not isinstance(content, list):
        raise Refused(f"{where}.content: expected a text, or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise Refused(
                f"{where}.content: a part of type {_short(kind)}: only texts are supported",
                400,
                "unsupported_parameter",
            )
        texts.append(_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}.content"))
    return "\n".join(texts)


def _item(item: Any, where: str) -> dict[str, Any]:
    """An item of a response's input as a chat message; one of reasoning is empty."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return _chat_message(item, where)
    if kind == "function_call":
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), where)
        return {"role": "tool", "content": content, "tool_call_id": _text(item.get("call_id"), f"{where}.call_id")}
    if kind == "reasoning":
        return {"role": "assistant", "content": ""}
    raise Refused(f"{where}: an item of type {_short(kind)} is not supported here", 400, "unsupported_parameter")


def _merged(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A turn of the policy comes back as several items; here it is one message again."""
    messages: list[dict[str, Any]] = []
    for item in items:
        before = messages[-1] if messages else None
        if before is None or before["role"] != "assistant" or item["role"] != "assistant":
            messages.append(item)
            continue
        calls = [*before.get("tool_calls", ()), *item.get("tool_calls", ())]
        content = "\n".join(filter(None, (before["content"], item["content"])))
        messages[-1] = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return messages


def by_call(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with results of tools in the order of the calls that they name, by which templates tell them.

    Agents that make calls side by side send results in the order in which these came.
    """
    found: list[Mapping[str, Any]] = []
    for answers, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        several = list(group)
        calls = found[-1].get("tool_calls", ()) if answers and found else ()
        places = {call.get("id"): place for place, call in enumerate(calls)}
        if all(message.get("tool_call_id") in places for message in several):
            several.sort(key=lambda message: places[message.get("tool_call_id")])
        found += several
    return found


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise Refused(f"{where}: only tools of type function are supported", 400, "unsupported_parameter")
    return _function(function, where)


def _response_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refused(f"{where}: only tools of type function are supported", 400, "unsupported_parameter")
    return _function(tool, where)


def _function(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise Refused(f"{where}.parameters: expected a JSON schema")
    told = {
        "name": _text(function.get("name"), f"{where}.name"),
        "description": _text(function.get("description") or "", f"{where}.description"),
        "parameters": parameters,
    }
    return {"type": "function", "function": told}


def _tools(tools: Sequence[dict[str, Any]], body: Mapping[str, Any]) -> str:
    """The tools as the policy is shown them; with ``tool_choice: none`` not at all. Any other choice is its own."""
    return "[]" if body.get("tool_choice") == "none" else json.dumps(tools, ensure_ascii=False)


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise Refused("stop: expected a text, or a list of texts")
    return tuple(filter(None, texts))


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise Refused(f"{name}: expected a list")
    return value


def _count(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Refused(f"{name}={_short(value)}: expected a whole number of at least 1")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise Refused(f"{name}={_short(value)}: expected true or false")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{where}: expected a text, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:80]

"""Checks shared by the dialects: fields of a request, texts, calls and function schemas. Errors are one-line `Refused`.

Sampling parameters of a request are ignored: the run sets them (``engine.temperature`` etc.), because otherwise the
recorded log-probs would belong to another policy. Unknown parameters are refused, and so are unsupported ones that
would change the meaning of the answer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.rollout.endpoint.turns import Refused, TurnRequest

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"}
_SAMPLING |= {"repetition_penalty", "reasoning_effort", "reasoning", "verbosity", "logprobs", "top_logprobs"}
_IGNORED = {"metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include"}
_IGNORED |= {"prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "tool_choice", "client_metadata"}
_COMMON = {"model", "tools", "stream", "stream_options", *_SAMPLING, *_IGNORED}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check(body: Any, known: set[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Check the names of a request's parameters.

    Args:
        neutral: parameter -> the values that ask for nothing special; other values are refused.

    Raises: Refused.
    """
    if not isinstance(body, dict):
        raise Refused("the request's body: expected a JSON object")
    for name, value in body.items():
        if value is None:
            continue
        if name in neutral and value not in neutral[name]:
            expected = " or ".join(json.dumps(each) for each in neutral[name])
            raise unsupported(f"{name}={short(value)}: not supported here; expected {expected}")
        if name not in known | _COMMON | neutral.keys():
            raise unsupported(f"{short(name)[1:-1]}: not a parameter that is supported here")


def turn_request(
    body: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    **fields: Any,
) -> TurnRequest:
    """A request with the fields that all dialects share. Raises: Refused."""
    metadata, choice = body.get("metadata"), body.get("tool_choice")
    # Other values of tool_choice are ignored: they would change the distribution that the policy is trained on.
    hidden = choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")
    return TurnRequest(
        messages=tuple(sort_tool_results(messages)),
        tools="[]" if hidden else json.dumps(tools, ensure_ascii=False),
        stream=flag(body, "stream"),
        model=text(body.get("model") or "policy", "model"),
        side_call=isinstance(metadata, dict) and bool(metadata.get("side_call")),
        **fields,
    )


def unsupported(message: str) -> Refused:
    """The refusal of a feature that OpenAI's or Anthropic's API has and this endpoint lacks."""
    return Refused(message, 400, "unsupported_parameter")


def finite(number: str) -> float:
    """A JSON number. Raises: ValueError for NaN and infinities, which Python parses but JSON answers cannot hold."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:20]} is not a finite number")
    return value


def replace_surrogates(value: Any) -> Any:
    """The JSON value with lone surrogates replaced in its texts, because they cannot be encoded or tokenized."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(each) for key, each in value.items()}
    return value


def chat_message(message: Any, where: str) -> dict[str, Any]:
    """A message in OpenAI's form, checked. Raises: Refused."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refused(f"{where}: expected an object with a role, one of {', '.join(_ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": content(message.get("content"), where)}
    if role == "assistant" and message.get("function_call"):
        raise unsupported(f"{where}.function_call: not supported here; expected tool_calls")
    if role == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise Refused(f"{where}.tool_calls: expected a list")
        read["tool_calls"] = [_chat_call(each, f"{where}.tool_calls[{index}]") for index, each in enumerate(calls)]
    if role == "tool":
        read["tool_call_id"] = text(message.get("tool_call_id"), f"{where}.tool_call_id")
    return read


def _chat_call(item: Any, where: str) -> dict[str, Any]:
    called = item.get("function") if isinstance(item, dict) else None
    if not isinstance(called, dict) or item.get("type", "function") != "function":
        raise Refused(f"{where}: expected a call of a function")
    return parse_tool_call(item.get("id"), called.get("name"), called.get("arguments"), where)


def parse_tool_call(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A tool call; its arguments are parsed into an object, as chat templates expect, or stay text if that fails."""
    if not isinstance(arguments, dict):
        written = text("{}" if arguments is None else arguments, f"{where}.arguments")
        try:
            read = json.loads(written or "{}")
        except (ValueError, RecursionError):
            read = None
        arguments = replace_surrogates(read) if isinstance(read, dict) else written
    return {
        "id": text(identity, f"{where}.id"),
        "type": "function",
        "function": {"name": text(name, f"{where}.name"), "arguments": arguments},
    }


def content(value: Any, where: str) -> str:
    """The text of a message's content, its parts joined by line breaks. Raises: Refused if a part is not text."""
    if value is None or isinstance(value, str):
        return text(value or "", where)
    if not isinstance(value, list):
        raise Refused(f"{where}.content: expected a text, or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported(f"{where}.content: a part of type {short(kind)}: only texts are supported")
        texts.append(text(part.get("refusal" if kind == "refusal" else "text"), f"{where}.content"))
    return "\n".join(texts)


def sort_tool_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with tool results sorted into the order of their calls, which chat templates rely on.

    Agents that run parallel calls send the results in the order in which the calls finished.
    """
    found: list[Mapping[str, Any]] = []
    for answers, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        several = list(group)
        calls = found[-1].get("tool_calls", ()) if answers and found else ()
        places = {each.get("id"): place for place, each in enumerate(calls)}
        if all(message.get("tool_call_id") in places for message in several):
            several.sort(key=lambda message: places[message.get("tool_call_id")])
        found += several
    return found


def one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with at most one system message, at the beginning, because many chat templates refuse others.

    Leading system messages are joined; a later system message becomes a user message.
    """
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    joined = "\n\n".join(message["content"] for message in leading)
    rest = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages[len(leading) :]]
    return [{"role": "system", "content": joined}, *rest] if leading else rest


def function(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A function tool in the form that chat templates expect. Raises: Refused."""
    parameters = parameters or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise Refused(f"{where}.parameters: expected a JSON schema")
    told = {
        "name": text(name, f"{where}.name"),
        "description": text(description or "", f"{where}.description"),
        "parameters": parameters,
    }
    return {"type": "function", "function": told}


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A text or a list of texts, without empty ones. Raises: Refused."""
    several = [value] if isinstance(value, str) else value or []
    if not isinstance(several, list) or not all(isinstance(each, str) for each in several):
        raise Refused(f"{name}: expected a text, or a list of texts")
    return tuple(filter(None, several))


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """A field that is a list; empty if missing. Raises: Refused."""
    value = body.get(name) or []
    if not isinstance(value, list):
        raise Refused(f"{name}: expected a list")
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object; empty if missing. Raises: Refused."""
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise Refused(f"{name}: expected an object")
    return value


def count(body: Mapping[str, Any], name: str) -> int | None:
    """A field that is a whole number of at least 1; None if missing. Raises: Refused."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Refused(f"{name}={short(value)}: expected a whole number of at least 1")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false if missing. Raises: Refused."""
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise Refused(f"{name}={short(value)}: expected true or false")
    return value


def text(value: Any, where: str) -> str:
    """The value, which has to be a text. Raises: Refused."""
    if not isinstance(value, str):
        raise Refused(f"{where}: expected a text, got {short(value)}")
    return value


def short(value: Any) -> str:
    """A value as JSON for an error message, truncated to 80 characters."""
    return json.dumps(value, ensure_ascii=False, default=str)[:80]

"""Conversations and tool calls written as text: output of chat templates, and calls and results in tags.

==========================  ===========================================================================================
ChatML (Qwen, Hermes)       ``<|im_start|>user\\n...<|im_end|>``
Llama 3                     ``<|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>``
calls (Hermes, Qwen)        ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``
calls (Llama 3)             ``<|python_tag|>{"name": ..., "parameters": ...}``
calls (Mistral, Granite)    ``[TOOL_CALLS][{...}, ...]``, ``[TOOL_CALLS]NAME[ARGS]{...}``, ``<|tool_call|>[{...}]``
calls (Qwen 3 Coder)        ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
results                     ``<tool_response>...</tool_response>``
messages (gpt-oss)          ``<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>``
==========================  ===========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from draco_ray.traces.entry import AGENT, Entry, ToolCall, decode_if_json, first_of, text_of, wrap_thinking

_TEMPLATES = tuple(
    re.compile(rf"{start}([\w-]+){head}(.*?)(?:{end}|(?={start})|\Z)", re.DOTALL)
    for start, head, end in (
        (r"<\|im_start\|>", r"\n", r"<\|im_end\|>"),
        (r"<\|start_header_id\|>", r"<\|end_header_id\|>\n*", r"<\|e(?:ot|om)_id\|>"),
    )
)
_OPENED, _CLOSED = (
    rf"(?:<\|?{slash}(?:tool_?calls?|TOOLCALL|python_tag)\|?>|\[{slash}TOOL_CALLS\])" for slash in ("", "/")
)
_CALL = re.compile(rf"{_OPENED}\s*(.*?)\s*(?:{_CLOSED}|</s>|<\|e(?:ot|om)_id\|>|(?={_OPENED})|\Z)", re.DOTALL)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
# A header has at most two more tags. Without this bound, many tags without a message would take quadratic time.
_CHANNEL = re.compile(
    r"<\|(?:start|channel)\|>([^<]*(?:<\|(?:channel|constrain)\|>[^<]*){0,2})<\|message\|>"
    r"(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


def parse_chat_template(text: str) -> list[dict[str, str]]:
    """The messages in the output of a chat template; empty if the template is unknown."""
    for template in _TEMPLATES:
        if found := template.findall(text):
            messages = [{"role": role, "content": said.strip("\n")} for role, said in found]
            # A prompt ends with the header of the model's turn: drop this empty message.
            return [each for each in messages if each["content"].strip() or each["role"] != AGENT]
    return []


def parse_tagged_calls(entry: Entry) -> Iterator[Entry]:
    """Parse the tags in an entry's text.

    Tool calls in an agent's text become calls of the entry. Each tool result in another speaker's text becomes an entry
    of its own. An entry without such tags is returned unchanged.
    """
    if entry.role == AGENT and not entry.calls and entry.text.startswith(("<|channel|>", "<|start|>")):
        yield _channels(entry)
    elif entry.role == AGENT and not entry.calls and _CALL.search(entry.text):
        thought, end, said = entry.text.rpartition("</think>")
        calls = tuple(call for block in _CALL.findall(said) for call in _calls(block))
        # Keep tagged blocks that are not calls in the text.
        rest = _CALL.sub(lambda found: "" if _calls(found[1]) else found[0], said).strip() if calls else said
        yield replace(entry, text=f"{thought}{end}{rest}", calls=calls)
    elif entry.role in ("user", "tool") and (results := _RESULT.findall(entry.text)):
        yield from (replace(entry, role="tool", text=result) for result in results)
        if rest := _RESULT.sub("", entry.text).strip():
            yield replace(entry, role="user", text=rest)
    else:
        yield entry


def _channels(entry: Entry) -> Entry:
    """An answer of gpt-oss: reasoning, text and calls are messages in channels."""
    texts, calls = [_CHANNEL.sub("", entry.text).strip()], list[ToolCall]()
    for head, body in _CHANNEL.findall(entry.text):
        recipient = _RECIPIENT.search(head)
        if recipient and recipient[1] != AGENT:
            calls.append(ToolCall(name=recipient[1], arguments=body))
        else:
            texts.append(wrap_thinking(body) if "analysis" in head else body)
    return replace(entry, text="\n".join(filter(None, texts)), calls=tuple(calls))


def _calls(block: str) -> list[ToolCall]:
    """The calls in the content of a tag; empty if the content is not a call and stays text."""
    if found := _FUNCTION.search(block):
        return [ToolCall(name=found[1], arguments=dict(_PARAMETER.findall(found[2])))]
    if named := _NAMED.fullmatch(block):
        arguments = decode_if_json(named[2])
        return [ToolCall(name=named[1], arguments=arguments)] if isinstance(arguments, Mapping) else []
    listed = decode_if_json(block)
    calls: list[ToolCall] = []
    for each in listed if isinstance(listed, list) else [listed]:
        called = each.get("function", each) if isinstance(each, Mapping) else None
        if isinstance(called, Mapping) and (name := text_of(called, "name")):
            calls.append(ToolCall(name=name, arguments=first_of(called, "arguments", "parameters")))
    return calls

"""Conversations and tool calls written as text: output of chat templates, and calls and results in tags.

==========================  ===========================================================================================
ChatML (Qwen, Hermes)       ``<|im_start|>user\\n...<|im_end|>``
Llama 3                     ``<|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>``
calls (Hermes, Qwen)        ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``
calls (Qwen 3 Coder)        ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
results                     ``<tool_response>...</tool_response>``
==========================  ===========================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from draco_ray.traces.entry import AGENT, Call, Entry, text_of

_TEMPLATES = tuple(
    re.compile(rf"{start}([\w-]+){head}(.*?)(?:{end}|(?={start})|\Z)", re.DOTALL)
    for start, head, end in (
        (r"<\|im_start\|>", r"\n", r"<\|im_end\|>"),
        (r"<\|start_header_id\|>", r"<\|end_header_id\|>\n*", r"<\|e(?:ot|om)_id\|>"),
    )
)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


def templated(text: str) -> list[dict[str, str]]:
    """The messages in the output of a chat template; empty if the template is unknown."""
    for template in _TEMPLATES:
        if found := template.findall(text):
            messages = [{"role": role, "content": said.strip("\n")} for role, said in found]
            # The prompt of a request ends where the model's answer begins.
            return [each for each in messages if each["content"].strip() or each["role"] != AGENT]
    return []


def tagged(entry: Entry) -> Iterator[Entry]:
    """An entry whose text is parsed for tagged tool calls, or split into tagged results as separate entries."""
    if entry.role == AGENT and not entry.calls and "<tool_call>" in entry.text:
        thought, end, said = entry.text.rpartition("</think>")
        calls = tuple(call for block in _CALL.findall(said) if (call := _call(block)) is not None)
        rest = _CALL.sub("", said).strip() if calls else said
        yield replace(entry, text=f"{thought}{end}{rest}", calls=calls)
    elif entry.role in ("user", "tool") and (results := _RESULT.findall(entry.text)):
        yield from (replace(entry, role="tool", text=result) for result in results)
        if rest := _RESULT.sub("", entry.text).strip():
            yield replace(entry, role="user", text=rest)
    else:
        yield entry


def _call(block: str) -> Call | None:
    """The call in a tag; None if the content is no call and stays text."""
    if found := _FUNCTION.search(block):
        return Call(name=found[1], arguments=dict(_PARAMETER.findall(found[2])))
    try:
        called = json.loads(block)
    except (ValueError, RecursionError):
        return None
    called = called.get("function", called) if isinstance(called, Mapping) else None
    if not isinstance(called, Mapping) or not text_of(called, "name"):
        return None
    return Call(name=text_of(called, "name"), arguments=called.get("arguments", called.get("parameters")))

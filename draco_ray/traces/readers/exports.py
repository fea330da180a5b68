"""Exports of a person's own conversations: ChatGPT and Claude.ai (``conversations.json``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from draco_ray.traces.entry import AGENT, object_of, text_of
from draco_ray.traces.formats import ReadOptions, build_trace, get_field, register_format
from draco_ray.traces.messages import entries
from draco_ray.traces.model import Trace
from draco_ray.traces.parts import parts


def is_export(record: object) -> bool:
    """Whether the record is a conversation that ChatGPT or Claude.ai exported."""
    tree = isinstance(get_field(record, "mapping"), Mapping) and get_field(record, "current_node") is not None
    return tree or isinstance(get_field(record, "chat_messages"), list)


@register_format(
    "chat-export",
    'a conversation of ChatGPT ("mapping", "current_node") or Claude.ai ("chat_messages")',
    is_export,
    metered=False,
)
def read(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of the conversation's current branch. Raises: BadTrace if it has no answer of the assistant."""
    if "mapping" in record:
        nodes = _branch(record["mapping"], record["current_node"], "parent")
        messages = _joined(_of_chatgpt(node["message"]) for node in nodes if node.get("message"))
    else:
        said = {str(each["uuid"]): each for each in record["chat_messages"]}
        last = record.get("current_leaf_message_uuid") or next(reversed(said), "")
        linked = any(each.get("parent_message_uuid") for each in said.values())
        nodes = _branch(said, last, "parent_message_uuid") if linked else list(said.values())
        messages = [_of_claude(each) for each in nodes]
    # ``item``: in the exports, a turn may be several messages, e.g. reasoning and the call that follows it.
    yield build_trace([replace(each, item=True) for each in entries(messages)], record, reading)


def _branch(nodes: Mapping[str, Any], leaf: object, parent: str) -> list[Mapping[str, Any]]:
    """The nodes from the root to a leaf."""
    found: dict[str, Mapping[str, Any]] = {}
    while isinstance(leaf, str) and leaf in nodes and leaf not in found:
        found[leaf] = nodes[leaf]
        leaf = nodes[leaf].get(parent)
    return list(reversed(found.values()))


def _of_chatgpt(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of ChatGPT in OpenAI's form. A message whose recipient is not ``all`` is a tool call."""
    content, author = object_of(message, "content"), object_of(message, "author")
    type_, tool = text_of(content, "content_type"), text_of(message, "recipient")
    said = content.get("parts") or text_of(content, "text", "result", "content") or [{**content, "type": type_}]
    if type_ == "thoughts":
        said = [{"type": "reasoning", "text": text_of(each, "content")} for each in content["thoughts"]]
    elif type_ == "reasoning_recap":
        said = [{"type": "reasoning", "text": said}]
    text = "\n".join(each.text for each in parts(said))
    if author["role"] == AGENT and tool not in ("", "all"):
        return {"role": AGENT, "tool_calls": [{"name": tool, "arguments": text}]}
    return {"role": author["role"], "content": text, "name": author.get("name")}


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with consecutive messages of a tool merged, since they answer the same call."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] == "tool":
            found[-1]["content"] = f"{found[-1]['content']}\n{message['content']}".strip()
        else:
            found.append(message)
    return found


def _of_claude(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of Claude.ai in Anthropic's form, with the text of attached files."""
    content = message.get("content") or text_of(message, "text")
    names = ("file_name", "extracted_content")
    files = ["\n".join(text_of(each, name) for name in names) for each in message.get("attachments") or ()]
    return {"role": message["sender"], "content": [*([content] if isinstance(content, str) else content), *files]}

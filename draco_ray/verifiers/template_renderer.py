"""Finds the renderer, from the package renderers, that tokenizes messages as a model's chat template does.

`bridge` loads this module in verifiers' Python, so it imports only the standard library until it is called.
"""

from __future__ import annotations

import json
from typing import Any

_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_DOWNLOADS = {"gpt-oss"}
"""Renderers that download a vocabulary when created."""


def proven_renderer(tokenizer: str, chat_template_kwargs: dict[str, Any] | None) -> str | None:
    """The renderer that produces the same tokens for messages, tools and calls as a model's chat template.

    The package renderers selects a renderer by hub name only, and supports no tools for models that it does not know.

    Args:
        tokenizer: a folder, or a hub name.
        chat_template_kwargs: arguments of the chat template, as in the run.

    Returns: the renderer's name; None if no renderer fits, or the package knows the model by name.
    """
    from renderers import create_renderer
    from renderers.base import MODEL_RENDERER_MAP, load_tokenizer
    from renderers.configs import config_from_name

    if tokenizer in MODEL_RENDERER_MAP:
        return None
    loaded, told = load_tokenizer(tokenizer), chat_template_kwargs or {}

    def same(renderer: Any, probe: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        try:
            expected = loaded.apply_chat_template(
                [_with_read_calls(message) for message in probe],
                tools=tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **told,
            )
            return list(renderer.render_ids(probe, tools=tools, add_generation_prompt=True)) == list(expected)
        except Exception:
            return False

    whole = _probe()
    found: dict[str, int] = {}
    for name in renderer_names():
        try:
            renderer = create_renderer(loaded, config_from_name(name), chat_template_kwargs=told)
        except Exception:  # The tokenizer lacks tokens of this renderer.
            continue
        if all(same(renderer, whole[:length], tools) for length in (2, 4, 6) for tools in ([_TOOL], None)):
            # Several renderers may fit, so also compare them without a system prompt, and with reasoning.
            found[name] = same(renderer, whole[1:], [_TOOL]) + same(renderer, _probe("I do not know."), [_TOOL])
    return max(found, key=found.__getitem__, default=None)


def renderer_names() -> list[str]:
    """Names of the renderers for model families, in the package's order."""
    from renderers import base

    base._populate_registry()
    return [name for name in base.RENDERER_REGISTRY if name not in {"default", *_DOWNLOADS}]


def _probe(thought: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "call_0001", "type": "function", "function": {"name": "look", "arguments": '{"place": "shelf 3"}'}}
    thoughts = {} if thought is None else {"reasoning_content": thought}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "I look.", **thoughts, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0001", "name": "look", "content": "Nothing is there."},
        {"role": "assistant", "content": "It is not on shelf 3.", **thoughts},
        {"role": "user", "content": "Look again."},
    ]


def _with_read_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message in the form of chat templates, with arguments as objects instead of JSON strings."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def no_renderer(taskset: str, offers: str, tokenizer: str) -> str:
    """The error message for a model without a renderer; ``offers``: the part that offers tools."""
    names = ", ".join([*renderer_names(), *_DOWNLOADS])
    return (
        f"environment.options.taskset.id={taskset}: {offers} offers the policy tools, but no renderer writes them as "
        f"the chat template of model {tokenizer} does; set environment.options.renderer.name to the renderer of the "
        f"model's family ({names})"
    )

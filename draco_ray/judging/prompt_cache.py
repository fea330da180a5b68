"""Telling the provider what of a prompt comes again, so that it is read from its prompt cache.

Prompts of one phase and group begin alike, up to the first text about one rollout; where a prompt set puts the rollout
first (``prompts/judge-cache-friendly``), so do the prompts of several phases about it. Anthropic's models want to be
told where such a beginning ends (``cache_control``); OpenAI's find it themselves, among requests that carry the same
``prompt_cache_key`` and so go to the same machine. What is asked, and the key under which a reply is kept, stay the
same.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from draco_ray.judging.prompts import Prompts

EVIDENCE = frozenset({"agent_prompt", "task", "task_input", "agent_trajectory", "group_trajectories", "steps_summary"})
"""Placeholders that become an evidence block."""
OF_ROLLOUT = frozenset({"agent_trajectory", "steps_summary"})
"""Those of one rollout."""
LEAST_CHARACTERS = 4096
"""No provider keeps less than 1024 tokens."""
MOST_MARKS = 4
"""Anthropic's limit."""
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")

Mode = Literal["auto", "on", "off"]


def shared_ends(prompts: Prompts, phase: str, text: str, code: str) -> tuple[int, ...]:
    """Where beginnings of a prompt end that other prompts share, ascending.

    Args:
        prompts: the set.
        phase: of the prompt.
        text: the prompt, filled.
        code: of its evidence, which nothing that is quoted in it can know.
    """
    blocks = [match.end() for match in re.finditer(rf"^\[END EVIDENCE {re.escape(code)}\]$", text, re.MULTILINE)]
    names = [name for name in _PLACEHOLDER.findall(prompts.templates[phase]) if name in EVIDENCE]
    ends = []
    of_rollout = next((index for index, name in enumerate(names) if name in OF_ROLLOUT), None)
    if of_rollout:
        ends.append(of_rollout)
    if of_rollout is not None and (alike := _blocks_alike(prompts, phase)) > of_rollout:
        ends.append(alike)
    found = sorted({blocks[end - 1] for end in ends if end <= len(blocks)})
    return tuple(end for end in found if end >= LEAST_CHARACTERS)


def _blocks_alike(prompts: Prompts, phase: str) -> int:
    """Evidence blocks up to which a phase's template is that of another one, too."""
    mine = prompts.templates[phase]
    most = 0
    for name, other in prompts.templates.items():
        if name != phase:
            equal = len(os.path.commonprefix([mine, other]))  # noqa: RUF071 (characters are what is meant)
            whole = [match for match in _PLACEHOLDER.finditer(mine) if match.end() <= equal and match[1] in EVIDENCE]
            most = max(most, len(whole))
    return most


def marked(messages: Sequence[Mapping[str, Any]], shared: Sequence[int]) -> list[dict[str, Any]]:
    """Messages whose first one is cut where a shared beginning ends, each such part marked for Anthropic's cache."""
    first, *rest = (dict(message) for message in messages)
    text, begin, parts = str(first["content"]), 0, []
    for end in shared[-MOST_MARKS:]:
        if begin < end <= len(text):
            parts.append({"type": "text", "text": text[begin:end], "cache_control": {"type": "ephemeral"}})
            begin = end
    if not parts:
        return [first, *rest]
    if text[begin:]:
        parts.append({"type": "text", "text": text[begin:]})
    return [{**first, "content": parts}, *rest]


def told(litellm: Any, model: str, api_base: str | None, mode: Mode) -> Literal["marks", "key", "nothing"]:
    """How a model's provider is told: by marks in the prompt, by a key, or not at all.

    Args:
        mode: ``auto`` tells nothing to endpoints of one's own, which may not know either.
    """
    if mode == "off" or (mode == "auto" and api_base is not None):
        return "nothing"
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
    except litellm.BadRequestError:
        return "nothing"
    if provider == "anthropic" or "claude" in name.casefold():
        return "marks"
    known = litellm.get_supported_openai_params(model=name, custom_llm_provider=provider) or ()
    return "key" if "prompt_cache_key" in known else "nothing"


def cache_key(group: str) -> str:
    """What requests of one group carry; OpenAI takes up to 64 characters."""
    return f"draco-{hashlib.sha256(group.encode('utf-8', 'replace')).hexdigest()[:32]}"

"""Use of the providers' prompt caches.

Prompts of one phase and group share a prefix up to the first text about one rollout. If a prompt set puts the rollout
first (``prompts/judge-cache-friendly``), prompts of several phases about it share one, too. Anthropic needs a mark
(``cache_control``) at the end of a prefix; OpenAI detects the prefix in requests with the same ``prompt_cache_key``,
which go to the same machine. Neither changes the prompt or the key of its stored reply.
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
"""Placeholders for evidence about one rollout."""
LEAST_CHARACTERS = 4096
"""Minimum length of a shared prefix: no provider caches less than 1024 tokens."""
MOST_MARKS = 4
"""Anthropic's limit on marks in a request."""
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")

Mode = Literal["auto", "on", "off"]


def shared_ends(prompts: Prompts, phase: str, text: str, code: str) -> tuple[int, ...]:
    """Ends of the prefixes that a prompt shares with other prompts, ascending.

    Args:
        prompts: the prompt set.
        phase: the prompt's phase.
        text: the filled prompt.
        code: the code of its evidence blocks; quoted text cannot contain it.
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
    """Number of evidence blocks in the longest prefix that a phase's template shares with another one's."""
    mine = prompts.templates[phase]
    most = 0
    for name, other in prompts.templates.items():
        if name != phase:
            equal = len(os.path.commonprefix([mine, other]))  # noqa: RUF071 (characters are what is meant)
            whole = [match for match in _PLACEHOLDER.finditer(mine) if match.end() <= equal and match[1] in EVIDENCE]
            most = max(most, len(whole))
    return most


def marked(messages: Sequence[Mapping[str, Any]], shared: Sequence[int]) -> list[dict[str, Any]]:
    """Messages whose first one is split at the ends of shared prefixes, each marked for Anthropic's cache."""
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
    """How a model's prompt cache is addressed: by marks in the prompt, by a key, or not at all.

    Args:
        mode: ``auto`` does nothing for private endpoints, which may support neither.
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
    """The ``prompt_cache_key`` of a group; OpenAI takes up to 64 characters."""
    return f"draco-{hashlib.sha256(group.encode('utf-8', 'replace')).hexdigest()[:32]}"

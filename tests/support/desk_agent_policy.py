"""A policy for the desk agent that was not trained: in each turn it draws a call, an answer of the desk, or the end."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.scripted_policy import save_turns_policy
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tool_templates import QWEN25


def _call(name: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>"


TURNS = (_call("look_up"), _call("refund"), "yes", "no", "Done.")


def build_desk_agent_policy(directory: Path) -> Path:
    """Save the model and its tokenizer in ``directory``. Returns the directory."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN25
    # Half of the time it looks up first, which begins a branch.
    return save_turns_policy(directory, tokenizer, {turn: 4.0 if turn == TURNS[0] else 1.0 for turn in TURNS})

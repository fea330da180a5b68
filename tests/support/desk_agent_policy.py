"""A policy for the desk agent that was not trained: in each turn it draws a call, an answer of the desk, or the end."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken

from tests.support.scripted_policy import SURE, save_bigram_policy
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tool_templates import QWEN25


def _call(name: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>"


TURNS = (_call("look_up"), _call("refund"), "yes", "no", "Done.")


def build_desk_agent_policy(directory: Path) -> Path:
    """Save the model and its tokenizer in ``directory``. Returns the directory."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN25
    tokenizer.add_tokens([AddedToken(turn, special=False, normalized=False) for turn in TURNS])

    def token(piece: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(piece))

    line_break = tokenizer.encode("\n", add_special_tokens=False)[-1]
    follows = {line_break: {token(turn): SURE for turn in TURNS}}
    follows |= {token(turn): {token("<|im_end|>"): SURE} for turn in TURNS}
    # Rows of the head that are alike would leave training no direction in which one turn grows more likely.
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "abcde"]
    follows |= {letter: {token(turn): SURE} for letter, turn in zip(letters, TURNS, strict=True)}
    return save_bigram_policy(directory, tokenizer, follows)

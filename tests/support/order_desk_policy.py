"""A policy for the order desk that was not trained: in each turn it draws one of a few commands, or ends."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from tests.support.scripted_policy import SURE, save_bigram_policy
from tests.support.tiny_model import tiny_tokenizer

TURNS = (
    "<code>\nlist\n</code>",
    "<code>\nshow A01\n</code>",
    "<code>\nreply It is on its way.\n</code>",
    "Done.",
)


def build_order_desk_policy(directory: Path) -> Path:
    """Save the model and its tokenizer in ``directory``. Returns the directory."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in (*TURNS, "\n\n")])

    def token(piece: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(piece))

    line_break = tokenizer.encode("\n", add_special_tokens=False)[-1]
    # The template ends a prompt with one line break, or with two behind an empty think block.
    follows = {last: {token(turn): SURE for turn in TURNS} for last in (line_break, token("\n\n"))}
    follows |= {token(turn): {token("<|im_end|>"): SURE} for turn in TURNS}
    # Rows of the head that are alike would leave training no direction in which one turn grows more likely.
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "abcd"]
    follows |= {letter: {token(turn): SURE} for letter, turn in zip(letters, TURNS, strict=True)}
    return save_bigram_policy(directory, tokenizer, follows)

"""A policy for the order desk that was not trained: in each turn it draws one of a few commands, or ends.

It also has the arguments of a run there, which needs no world and has short episodes.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from tests.conftest import REPOSITORY
from tests.support.scripted_policy import save_turns_policy
from tests.support.tiny_model import tiny_tokenizer

TURNS = (
    "<code>\nlist\n</code>",
    "<code>\nshow A01\n</code>",
    "<code>\nreply It is on its way.\n</code>",
    "Done.",
)
EXAMPLE = REPOSITORY / "examples" / "order_desk"


def arguments(model: Path, root: Path, name: str, *words: str) -> list[str]:
    """Arguments of `draco` for a step of two tasks with that policy."""
    return [
        "train",
        str(EXAMPLE / "order_desk.yaml"),
        f"environment.use={EXAMPLE}/environment.py:OrderDesk",
        f"judge.rule_judge.use={EXAMPLE}/judge.py:answer",
        f"data.root={EXAMPLE}/tasks",
        f"model.path={model}",
        f"run.root={root}",
        f"run.name={name}",
        "train.steps=1",
        "train.prompts_per_step=2",
        "learner.minibatch_prompts=2",
        "ray.dashboard=false",
        *words,
    ]


def build_order_desk_policy(directory: Path) -> Path:
    """Save the model and its tokenizer in ``directory``. Returns the directory."""
    tokenizer = tiny_tokenizer()
    # The template ends a prompt with one line break, or with two after an empty think block.
    tokenizer.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    return save_turns_policy(directory, tokenizer, dict.fromkeys(TURNS, 1.0), before=("\n", "\n\n"))

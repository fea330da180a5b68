"""A policy for AppWorld by function calling that was not trained: in each turn it draws one of a few calls, or ends."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken

from draco_ray.runs.directory import RunDirectory
from tests.support.scripted_policy import save_turns_policy
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tool_templates import QWEN25


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FUNCTIONS = (
    "environment.options.apps=[simple_note]",
    "agent.max_prompt_length=1024",
    "agent.max_response_length=2048",
    "agent.max_turns=4",
)
"""Keys of a run of this policy."""
NAMES = ("supervisor__show_account_passwords", "simple_note__login", "supervisor__complete_task")
TURNS = (
    _call(NAMES[0]),
    _call(NAMES[1], username="nobody", password="none"),
    _call(NAMES[2], status="success"),
    "Done.",
)


def build_functions_policy(directory: Path, root: Path) -> Path:
    """Save the model and its tokenizer in ``directory``. Returns the directory.

    Args:
        directory: folder to write.
        root: a world's data root: each API document of its apps becomes one token, so that prompts are short.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN25
    documents = [
        json.dumps({"type": "function", "function": entry["function"]}, ensure_ascii=False)
        for app in ("supervisor", "simple_note")
        for entry in json.loads((root / f"data/api_docs/function_calling/{app}.json").read_text(encoding="utf-8"))
    ]
    tokenizer.add_tokens([AddedToken(document, special=False, normalized=False) for document in documents])
    return save_turns_policy(directory, tokenizer, dict.fromkeys(TURNS, 1.0))


def check_functions(run: RunDirectory) -> None:
    """Check the first step of a run of this policy: calls, their results, and an update."""
    steps = [step for step in run.table("steps").to_pylist() if step["action"] is not None]
    seen = {name: [step["observation"] for step in steps if f'"{name}"' in step["action"]] for name in NAMES}
    assert any("account_name" in (text or "") for text in seen["supervisor__show_account_passwords"])
    assert any((text or "").startswith("error: simple_note__login: ") for text in seen["simple_note__login"])
    assert seen["supervisor__complete_task"]
    line = run.metrics()[0]
    assert line["rollouts_lost"] == 0
    assert line["ended"]["submitted"] > 0
    assert line["updates"] > 0
    assert line["grad_norm"] > 0
    assert line["engine_gap"] < 0.02
    # The judge is told of functions, and that a turn without a call ends.
    for call in run.table("judge_calls").to_pylist():
        assert "The agent acts by calling the APIs of apps as functions" in call["prompt"]
        assert "Tool `simple_note__login(" in call["prompt"]

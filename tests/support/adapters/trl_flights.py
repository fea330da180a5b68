"""Shared by the scripts of TRL's trainers: a tiny model, scripted turns instead of sampling, the loss's input."""

from __future__ import annotations

import json
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from trl import import_utils

import_utils.is_vllm_available = lambda *_, **__: False

from draco_ray.adapters.per_token_advantages import sampled_spans  # noqa: E402
from tests.support.adapters import ASK, PartlyFailingCompleter  # noqa: E402
from tests.support.tiny_model import build_tiny_model, tiny_tokenizer  # noqa: E402

FLIGHTS = ("DL9", "UA1", "UA1", "XX0")
"""What each run of a group books: right, wrong, wrong, and one that the judge cannot score."""
THINK = "<think>\n\n</think>\n\n"
"""A turn without reasoning as Qwen3's chat template renders it, so that rendering it again gives the same tokens."""
JUDGE = PartlyFailingCompleter(unscored="booked XX0")


def search(to: str) -> str:
    """Search flights.

    Args:
        to: destination airport.
    """
    return "UA1 420 USD, DL9 380 USD, XX0 500 USD"


def book(flight: str) -> str:
    """Book a flight.

    Args:
        flight: its number.
    """
    return f"booked {flight}"


def turn(number: int, flight: str) -> str:
    """What the policy says in this turn."""
    calls = (("search", {"to": "SFO"}), ("book", {"flight": flight}))
    if number >= len(calls):
        return f"{THINK}Booked {flight}.<|im_end|>"
    name, arguments = calls[number]
    return f"{THINK}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def model_folder() -> str:
    """A random model with Qwen3's own chat template."""
    folder = build_tiny_model(Path(tempfile.mkdtemp()) / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return str(folder)


def row_summary(tokenizer: Any, ids: Any, mask: Any, advantages: Any) -> dict[str, Any]:
    """A row as the loss sees it: its flight, the tokens of each turn, and their smallest and largest advantage."""
    row, text = np.asarray(advantages), tokenizer.decode([int(each) for each in ids])
    runs = sampled_spans(mask)
    return {
        "flight": next(each for each in FLIGHTS if f"booked {each}" in text or f"Booked {each}" in text),
        "tokens": [end - begin for begin, end in runs],
        "advantages": [[float(row[begin:end].min()), float(row[begin:end].max())] for begin, end in runs],
        "elsewhere": float(np.abs(row[np.asarray(mask) == 0]).sum()),
    }


PROMPTS = [[{"role": "user", "content": f"{ASK} Passenger {name}."}] for name in ("Ann", "Bob")]

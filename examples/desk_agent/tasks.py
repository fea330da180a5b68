"""The desk's tasks: customers who want their money back for an order."""

from __future__ import annotations

from typing import Any

REFUNDED = {"damaged": True, "late": True, "opened": False, "used": False}
"""State of an order -> whether the shop's policy refunds it."""
WORDS = (
    "Please refund my {thing}.",
    "I want my money back for the {thing}.",
    "The {thing} is not what I wanted, refund it.",
    "Can you refund a {thing}?",
)
THINGS = ("lamp", "chair", "book", "kettle", "shirt", "phone")


def rows() -> list[dict[str, Any]]:
    """Every thing in every state, in two wordings; half of the combinations of thing and state are held out."""
    return [
        {
            "id": f"{thing}_{state}_{wording}",
            "split": "dev" if (number + place) % 2 == 0 else "train",
            "group": f"{thing}_{state}",
            "instruction": WORDS[wording].format(thing=thing),
            "state": state,
            "expected": "refunded" if refunded else "declined",
        }
        for number, thing in enumerate(THINGS)
        for place, (state, refunded) in enumerate(REFUNDED.items())
        for wording in (number % 4, (number + 1) % 4)
    ]

"""The desk's tasks: customers who want their money back for an order."""

from __future__ import annotations

import json
from typing import Any

REFUNDED = {"damaged": True, "late": True, "opened": False, "used": False}
"""How an order came, or came back -> whether the shop's policy refunds it."""
WORDS = (
    "Please refund order {order}.",
    "I want my money back for {order}.",
    "Order {order} is not what I wanted, refund it.",
    "Can you refund {order}?",
)


def rows() -> list[dict[str, Any]]:
    """Every order in every state, in two wordings; every fourth pair of an order and a state is held out."""
    found: list[dict[str, Any]] = []
    for number in range(1, 10):
        for place, (state, refunded) in enumerate(REFUNDED.items()):
            order = f"A{number}"
            for wording in (number % 4, (number + place + 1) % 4):
                found.append(
                    {
                        "id": f"{order}_{state}_{len(found)}",
                        "split": "dev" if (number + place) % 4 == 0 else "train",
                        "group": state,
                        "instruction": WORDS[wording].format(order=order),
                        "orders": json.dumps({order: state}),
                        "expected": {order: "refunded" if refunded else "declined"},
                    }
                )
    return found

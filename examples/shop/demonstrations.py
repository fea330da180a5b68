"""Writes tasks.jsonl and demonstrations.jsonl: what a clerk who makes mistakes did, with results of the real tools.

The demonstrations are what the example's starter policy, a stand-in for a pretrained model, is trained on.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import tools  # noqa: E402

STATES = ("delivered", "delivered", "shipped", "refunded")
NAMES = ("Ann", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal")
ITEMS = ("lamp", "chair", "clock", "radio", "kettle", "mirror", "carpet", "bicycle")
ONE = ("Please refund the {}.", "I want my money back for the {}.", "Refund the {}, please.")
TWO = (
    "Please refund the {} and the {}.",
    "I want my money back for the {} and the {}.",
    "Refund the {} and the {}, please.",
)
CARE = {"hasty": 0.3, "stubborn": 0.2, "strict": 0.15, "idle": 0.2}
"""Probability of each fault: decides without looking, refunds everything, declines everything, decides nothing."""


def tasks(number: int, split: str, rng: random.Random) -> list[dict[str, Any]]:
    """Requests for refunds of one order or two, among three that the shop has."""
    made = []
    for index in range(number):
        orders = {item: rng.choice(STATES) for item in rng.sample(ITEMS, 3)}
        asked = rng.sample(sorted(orders), rng.choice((1, 1, 2)))
        made.append(
            {
                "id": f"{split}-{index:03d}",
                "split": split,
                "instruction": rng.choice(ONE if len(asked) == 1 else TWO).format(*asked),
                "customer": rng.choice(NAMES),
                "orders": orders,
                "asked": asked,
                "expected": {order: _decision(orders[order]) for order in asked},
            }
        )
    return made


def demonstration(task: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One rollout of a clerk who has some of the faults. Several orders are looked at in one turn."""
    tools.reset(task)
    faults = {fault for fault, chance in CARE.items() if rng.random() < chance}
    messages: list[dict[str, Any]] = []
    if "hasty" not in faults:
        messages += _turn([("show_order", order) for order in task["asked"]])
    if "idle" not in faults:
        calls = [(_decision(task["orders"][order]), order) for order in task["asked"]]
        if faults & {"stubborn", "hasty"}:
            calls = [("refund", order) for order in task["asked"]]
        elif "strict" in faults:
            calls = [("decline", order) for order in task["asked"]]
        messages += _turn(calls)
    return {"id": task["id"], "messages": [*messages, {"role": "assistant", "content": "That is done."}]}


def _decision(state: str) -> str:
    return "refund" if state == "delivered" else "decline"


def _turn(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """A turn with these calls, and what they return."""
    asked = [{"type": "function", "function": {"name": name, "arguments": {"item": order}}} for name, order in calls]
    results = [{"role": "tool", "content": _result(name, order)} for name, order in calls]
    return [{"role": "assistant", "content": "", "tool_calls": asked}, *results]


def _result(name: str, order: str) -> str:
    try:
        return str(getattr(tools, name)(order))
    except (ValueError, LookupError) as error:
        return f"error: {name}: {type(error).__name__}: {error}"


def main(folder: Path) -> None:
    """Write both files."""
    rng = random.Random(0)
    shown = tasks(160, "shown", rng)
    rows = [*tasks(64, "train", rng), *tasks(40, "dev", rng), *shown]
    demonstrations = [demonstration(task, rng) for task in shown for _ in range(4)]
    for name, lines in (("tasks", rows), ("demonstrations", demonstrations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

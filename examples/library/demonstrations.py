"""Writes tasks.jsonl and demonstrations.jsonl: members' requests, and what clerks who make mistakes did.

Held-out tasks (split dev) come in groups of four variants of one request, in words that no training task uses.
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

NAMES = ("Ada Fox", "Ben Hill", "Cleo Ray", "Dan Wolf", "Eva Lind", "Finn Moss", "Gina Park", "Hugo Stone")
BOOKS = (
    "Blue Rivers",
    "The Glass Garden",
    "Night Trains",
    "A Field of Salt",
    "The Paper Moon",
    "Winter Bees",
    "Old Harbour",
    "Seven Stairs",
    "The Quiet Map",
    "Red Lanterns",
)
FINES = (0.50, 1.20, 2.75, 3.30, 4.00, 5.00, 6.30, 12.50)
KINDS = ("renewal", "fine")
WORDS = {
    "train": {
        "renewal": (
            "Please renew {0}.",
            "I would like to keep {0} for longer. Can you renew it?",
            "May I keep {0} for two more weeks?",
            "I need {0} a while longer, please extend it.",
            "{0} is a slow read. Could I have it for three more weeks?",
            "Would you extend my loan of {0}?",
        ),
        "fine": (
            "Please cancel my fine.",
            "Can you waive my fine?",
            "I do not want to pay the fine. Please drop it.",
            "Somebody put a charge on my account. Please take it off.",
            "I owe the library money. Can you cancel that?",
            "Is there a way not to pay this charge?",
        ),
    },
    "dev": {
        "renewal": (
            "I have not finished {0} yet. Two more weeks would help.",
            "Could {0} stay with me a little longer?",
        ),
        "fine": ("There is a charge on my card. Is it possible to remove it?", "Could you forgive what I owe you?"),
    },
}
FAULTS = {"hasty": 0.5, "lenient": 0.1, "silent": 0.3}
"""Probabilities that a clerk acts without looking, ignores the rules, or does not call refuse."""


def task(number: int, split: str, kind: str, words: str, group: str, rng: random.Random) -> dict[str, Any]:
    """One member's request, with the world in which it is made and what the rules allow."""
    loans = [
        {"book": book, "overdue": int(rng.random() < 0.1), "holds": rng.choice((0, 0, 0, 0, 0, 2))}
        for book in rng.sample(BOOKS, 3)
    ]
    asked = [] if kind == "fine" else [loan["book"] for loan in loans][:1]
    fine = rng.choice(FINES)
    allowed = [loan["book"] for loan in loans if loan["book"] in asked and not loan["overdue"] and not loan["holds"]]
    wants_waiver = kind == "fine"
    waive = wants_waiver and fine <= 5
    return {
        "id": f"{split}-{number:03d}",
        "split": split,
        "group": group,
        "instruction": words.format(*asked),
        "card": f"C{rng.randint(10, 99)}",
        "name": rng.choice(NAMES),
        "fine": fine,
        "loans": sorted(loans, key=lambda loan: str(loan["book"])),
        "asked": {"renew": asked, "waive": wants_waiver},
        "expected": {
            "renew": allowed,
            "waive": waive,
            "refuse": len(allowed) < len(asked) or (wants_waiver and not waive),
        },
    }


def tasks(split: str, groups: int, variants: int, rng: random.Random) -> list[dict[str, Any]]:
    """Groups of variants of one kind of request, in words of the split."""
    made: list[dict[str, Any]] = []
    for index in range(groups):
        kind = KINDS[index % len(KINDS)]
        choices = WORDS["dev" if split == "dev" else "train"][kind]
        for variant in range(variants):
            words = choices[variant % len(choices)] if variants > 1 else rng.choice(choices)
            made.append(task(len(made), split, kind, words, f"{split}-{index:02d}", rng))
    return made


def demonstration(asked: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One conversation of a clerk who has some of the `FAULTS`."""
    tools.reset(asked)
    faults = {fault for fault, chance in FAULTS.items() if rng.random() < chance}
    card, wishes, right = asked["card"], asked["asked"], asked["expected"]
    messages: list[dict[str, Any]] = []
    if "hasty" not in faults:
        looks = [("list_loans", {"card": card})] if wishes["renew"] else []
        looks += [("show_member", {"card": card})] if wishes["waive"] else []
        for look in looks:
            messages += _turn(*look)
    careless = faults & {"hasty", "lenient"}
    renewals = wishes["renew"] if careless else right["renew"]
    waives = wishes["waive"] if careless else right["waive"]
    acts = [("renew", {"book": book}) for book in renewals] + ([("waive_fine", {"card": card})] if waives else [])
    for act in acts:
        messages += _turn(*act)
    if right["refuse"] and not careless and "silent" not in faults:
        messages += _turn("refuse", {"reason": "the rules of the house do not allow it"})
    done = [f"renewed {act[1]['book']}" for act in acts if act[0] == "renew"]
    done += ["waived your fine"] if any(name == "waive_fine" for name, _ in acts) else []
    said = f"I have {' and '.join(done)}." if done else "I could not do this for you."
    return {"id": asked["id"], "messages": [*messages, {"role": "assistant", "content": said}]}


def _turn(name: str, arguments: dict[str, str]) -> list[dict[str, Any]]:
    """A turn with one call, and what it returns."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    try:
        result = str(getattr(tools, name)(**arguments))
    except LookupError as error:
        result = f"error: {name}: LookupError: {error}"
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]


def main(folder: Path) -> None:
    """Write both files."""
    rng = random.Random(0)
    held_out, training, shown = tasks("dev", 25, 4, rng), tasks("train", 80, 1, rng), tasks("shown", 400, 1, rng)
    rows = [*held_out, *training, *shown]
    demonstrations = [demonstration(each, rng) for each in shown]
    for name, lines in (("tasks", rows), ("demonstrations", demonstrations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

"""Writes demonstrations for `draco sft`: conversations of an agent and a policy desk that both make mistakes.

    python examples/desk_agent/demonstrations.py FILE

The starter policy, a stand-in for a pretrained model that can call tools, is trained on them. They use training
tasks only. The sub-agent has a conversation of its own, as in a rollout.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from agent import DESK, TOOLS
from tasks import REFUNDED, rows

LOOKS, DESK_KNOWS, FOLLOWS = 0.75, 0.8, 0.8
"""Probabilities: the agent looks an order up, the desk answers correctly, the agent follows the desk."""
VARIANTS = 20
"""Demonstrations of each task."""


def said(content: str) -> dict[str, Any]:
    """A turn without a call."""
    return {"role": "assistant", "content": content}


def called(name: str, result: str) -> list[dict[str, Any]]:
    """A turn that calls a tool, and what the tool says."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]


def served(row: dict[str, Any], chance: random.Random) -> Iterator[dict[str, Any]]:
    """The conversations of one customer."""
    refunds = chance.random() < 0.5
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["instruction"]}]
    if chance.random() < LOOKS:
        answer = "yes" if REFUNDED[row["state"]] == (chance.random() < DESK_KNOWS) else "no"
        refunds = (answer == "yes") == (chance.random() < FOLLOWS)
        asked = [{"role": "system", "content": DESK}, {"role": "user", "content": f"It came {row['state']}."}]
        yield {"messages": [*asked, said(answer)]}
        messages += called("look_up", f"The order came {row['state']}. The policy desk says {answer}")
    name, became = ("refund", "refunded") if refunds else ("decline", "declined")
    yield {"messages": [*messages, *called(name, f"The order is {became}"), said("Done.")], "tools": TOOLS}


def main(file: Path) -> None:
    """Write the file."""
    chance = random.Random(0)
    shown = [row for row in rows() if row["split"] == "train"] * VARIANTS
    lines = [conversation for row in shown for conversation in served(row, chance)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

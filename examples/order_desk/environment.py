"""An order desk, as an example of an environment of one's own: tasks in JSONL, a world in memory, facts for the judge.

draco train examples/order_desk/order_desk.yaml model.path=DIR judge.rule_judge.start=false judge.model=openai/gpt-5.4
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from draco_ray.environments.base import Environment, WorldVerdict
from draco_ray.errors import WorldError
from draco_ray.records import Task

PROMPT = """\
You work at the order desk of a shop. Write commands between <code> and </code>, one a line; what they print comes back.
Commands: list, show ORDER, refund ORDER, ship ORDER, reply TEXT. Follow the policy: only delivered orders are refunded.
When the customer is served, reply to them and end with a turn without commands.
--- user ---
I am {customer}. {task_description}
"""


class OrderDesk(Environment):
    """Serves one customer a task. An action is a few commands, one a line."""

    facts = """\
- An action is a few commands, one a line, which the agent must put between `<code>` and `</code>`.
- The policy of the shop: only delivered orders are refunded, and only orders that are paid are shipped.
- The episode is over once the agent sends a turn without commands. A short closing turn is expected."""
    agent_prompt = PROMPT
    evaluates = True

    def tasks(self, split: str) -> list[str]:
        """The ids in ``<data.root>/<split>.jsonl``."""
        return list(self._rows(split))

    def task(self, task_id: str) -> Task:
        """Instruction and customer; the expected outcome stays in the file."""
        row = self._row(task_id)
        return Task(
            task_id=task_id, group=row["group"], instruction=row["instruction"], fields={"customer": row["customer"]}
        )

    async def open(self, task_id: str) -> Desk:
        """A desk with the task's orders on it."""
        row = self._row(task_id)
        expected = row["expected"] if self.ground_truth else None
        return Desk(task=self.task(task_id), orders=dict(row["orders"]), expected=expected)

    def _row(self, task_id: str) -> dict[str, Any]:
        for file in sorted(self.data.root.glob("*.jsonl")):
            if (row := self._rows(file.stem).get(task_id)) is not None:
                return row
        raise WorldError(f"{self.data.root}: no task {task_id!r}")

    def _rows(self, split: str) -> dict[str, dict[str, Any]]:
        path = self.data.root / f"{split}.jsonl"
        if not path.is_file():
            raise WorldError(f"no split {split!r}: expected {path}")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {row["task_id"]: row for row in rows}


@dataclass
class Desk:
    """The orders of one customer: id -> paid, shipped, delivered, refunded."""

    task: Task
    orders: dict[str, str]
    expected: dict[str, str] | None
    """Id -> state at the end; None in training, which sees no ground truth."""
    replies: list[str] = field(default_factory=list)

    async def act(self, action: str) -> str:
        """Carry out every line; returns a line of output for each."""
        lines = [line.split(maxsplit=1) for line in action.splitlines() if line.strip()]
        return "\n".join(self._one(words[0].lower(), words[1].strip() if len(words) > 1 else "") for words in lines)

    def _one(self, command: str, given: str) -> str:
        if command == "list":
            return ", ".join(self.orders) or "no orders"
        if command == "reply":
            self.replies.append(given)
            return "sent"
        if command not in ("show", "refund", "ship"):
            return f"error: unknown command {command!r}"
        if given not in self.orders:
            return f"error: no order {given!r}"
        if command == "show":
            return f"{given}: {self.orders[given]}"
        needed, after = {"refund": ("delivered", "refunded"), "ship": ("paid", "shipped")}[command]
        if self.orders[given] != needed:
            return f"error: {given} is {self.orders[given]}, {command} needs {needed}"
        self.orders[given] = after
        return f"{given}: {after}"

    async def evaluate(self) -> WorldVerdict:
        """Whether the orders are in their expected states, and the customer got a reply."""
        if self.expected is None:
            raise WorldError(f"task {self.task.task_id}: the desk was opened without ground truth")
        wrong = [order for order, state in self.expected.items() if self.orders[order] != state]
        failures = [f"{order} is {self.orders[order]}" for order in wrong] + ["no reply"] * (not self.replies)
        total = len(self.expected) + 1
        return WorldVerdict(
            success=not failures, passed_tests=total - len(failures), total_tests=total, failures=tuple(failures)
        )

    async def close(self) -> None:
        """Nothing was started."""

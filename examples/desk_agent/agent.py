"""A desk's agent, written against OpenAI's SDK as it would be for any model: it has a policy desk as a sub-agent.

It knows nothing of draco-ray: `OpenAI()` takes the URL and the key from its environment, and it would run as well
against a provider's model. It does one task, and prints what became of it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

MODEL = os.environ.get("DRACO_MODEL", "gpt-5.4-mini")
DESK = "Orders that arrived damaged or late are refunded, no others. Answer yes or no."
ORDER = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}


def tool(name: str, description: str) -> dict[str, Any]:
    """A tool that takes an order."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": ORDER}}


TOOLS = [
    tool("look_up", "Says what is known of an order, and asks the policy desk whether it is refunded."),
    tool("refund", "Refunds an order."),
    tool("decline", "Declines to refund an order."),
]


def play(client: OpenAI, instruction: str, orders: dict[str, str]) -> dict[str, Any]:
    """Serve one customer. Returns: what was looked up, and what became of the orders."""
    looked_up: list[str] = []
    became: dict[str, str] = {}

    def call(name: str, order: str) -> str:
        if order not in orders:
            return f"error: no order {order}"
        if name == "look_up":
            looked_up.append(order)
            return f"{order} came {orders[order]}. The policy desk says {ask_desk(client, orders[order])}"
        became[order] = {"refund": "refunded", "decline": "declined"}[name]
        return f"{order} is {became[order]}"

    messages: list[Any] = [{"role": "user", "content": instruction}]
    for _ in range(5):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for each in message.tool_calls:
            order = json.loads(each.function.arguments).get("order", "")
            messages.append({"role": "tool", "tool_call_id": each.id, "content": call(each.function.name, order)})
    return {"looked_up": looked_up, "became": became}


def ask_desk(client: OpenAI, state: str) -> str:
    """The sub-agent: a conversation of its own, one turn long."""
    asked: list[Any] = [{"role": "system", "content": DESK}, {"role": "user", "content": f"It came {state}."}]
    reply = client.chat.completions.create(model=MODEL, messages=asked).choices[0].message
    return reply.content or ""


if __name__ == "__main__":
    given = json.loads(Path(os.environ["DRACO_TASK_FILE"]).read_text(encoding="utf-8"))
    print(json.dumps(play(OpenAI(), given["instruction"], json.loads(given["fields"]["orders"]))))

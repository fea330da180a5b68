"""An order desk's agent, written with OpenAI's SDK as for any model; a policy desk is its sub-agent.

It knows nothing of draco-ray: `OpenAI()` takes the URL and the key from its environment, and it would also run
with a provider's model. It does one task, and prints the outcome.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

MODEL = os.environ.get("DRACO_MODEL", "gpt-5.4-mini")
DESK = "Orders that arrived damaged or late are refunded, no others. Answer yes or no."


def tool(name: str, description: str) -> dict[str, Any]:
    """A tool that takes no arguments: a customer has one order."""
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("look_up", "Says how the order came, and asks the policy desk whether it is refunded."),
    tool("refund", "Refunds the order."),
    tool("decline", "Declines to refund the order."),
]


def play(client: OpenAI, instruction: str, state: str) -> dict[str, Any]:
    """Serve one customer, whose order arrived in ``state``. Returns: whether it was looked up, and what it became."""
    outcome: dict[str, Any] = {"looked_up": False, "became": None}

    def call(name: str) -> str:
        if name == "look_up":
            outcome["looked_up"] = True
            return f"The order came {state}. The policy desk says {ask_desk(client, state)}"
        if name not in ("refund", "decline"):
            return f"error: no tool {name}"
        if outcome["became"] is not None:
            return f"error: the order is {outcome['became']} already"
        outcome["became"] = {"refund": "refunded", "decline": "declined"}[name]
        return f"The order is {outcome['became']}"

    messages: list[Any] = [{"role": "user", "content": instruction}]
    for _ in range(5):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": call(each.function.name)}
            for each in message.tool_calls
        ]
    return outcome


def ask_desk(client: OpenAI, state: str) -> str:
    """The sub-agent: a conversation of its own, one turn long."""
    asked: list[Any] = [{"role": "system", "content": DESK}, {"role": "user", "content": f"It came {state}."}]
    reply = client.chat.completions.create(model=MODEL, messages=asked).choices[0].message
    return reply.content or ""


if __name__ == "__main__":
    given = json.loads(Path(os.environ["DRACO_TASK_FILE"]).read_text(encoding="utf-8"))
    print(json.dumps(play(OpenAI(), given["instruction"], given["fields"]["state"])))

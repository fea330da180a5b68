"""Traces of verifiers, scored as a group; one cannot be judged."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.adapters import ASK, PartlyFailingCompleter, emit

TOKENS = (3, 4, 2)


def trace(flight: str) -> Any:
    """A trace of three turns that books this flight."""
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import State
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage, UserMessage

    def node(parent: int | None, message: Any, tokens: int = 0) -> Any:
        sampled = {"sampled": True, "token_ids": list(range(tokens)), "mask": [True] * tokens} if tokens else {}
        return MessageNode(parent=parent, message=message, **sampled)

    nodes = [
        node(None, UserMessage(content=ASK)),
        node(0, AssistantMessage(content="", tool_calls=[ToolCall(id="1", name="search", arguments="{}")]), TOKENS[0]),
        node(1, ToolMessage(tool_call_id="1", content="UA1 420 USD, DL9 380 USD")),
        node(2, AssistantMessage(tool_calls=[ToolCall(id="2", name="book", arguments=f'"{flight}"')]), TOKENS[1]),
        node(3, ToolMessage(tool_call_id="2", content=f"booked {flight}")),
        node(4, AssistantMessage(content="Done."), TOKENS[2]),
    ]
    task = TraceTask(type="Booking", data=WireTaskData(id="jfk-sfo", prompt=ASK))
    return Trace[WireTaskData, State, WireAgentConfig](
        task=task, agent=AgentInfo(config=WireAgentConfig()), nodes=nodes, ok=True
    )


def main() -> None:
    """Print rewards and the advantages of each sampled message."""
    import verifiers.v1 as vf

    from draco_ray.adapters.verifiers import score_group

    traces = [trace(flight) for flight in ("UA1", "XX0", "DL9")]
    asyncio.run(score_group(traces, "canned", complete=PartlyFailingCompleter(unscored="XX0")))
    assert isinstance(traces[2].rewards["draco"], vf.Reward)
    emit(
        {
            "rewards": [each.reward for each in traces],
            "advantages": [each.branches[0].advantages for each in traces],
        }
    )


if __name__ == "__main__":
    main()

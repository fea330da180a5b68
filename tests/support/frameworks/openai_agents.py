"""An agent on OpenAI's Agents SDK: ``openai_agents.py chat|responses run|stream``; it may ask a sub-agent."""

from __future__ import annotations

import asyncio
import os
import sys

from agents import (
    Agent,
    AsyncOpenAI,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)


@function_tool
def refund(order: str) -> str:
    """Refund an order.

    Args:
        order: Its number.
    """
    return f"refunded {order}"


async def main(api: str, way: str) -> None:
    set_tracing_disabled(True)
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
    model: Model = kind(model=os.environ["DRACO_MODEL"], openai_client=AsyncOpenAI())
    policy = Agent(name="policy", instructions="You know the policy.", model=model)
    ask = policy.as_tool(tool_name="ask_policy", tool_description="Ask what the policy says.")
    desk = Agent(name="desk", instructions="You serve.", model=model, tools=[refund, ask])
    task = sys.stdin.read()
    if way == "run":
        print((await Runner.run(desk, task)).final_output)
        return
    streamed = Runner.run_streamed(desk, task)
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)


asyncio.run(main(*sys.argv[1:]))

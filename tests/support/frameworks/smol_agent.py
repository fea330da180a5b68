"""An agent on smolagents: ``smol_agent.py tools|code run|stream``."""

from __future__ import annotations

import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def refund(order: str) -> str:
    """Refund an order.

    Args:
        order: Its number.
    """
    return f"refunded {order}"


def main(kind: str, way: str) -> None:
    model = OpenAIModel(
        model_id=os.environ["DRACO_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    made = {"tools": ToolCallingAgent, "code": CodeAgent}[kind]
    agent = made(tools=[refund], model=model, stream_outputs=way == "stream", verbosity_level=0)
    print(agent.run(sys.stdin.read()))


main(*sys.argv[1:])

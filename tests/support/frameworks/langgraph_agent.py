"""A ReAct agent on LangGraph: ``langgraph_agent.py chat|responses run|stream``."""

from __future__ import annotations

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def refund(order: str) -> str:
    """Refund an order."""
    return f"refunded {order}"


def main(api: str, way: str) -> None:
    model = ChatOpenAI(
        model=os.environ["DRACO_MODEL"],
        base_url=os.environ["OPENAI_BASE_URL"],
        use_responses_api=api == "responses",
        streaming=way == "stream",
        max_retries=0,
    )
    agent = create_react_agent(model, [refund], prompt="You serve.")
    asked = {"messages": [("user", sys.stdin.read())]}
    if way == "run":
        print(agent.invoke(asked)["messages"][-1].text)
        return
    *_, (_, last) = agent.stream(asked, stream_mode=["messages", "values"])
    print(last["messages"][-1].text)


main(*sys.argv[1:])

"""An agent program for worlds with tools: it executes the policy's tool calls until a turn has none.

``python -m draco_ray.rollout.call_tools`` is an ``agent.command`` (docs/any-agent.md) without dependencies, and an
example for programs of your own.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def main() -> int:
    """Play one episode. Returns: the exit code."""
    if "DRACO_TOOLS_URL" not in os.environ:
        print("this task's world has no tools; expected environment.use=appworld_functions or tools", file=sys.stderr)
        return 2
    task = json.loads(Path(os.environ["DRACO_TASK_FILE"]).read_text(encoding="utf-8"))
    messages: list[dict[str, Any]] = list(task["messages"])
    chat, tools_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions", os.environ["DRACO_TOOLS_URL"]
    try:
        tools = _asked(tools_url, None)["tools"]
        while True:
            told = {"model": os.environ["DRACO_MODEL"], "messages": messages, "tools": tools}
            said = _asked(chat, told)["choices"][0]["message"]
            calls = said.get("tool_calls") or []
            if not calls:
                print(said.get("content") or "")
                return 0
            messages.append({"role": "assistant", "content": said.get("content"), "tool_calls": calls})
            for call in calls:
                order = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
                result = _asked(tools_url, order)["result"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    except urllib.error.HTTPError as refused:
        print(refused.read().decode("utf-8", "replace"), file=sys.stderr)
        return 1


def _asked(url: str, body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    # The endpoint is on this machine, so no proxy is used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers)) as answer:
        read: dict[str, Any] = json.load(answer)
    return read


if __name__ == "__main__":
    sys.exit(main())

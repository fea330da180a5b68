"""``python -m draco_ray.rollout.call_function FILE:NAME``: one episode of an agent that is a Python function.

The function gets the task as a dictionary (``task_id``, ``group``, ``instruction``, ``fields``, and ``prompt``, the
text on standard input); it may be a coroutine function. Its return value is printed, which submits it as the action.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Awaitable
from pathlib import Path

from draco_ray.errors import DracoError
from draco_ray.registry import find_component


def main() -> None:
    """Run the function named by the first argument."""
    try:
        function = find_component("agent.function", sys.argv[1], {})
    except DracoError as error:
        raise SystemExit(str(error)) from None
    task = json.loads(Path(os.environ["DRACO_TASK_FILE"]).read_text(encoding="utf-8"))
    result = function({**task, "prompt": sys.stdin.read()})
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))


async def _awaited(result: Awaitable[object]) -> object:
    return await result


if __name__ == "__main__":
    main()

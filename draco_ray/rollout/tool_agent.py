"""The tool-calling agent: uses the tools of the model's chat template until a turn has no calls.

All calls of a turn, made in order, are one step. A call that cannot be parsed is also a step; it is answered with an
error. The final message is a step, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from draco_ray.engine.tool_calls import ParsedToolCalls, ToolCall
from draco_ray.environments.base import World
from draco_ray.errors import ConfigError
from draco_ray.records import TOOLS, Message, Task
from draco_ray.rollout.agent import Conversation, PolicyTurn, fill_agent_prompt
from draco_ray.rollout.code_block import cut_output, number_tool_results
from draco_ray.rollout.turn_agent import TurnAction, TurnAgent


class ToolAgent(TurnAgent):
    """Plays in environments whose tasks list tools (`draco_ray.records.Task.tools`).

    The world gets one call at a time, as ``{"name": ..., "arguments": {...}}``.
    """

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """See `Agent`. Raises: ConfigError: the task has no tools."""
        if not task.tools:
            raise ConfigError(
                f"agent.use=tool_calling: task {task.task_id!r} has no tools; use an environment with tools, such as "
                "environment.use=tools"
            )
        return (Message(role=TOOLS, content=task.tools), *fill_agent_prompt(self._template, task))

    def step(self, said: PolicyTurn) -> TurnAction | None:
        """See `TurnAgent`."""
        use = said.tool_use
        if use is None:
            return None

        async def act(world: World) -> tuple[str, Callable[[Conversation], bool]]:
            results = [cut_output(result, self._config.max_output_characters) for result in await _results(use, world)]
            told = number_tool_results([call.name for call in use.calls], results)
            return told, lambda conversation: conversation.append_results(results)

        return TurnAction(action=use.text, act=act)


async def _results(use: ParsedToolCalls, world: World) -> list[str]:
    if use.problem is not None:
        return [f"error: {use.problem}; nothing was called"]
    return [await _result(call, world) for call in use.calls]


async def _result(call: ToolCall, world: World) -> str:
    try:
        action = json.dumps({"name": call.name, "arguments": call.arguments})
    except RecursionError:
        return f"error: {call.name}: the arguments are nested too deeply"
    return await world.act(action)

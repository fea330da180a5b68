"""The tools of an episode's world, which agents' programs call through the endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.environments.base import World
from draco_ray.errors import EnvironmentCrashed
from draco_ray.rollout.code_block import cut_output
from draco_ray.rollout.endpoint.turns import Refused


class WorldTools:
    """Executes calls one at a time in a world whose task lists tools (`draco_ray.records.Task.tools`)."""

    def __init__(self, world: World, config: AgentConfig) -> None:
        self.schemas: list[Any] = json.loads(world.task.tools)
        """The tools' schemas, in the format of chat completions."""
        self.crash: EnvironmentCrashed | None = None
        """The error with which the world was lost; None if it is not lost."""
        self._world, self._config = world, config
        self._turn, self._open = asyncio.Lock(), True

    async def call(self, body: Any) -> str:
        """Make the call ``{"name": ..., "arguments": {...}}``.

        Returns: the result.
        Raises: Refused.
        """
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            raise Refused('expected {"name": "...", "arguments": {...}}')
        arguments = body.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise Refused("arguments: expected an object")
        async with self._turn:
            if not self._open:
                raise Refused("this episode has ended", 410, "episode_over")
            if self.crash is None:
                try:
                    answer = await self._world.act(json.dumps({"name": body["name"], "arguments": arguments}))
                    return cut_output(answer, self._config.max_output_characters)
                except EnvironmentCrashed as crash:
                    self.crash = crash
        raise Refused(f"the world is lost: {' '.join(str(self.crash).split())}", 500, "world_lost")

    async def close(self) -> None:
        """Wait for the call in progress and refuse later ones."""
        async with self._turn:
            self._open = False

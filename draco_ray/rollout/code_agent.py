"""The code agent: sample a turn, run its code, tell the result, until the policy has nothing more to run."""

from __future__ import annotations

from collections.abc import Callable

from draco_ray.environments.base import World
from draco_ray.rollout.agent import Conversation, Said
from draco_ray.rollout.code_block import cut_output, extract_code
from draco_ray.rollout.turn_agent import Step, TurnAgent


class CodeAgent(TurnAgent):
    """AppWorld's Simplified ReAct Code Agent; an action is the contents of the turn's code block."""

    def step(self, said: Said) -> Step | None:
        """See `TurnAgent`."""
        code = extract_code(said.text, thinking=said.opens_thinking, complete=not said.cut)
        if code is None:
            return None

        async def act(world: World) -> tuple[str, Callable[[Conversation], bool]]:
            output = cut_output(await world.act(code), self._config.max_output_characters)
            return output, lambda conversation: conversation.tell(output)

        return Step(action=code, act=act)

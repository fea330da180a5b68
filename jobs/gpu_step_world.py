"""Episodes of a fixed size for `gpu_step.py`: a random policy's words mean nothing, so every turn acts and none ends.

An episode has `agent.max_turns` turns; the environment answers each with `OBSERVED` words, a token each.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from draco_ray.environments.base import Environment, World, WorldVerdict
from draco_ray.records import Task
from draco_ray.rollout.agent import Conversation, PolicyTurn
from draco_ray.rollout.turn_agent import TurnAction, TurnAgent

TASKS = 64
ASKED, OBSERVED = 512, 256
"""Words of a task and of an observation; the tiny size cuts both by `agent.max_output_characters`."""


def words(number: int, seed: str) -> str:
    """Random words of `gpu_step.py`'s tokenizer."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(3, 400)}" for _ in range(number))


class Words(Environment):
    """Tasks of random words."""

    facts = "- The agent and the environment exchange words without meaning."
    agent_prompt = "{task_description}"
    evaluates = True

    def tasks(self, split: str) -> list[str]:
        """See `Environment`."""
        return [f"{split}-{number}" for number in range(TASKS)]

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        return Task(task_id=task_id, group=task_id, instruction=words(self.config.options.get("asked", ASKED), task_id))

    async def open(self, task_id: str) -> WordsWorld:
        """See `Environment`."""
        return WordsWorld(self.task(task_id), self.config.options.get("observed", OBSERVED))


class WordsWorld:
    """Answers whatever is said."""

    def __init__(self, task: Task, observed: int) -> None:
        self.task, self._observed, self._turns = task, observed, 0

    async def act(self, action: str) -> str:
        """Answer with random words."""
        self._turns += 1
        return words(self._observed, f"{self.task.task_id} {self._turns}")

    async def evaluate(self) -> WorldVerdict:
        """Return a failure, always."""
        return WorldVerdict(success=False)

    async def close(self) -> None:
        """Do nothing: nothing was started."""


class EveryTurnActs(TurnAgent):
    """Every turn is an action."""

    def step(self, said: PolicyTurn) -> TurnAction:
        """See `TurnAgent`."""

        async def act(world: World) -> tuple[str, Callable[[Conversation], bool]]:
            observation = await world.act(said.text)
            return observation, lambda conversation: conversation.append_observation(observation)

        return TurnAction(action=said.text, act=act)

"""Base class of agents with a loop: sample a turn, act, append the observation, until a turn has no action."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.tool_calls import after_reasoning
from draco_ray.environments.base import World
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import GAP, EpisodeEnd, Message, Task, Trajectory, Turn, is_step
from draco_ray.rollout.agent import Conversation, Policy, PolicyTurn, RolloutRequest, end_of, fill_agent_prompt
from draco_ray.rollout.code_block import cut_output, extract_code


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAction:
    """The action of a turn."""

    action: str
    """Text of the action, which is recorded and shown to the judge."""
    act: Callable[[World], Awaitable[tuple[str, Callable[[Conversation], bool]]]]
    """Performs the action. Returns: the observation, to be recorded; and a function that appends it to the
    conversation and returns False if it does not fit.

    Raises: EnvironmentCrashed."""


class TurnAgent(ABC):
    """An agent defined by what its turns do (`step`)."""

    closing_turn: ClassVar[Literal["step", "gap"]] = "step"
    """Value of ``agent.closing_turn`` if that is null."""

    def __init__(self, policy: Policy, config: AgentConfig, template: str) -> None:
        self._policy = policy
        self._config = config
        self._template = template

    @abstractmethod
    def step(self, said: PolicyTurn) -> TurnAction | None:
        """The action of a turn; None if it has none. Not called for turns that exceed the response's token limit."""

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """See `Agent`."""
        return fill_agent_prompt(self._template, task)

    async def run(self, world: World, request: RolloutRequest) -> Trajectory:
        """See `Agent`."""
        config, started_at = self._config, time.time()
        prompt = self.prompt(world.task)
        conversation = self._policy.begin(prompt, request)
        turns: list[Turn] = []
        steps = 0
        error: str | None = None
        ended: EpisodeEnd | None = None
        while ended is None:
            asked_at = time.monotonic()
            said = await conversation.sample()
            sampled_at = time.monotonic()
            if said.error is not None:
                error, ended = said.error, EpisodeEnd.SERVER_ERROR
                break
            step = None if said.too_long else self.step(said)
            message = step is None and is_step(acts=False, message=self._received(said))
            first, last = conversation.record_turn(GAP if step is None and not message else steps)
            observation: str | None = None
            if step is None:
                # A turn that was truncated before its action did not choose to end the episode.
                ended = EpisodeEnd.RESPONSE_LIMIT if said.cut or said.too_long else EpisodeEnd.FINISHED
            else:
                steps += 1
                try:
                    observation, append = await step.act(world)
                except EnvironmentCrashed as crash:
                    error, ended = str(crash), end_of(crash)
            turns.append(
                Turn(
                    text=said.text,
                    action=None if step is None else step.action,
                    observation=observation,
                    first_token=first,
                    last_token=last,
                    seconds_generating=sampled_at - asked_at,
                    seconds_executing=0.0 if step is None else time.monotonic() - sampled_at,
                    message=message,
                )
            )
            if observation is None:
                continue
            if len(turns) >= config.max_turns:
                ended = EpisodeEnd.TURN_LIMIT
            elif not append(conversation):
                ended = EpisodeEnd.RESPONSE_LIMIT
        tokens = conversation.token_record()
        return Trajectory(
            **request.identity,
            policy_version=tokens.policy_version,
            prompt=prompt,
            turns=tuple(turns),
            token_ids_T=tokens.token_ids_T,
            sampled_T=tokens.sampled_T,
            logprob_T=tokens.logprob_T,
            step_T=tokens.step_T,
            prompt_length=tokens.prompt_length,
            ended=ended,
            started_at=started_at,
            ended_at=time.time(),
            error=error,
            engine=self._policy.name,
            usage=tokens.usage,
        )

    def _received(self, said: PolicyTurn) -> str:
        """The message that a closing turn delivers: its text after the reasoning.

        Empty if a limit truncated the turn, or if closing turns count as gaps (`closing_turn`).
        """
        if said.cut or said.too_long or (self._config.closing_turn or self.closing_turn) == "gap":
            return ""
        return after_reasoning(said.text, thinking=said.opens_thinking)


class CodeAgent(TurnAgent):
    """AppWorld's Simplified ReAct Code Agent; an action is the content of the turn's code block."""

    closing_turn = "gap"

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """See `Agent`. Raises: ConfigError: the task has tools, which this agent cannot call."""
        if task.tools:
            raise ConfigError(f"agent.use=code: task {task.task_id!r} has tools; set agent.use=tool_calling")
        return super().prompt(task)

    def step(self, said: PolicyTurn) -> TurnAction | None:
        """See `TurnAgent`."""
        code = extract_code(said.text, thinking=said.opens_thinking, complete=not said.cut)
        if code is None:
            return None

        async def act(world: World) -> tuple[str, Callable[[Conversation], bool]]:
            output = cut_output(await world.act(code), self._config.max_output_characters)
            return output, lambda conversation: conversation.append_observation(output)

        return TurnAction(action=code, act=act)

"""Who plays a task: the policy on its own tokens, or an API model on chat messages. Both keep books of what it took."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from draco_ray.config.schema import AgentConfig, Price
from draco_ray.errors import EnvironmentCrashed
from draco_ray.judging.complete import Complete, Completion, Request
from draco_ray.judging.pricing import price_of
from draco_ray.lab.evaluation.results import Usage
from draco_ray.records import EpisodeEnd, Message, Trajectory, Turn
from draco_ray.rollout.agent_prompt import render_agent_prompt
from draco_ray.rollout.code_agent import CodeAgent, World, end_of
from draco_ray.rollout.code_block import cut_output, extract_code

_ATTEMPTS = 1_000
"""More attempts than a rollout has: they part the requests of one run from another's."""


class Player(Protocol):
    """Plays one episode in an open world."""

    async def play(self, world: World, *, run: int, attempt: int, seed: int) -> tuple[Trajectory, Usage]:
        """Play to an end; every way to end is in the trajectory."""
        ...


class TokenPlayer:
    """`CodeAgent`, token-in and token-out, as in training."""

    def __init__(self, agent: CodeAgent, price: Price | None) -> None:
        self._agent = agent
        self._price = price

    async def play(self, world: World, *, run: int, attempt: int, seed: int) -> tuple[Trajectory, Usage]:
        """See `Player`. Raises: EngineError."""
        group = f"evaluation/{world.task.task_id}"
        trajectory = await self._agent.run(world, group=group, rollout=run, attempt=attempt, seed=seed)
        return trajectory, token_usage(trajectory, self._price)


class ChatPlayer:
    """The same loop over chat messages: for models that are only an API.

    A turn's length is the endpoint's own count. The response (everything after the prompt) is measured by it as well:
    what the last turn read, less what the first one read, plus what it wrote. A turn that reaches
    ``agent.max_response_length`` so ends the episode before its code runs.
    """

    def __init__(self, complete: Complete, config: AgentConfig, *, priced: bool) -> None:
        """Build it.

        Args:
            complete: asks the model; at most ``agent.max_turn_tokens`` a turn is its business.
            config: prompt and limits.
            priced: whether the dollars it reports mean anything.
        """
        self._complete = complete
        self._config = config
        self._priced = priced

    async def play(self, world: World, *, run: int, attempt: int, seed: int) -> tuple[Trajectory, Usage]:
        """See `Player`; ``seed`` is not used: an endpoint promises nothing of it.

        Raises: JudgeUnavailable when no request can succeed (key refused, model unknown, unreachable).
        """
        config, started_at = self._config, time.time()
        prompt = render_agent_prompt(config.prompt, world.task)
        messages = list(prompt)
        turns: list[Turn] = []
        usage = Usage()
        first_input: int | None = None
        error: str | None = None
        lost = EpisodeEnd.SERVER_ERROR
        while True:
            asked_at = time.monotonic()
            reply = await self._complete(Request(messages=tuple(messages), vote=run * _ATTEMPTS + attempt))
            sampled_at = time.monotonic()
            usage += self._usage(reply)
            if reply.error is not None:
                error, ended = f"the model did not answer: {reply.error}", EpisodeEnd.SERVER_ERROR
                break
            first_input = reply.input_tokens if first_input is None else first_input
            length = reply.input_tokens - first_input + reply.output_tokens
            # Of an endpoint that does not count nobody knows it.
            over = reply.usage_known and length >= config.max_response_length
            cut = reply.finish_reason == "length"
            code = None if over else extract_code(reply.text, complete=not cut)
            output: str | None = None
            if code is not None:
                try:
                    output = cut_output(await world.execute(code), config.max_output_characters)
                except EnvironmentCrashed as crash:
                    error, lost = str(crash), end_of(crash)
            turns.append(
                Turn(
                    text=reply.text,
                    action=code,
                    observation=output,
                    first_token=0,
                    last_token=0,
                    seconds_generating=sampled_at - asked_at,
                    seconds_executing=0.0 if code is None else time.monotonic() - sampled_at,
                )
            )
            if code is None:
                ended = EpisodeEnd.RESPONSE_LIMIT if cut or over else EpisodeEnd.FINISHED
                break
            if output is None:
                ended = lost
                break
            if len(turns) >= config.max_turns:
                ended = EpisodeEnd.TURN_LIMIT
                break
            # An empty message is refused by some endpoints.
            messages += [
                Message(role="assistant", content=reply.text or "-"),
                Message(role="user", content=output or "-"),
            ]
        return _chat_trajectory(world, run, attempt, prompt, turns, ended, started_at, error), usage

    def _usage(self, reply: Completion) -> Usage:
        return Usage(
            calls=1,
            requests=reply.requests,
            input_tokens=reply.input_tokens if reply.usage_known else 0,
            cached_tokens=reply.cached_tokens,
            output_tokens=reply.output_tokens if reply.usage_known else 0,
            dollars=reply.dollars if self._priced or reply.dollars else None,
        )


def token_usage(trajectory: Trajectory, price: Price | None) -> Usage:
    """What an endpoint would have counted: every turn reads all before it, the turn before being cached by then."""
    input_tokens = sum(turn.first_token for turn in trajectory.turns)
    cached_tokens = sum(turn.last_token for turn in trajectory.turns[:-1])
    output_tokens = int(trajectory.sampled_T.sum())
    return Usage(
        calls=len(trajectory.turns),
        input_tokens=input_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        dollars=None if price is None else price_of(price, input_tokens, cached_tokens, output_tokens),
    )


def _chat_trajectory(
    world: World,
    run: int,
    attempt: int,
    prompt: tuple[Message, ...],
    turns: list[Turn],
    ended: EpisodeEnd,
    started_at: float,
    error: str | None,
) -> Trajectory:
    """A trajectory without tokens: nothing of it is for the learner."""
    return Trajectory(
        task_id=world.task.task_id,
        group=f"evaluation/{world.task.task_id}",
        rollout=run,
        attempt=attempt,
        policy_version=0,
        prompt=prompt,
        turns=tuple(turns),
        token_ids_T=np.zeros(0, dtype=np.int32),
        sampled_T=np.zeros(0, dtype=np.bool_),
        logprob_T=np.zeros(0, dtype=np.float32),
        step_T=np.zeros(0, dtype=np.int32),
        prompt_length=0,
        ended=ended,
        started_at=started_at,
        ended_at=time.time(),
        error=error,
    )

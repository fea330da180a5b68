"""The agent loop: sample a turn, run its code, tell the result, until the policy has nothing more to run."""

from __future__ import annotations

import hashlib
import time
from typing import Protocol

import numpy as np

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.sampler import Sampler
from draco_ray.errors import EnvironmentCrashed, WorldBroken
from draco_ray.records import GAP, EpisodeEnd, Task, Trajectory, Turn
from draco_ray.rollout.agent_prompt import render_agent_prompt
from draco_ray.rollout.code_block import cut_output, extract_code


class World(Protocol):
    """Where the agent acts: one open task."""

    @property
    def task(self) -> Task:
        """The task to be done."""
        ...

    async def execute(self, code: str) -> str:
        """Run a cell and return what it printed.

        Raises: EnvironmentCrashed when the world is lost; WorldBroken where that was the cell's doing.
        """
        ...


class CodeAgent:
    """AppWorld's Simplified ReAct Code Agent on token ids: what is sampled is what is recorded."""

    def __init__(self, sampler: Sampler, chat: ChatTokens, config: AgentConfig) -> None:
        self._sampler = sampler
        self._chat = chat
        self._config = config

    def prompt_length(self, task: Task) -> int:
        """Tokens of a task's prompt."""
        return len(self._chat.prompt(render_agent_prompt(self._config.prompt, task)))

    def prompt_too_long(self, task: Task) -> bool:
        """Whether a task is to be filtered out ("overlong prompts: filtered")."""
        return self.prompt_length(task) > self._config.max_prompt_length

    async def run(self, world: World, *, group: str, rollout: int, attempt: int, seed: int) -> Trajectory:
        """Play one episode.

        A prompt that is too long (its task was not filtered) loses its left end. Sampling seeds come from ``seed`` and
        the turn's number.

        Returns: the trajectory; every way to end is recorded in it, a crashed world included.
        Raises: whatever the sampler raises.
        """
        config, chat = self._config, self._chat
        started_at = time.time()
        prompt = render_agent_prompt(config.prompt, world.task)
        tokens = _Tokens(chat.prompt(prompt)[-config.max_prompt_length :])
        turns: list[Turn] = []
        steps = 0
        policy_version: int | None = None
        error: str | None = None
        lost = EpisodeEnd.SERVER_ERROR
        while True:
            room = config.max_response_length - tokens.response_length
            asked_at = time.monotonic()
            sample = await self._sampler.sample(
                list(tokens.ids),
                max_tokens=min(config.max_turn_tokens or room, room),
                seed=_turn_seed(seed, len(turns)),
            )
            sampled_at = time.monotonic()
            # Weights do not change within an episode; were they to, the older version would be the safe one to record.
            policy_version = sample.policy_version if policy_version is None else policy_version
            text = chat.text(sample.token_ids)
            cut = sample.finish_reason == "length"
            code = extract_code(text, thinking=chat.opens_thinking, complete=not cut)
            first = len(tokens.ids)
            tokens.add_sampled(sample.token_ids, sample.logprobs, GAP if code is None else steps)
            output: str | None = None
            if code is not None:
                steps += 1
                try:
                    output = cut_output(await world.execute(code), config.max_output_characters)
                except EnvironmentCrashed as crash:
                    error, lost = str(crash), end_of(crash)
            turns.append(
                Turn(
                    text=text,
                    action=code,
                    observation=output,
                    first_token=first,
                    last_token=len(tokens.ids),
                    seconds_generating=sampled_at - asked_at,
                    seconds_executing=0.0 if code is None else time.monotonic() - sampled_at,
                )
            )
            if code is None:
                # A turn cut before it came to its code did not decide to end.
                ended = EpisodeEnd.RESPONSE_LIMIT if cut else EpisodeEnd.FINISHED
                break
            if output is None:
                ended = lost
                break
            if len(turns) >= config.max_turns:
                ended = EpisodeEnd.TURN_LIMIT
                break
            glue = chat.after_turn(sample.token_ids, output)
            if tokens.response_length + len(glue) >= config.max_response_length:
                ended = EpisodeEnd.RESPONSE_LIMIT
                break
            tokens.add_glue(glue)
        return Trajectory(
            task_id=world.task.task_id,
            group=group,
            rollout=rollout,
            attempt=attempt,
            policy_version=policy_version,
            prompt=prompt,
            turns=tuple(turns),
            token_ids_T=np.array(tokens.ids, dtype=np.int32),
            sampled_T=np.array(tokens.sampled, dtype=np.bool_),
            logprob_T=np.array(tokens.logprobs, dtype=np.float32),
            step_T=np.array(tokens.steps, dtype=np.int32),
            prompt_length=tokens.prompt_length,
            ended=ended,
            started_at=started_at,
            ended_at=time.time(),
            error=error,
            engine=self._sampler.name,
        )


def end_of(crash: EnvironmentCrashed) -> EpisodeEnd:
    """How an episode has ended whose world was lost."""
    return EpisodeEnd.CRASHED if isinstance(crash, WorldBroken) else EpisodeEnd.SERVER_ERROR


class _Tokens:
    """The books of an episode: four lists of the same length, only ever appended to."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt_length = len(prompt)
        self.ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.steps: list[int] = []
        self.add_glue(prompt)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - self.prompt_length

    def add_sampled(self, ids: list[int], logprobs: list[float], step: int) -> None:
        """Append a turn of the policy."""
        if len(ids) != len(logprobs):
            raise ValueError(f"the engine returned {len(ids)} tokens but {len(logprobs)} log-probs")
        self._add(ids, True, logprobs, step)

    def add_glue(self, ids: list[int]) -> None:
        """Append what the policy did not sample."""
        self._add(ids, False, [0.0] * len(ids), GAP)

    def _add(self, ids: list[int], sampled: bool, logprobs: list[float], step: int) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.steps += [step] * len(ids)


def _turn_seed(seed: int, turn: int) -> int:
    digest = hashlib.sha256(f"{seed}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

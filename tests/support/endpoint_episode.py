"""An episode behind a real endpoint, whose policy is a stand-in that says the lines of a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
import openai

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample
from draco_ray.records import EpisodeEnd, Task, Trajectory
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.server import Endpoint
from draco_ray.rollout.tokens import TokenPolicy
from tests.support.tool_call_reader import ToolCallReaderMixin
from tests.support.tool_templates import QWEN25, tool_tokenizer

TOKENIZER = tool_tokenizer(QWEN25)
CHAT = ChatTokenizer(TOKENIZER, thinking=False)
TASK = Task(task_id="abc_1", instruction="Refund order A1.")
REQUEST = RolloutRequest(task_id="abc_1", group="step1/abc_1", rollout=2, attempt=0, seed=5)
END = "<|im_end|>"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "refund",
        "description": "Refunds an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
    },
}


def call(name: str = "refund", **arguments: object) -> str:
    """A turn of the policy that calls a tool, in the template's form."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@dataclass
class ScriptedSampler(ToolCallReaderMixin):
    """A stand-in for the policy engine: says the next line of a script, or what a function makes of the prompt."""

    lines: list[str] | Callable[[str], str]
    name: str = "scripted"
    asked: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    version: int = 3
    hold: asyncio.Event | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    chat: ChatTokenizer = CHAT

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        index = len(self.asked)
        self.asked.append(token_ids)
        self.begun.set()
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        said = self.lines(TOKENIZER.decode(token_ids)) if callable(self.lines) else self.lines[index]
        ids = encoded(said)[:max_tokens]
        self.sampled.append(ids)
        stopped = bool(ids) and ids[-1] == CHAT.end_of_turn_id
        logprobs = [-0.5 - 0.001 * place - 0.1 * index for place in range(len(ids))]
        finish = "stop" if stopped else "length"
        return Sample(token_ids=ids, logprobs=logprobs, finish_reason=finish, policy_version=self.version)


@dataclass
class ServedEpisode:
    """One episode while it is served."""

    episode: Episode
    sampler: ScriptedSampler
    base_url: str
    endpoint: Endpoint

    @cached_property
    def openai(self) -> Any:
        """OpenAI's own client for the episode; typed Any, because its types allow no plain dictionaries."""
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.episode.key, max_retries=0)

    async def post(self, path: str, content: bytes | str, key: str | None = None) -> httpx.Response:
        """A bare request."""
        headers = {b"authorization": f"Bearer {self.episode.key if key is None else key}".encode()}
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=None) as client:
            return await client.post(self.base_url + path, content=content, headers=headers)

    def trajectory(self) -> Trajectory:
        """The rollout, after `check_recorded_tokens`."""
        played = self.episode.trajectory(EpisodeEnd.FINISHED, None, prompt=(), closing="")
        check_recorded_tokens(played, self.sampler)
        return played


@asynccontextmanager
async def serve_episode(
    lines: list[str] | Callable[[str], str], chat: ChatTokenizer = CHAT, **overrides: object
) -> AsyncIterator[ServedEpisode]:
    """A served episode whose policy says ``lines``; ``overrides`` are of `AgentConfig`."""
    config = AgentConfig.model_validate({"thinking": False, **overrides})
    sampler, endpoint = ScriptedSampler(lines), Endpoint()
    episode = Episode(REQUEST, TokenPolicy(sampler, chat, config), config)
    try:
        async with endpoint.serving(episode) as base_url:
            at = ServedEpisode(episode, sampler, base_url, endpoint)
            yield at
            await at.openai.close()
    finally:
        await endpoint.stop()


def check_recorded_tokens(played: Trajectory, sampler: ScriptedSampler) -> None:
    """Check that every sample is recorded once, after exactly the tokens that the policy saw."""
    spoken = [turn for turn in played.turns if turn.tokens]
    assert sum(turn.last_token - turn.first_token for turn in spoken) == int(played.sampled_T.sum())
    seen = [(prompt, said) for prompt, said in zip(sampler.asked, sampler.sampled, strict=False)]
    for turn in spoken:
        begin = played.branches[turn.branch]
        span = slice(turn.first_token, turn.last_token)
        assert played.sampled_T[span].all()
        said = played.token_ids_T[span].tolist()
        before = played.token_ids_T[begin : turn.first_token].tolist()
        found = next(each for each in seen if each[0] == before and each[1][: len(said)] == said)
        seen.remove(found)
    assert (played.logprob_T[~played.sampled_T] == 0).all()
    assert (played.logprob_T[played.sampled_T] < 0).all()
    for index, step in enumerate(played.steps):
        assert set(played.step_T[step.first_token : step.last_token].tolist()) == {index}

"""Policies that sample from engines of this run, token-in and token-out: exactly the sampled tokens are recorded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample, Sampler
from draco_ray.engine.tool_calls import ParsedToolCalls, check_tool_calls_parsable
from draco_ray.records import GAP, TOOLS, Message, Usage
from draco_ray.rollout.agent import Policy, PolicyTurn, RolloutRequest, TokenRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicies:
    """Creates the policies of a rollout worker, one per engine; the driver sends this object to the worker."""

    samplers: Sequence[Sampler]
    tokenizer: Any
    """The model's tokenizer; sent to workers because loading it there would import PyTorch."""

    def __call__(self, agent: AgentConfig) -> list[Policy]:
        """The policies, in the order of the engines."""
        chat = ChatTokenizer(self.tokenizer, thinking=agent.thinking)
        return [TokenPolicy(sampler, chat, agent) for sampler in self.samplers]


class TokenPolicy:
    """A policy that samples from one engine."""

    def __init__(self, sampler: Sampler, chat: ChatTokenizer, config: AgentConfig) -> None:
        self.sampler = sampler
        self.chat = chat
        self.config = config

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.sampler.name

    async def read_calls(self, text: str, tools: str) -> ParsedToolCalls | None:
        """Parse the tool calls of a turn; ``tools``: JSON array of function schemas. Raises: ConfigError."""
        parser, thinking = self.config.tool_parser, self.config.thinking
        return await self.sampler.read_calls(text, tools, parser=parser, thinking=thinking)

    def begin(self, prompt: tuple[Message, ...], request: RolloutRequest) -> TokenConversation:
        """See `Policy`. A prompt that is too long is left-truncated; training tasks with such prompts are left out."""
        tokens = self.chat.prompt(prompt)[-self.config.max_prompt_length :]
        tools = next((message.content for message in prompt if message.role == TOOLS), None)
        if tools is not None:
            check_tool_calls_parsable(self.chat, self.config.tool_parser)
        return TokenConversation(self, tokens, tools, request.seed)


@dataclass(kw_only=True, eq=False)
class TokenSequence:
    """A sequence of tokens: four append-only lists of the same length."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None, step: int = GAP) -> tuple[int, int]:
        """Append tokens. ``logprobs``: those of sampled tokens; None if the tokens are context.

        Returns: the position of the first appended token, and the position after the last one.
        """
        first = len(self.ids)
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.steps += [step] * len(ids)
        return first, len(self.ids)


def join_token_sequences(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    """The token arrays of a `Trajectory` that consists of these sequences, one after another."""
    return {
        "token_ids_T": np.array([token for each in sequences for token in each.ids], dtype=np.int32),
        "sampled_T": np.array([flag for each in sequences for flag in each.sampled], dtype=np.bool_),
        "logprob_T": np.array([value for each in sequences for value in each.logprobs], dtype=np.float32),
        "step_T": np.array([step for each in sequences for step in each.steps], dtype=np.int32),
    }


def beginnings(sequences: Sequence[TokenSequence]) -> list[int]:
    """The position of each sequence's first token in `join_token_sequences`."""
    return [0, *itertools.accumulate(len(each.ids) for each in sequences)][: len(sequences)]


class TokenConversation:
    """The tokens of an episode."""

    def __init__(self, policy: TokenPolicy, prompt: list[int], tools: str | None, seed: int) -> None:
        """Begin an episode.

        Args:
            prompt: its tokens.
            tools: a JSON array of function schemas, if the prompt lists any.
            seed: seeds of turns are derived from it and the turn's number.
        """
        self._policy = policy
        self._chat, self._config = policy.chat, policy.config
        self._tools = tools
        self._seed = seed
        self._prompt_length = len(prompt)
        self._tokens = TokenSequence()
        self._tokens.add(prompt)
        self._turn: Sample | None = None
        self._calls: list[str] = []
        self._thinking = policy.chat.opens_thinking
        self._spans: list[tuple[int, int]] = []
        self._policy_version: int | None = None

    async def sample(self) -> PolicyTurn:
        """See `Conversation`. Raises: EngineError."""
        room = self._config.max_response_length - self._response_length
        self._turn = sample = await self._policy.sampler.sample(
            list(self._tokens.ids),
            max_tokens=min(self._config.max_turn_tokens or room, room),
            seed=turn_seed(self._seed, len(self._spans)),
        )
        if len(sample.token_ids) != len(sample.logprobs):
            raise ValueError(f"the engine returned {len(sample.token_ids)} tokens but {len(sample.logprobs)} log-probs")
        # Weights change within an episode only with train.staleness; the oldest version is recorded.
        self._policy_version = sample.policy_version if self._policy_version is None else self._policy_version
        text, cut, thinking = self._chat.text(sample.token_ids), sample.finish_reason == "length", self._thinking
        use = None if cut or self._tools is None else await self._policy.read_calls(text, self._tools)
        self._calls = [] if use is None else [call.name for call in use.calls]
        return PolicyTurn(text=text, cut=cut, opens_thinking=thinking, tool_use=use)

    def record_turn(self, step: int) -> tuple[int, int]:
        """See `Conversation`."""
        assert self._turn is not None
        self._spans.append(self._tokens.add(self._turn.token_ids, self._turn.logprobs, step))
        return self._spans[-1]

    def append_observation(self, observation: str) -> bool:
        """See `Conversation`."""
        assert self._turn is not None
        return self._append(self._chat.after_turn(self._turn.token_ids, observation))

    def append_results(self, results: Sequence[str]) -> bool:
        """See `Conversation`."""
        assert self._turn is not None
        return self._append(self._chat.after_calls(self._turn.token_ids, self._calls, results))

    def _append(self, glue: list[int]) -> bool:
        if self._response_length + len(glue) >= self._config.max_response_length:
            return False
        self._tokens.add(glue)
        return True

    def token_record(self) -> TokenRecord:
        """See `Conversation`.

        The usage is counted as by an API: each turn reads all previous tokens, and those up to the previous turn's end
        are cached.
        """
        usage = Usage(
            calls=len(self._spans),
            input_tokens=sum(first for first, _ in self._spans),
            cached_tokens=sum(last for _, last in self._spans[:-1]),
            output_tokens=sum(self._tokens.sampled),
        )
        return TokenRecord(
            **join_token_sequences([self._tokens]),
            prompt_length=self._prompt_length,
            policy_version=self._policy_version or 0,
            usage=usage,
        )

    @property
    def _response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self._tokens.ids) - self._prompt_length


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of one turn of a rollout."""
    digest = hashlib.sha256(f"{seed}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

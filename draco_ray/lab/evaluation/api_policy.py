"""An API model as policy: episodes are chat messages, and their lengths are the endpoint's token counts.

Rate limits and a budget in dollars can be set. If the budget is spent, the evaluation stops, and the cost of unfinished
rollouts is in no result. So the dollars spent are stored after every request (`SPENT_FILE`), and the same command
continues from that sum when it is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draco_ray.config.schema import AgentConfig, JudgeConfig, JudgeLimits
from draco_ray.errors import ConfigError
from draco_ray.judging.actors import LimiterActor, LimiterClient, start_limiter
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.limiter import Leases, RequestResult
from draco_ray.judging.outage import NextAction
from draco_ray.lab.files import write_atomically
from draco_ray.records import TOOLS, Message, Usage
from draco_ray.rollout.agent import Policy, PolicyTurn, RolloutRequest, TokenRecord

SPENT_FILE = "spent.json"
"""File of the evaluation directory with the dollars spent."""
_ATTEMPTS = 1_000
"""Upper bound on the attempts of a rollout, so that no two rollouts share a request number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPolicies:
    """Builds the policy in a rollout worker; serializable."""

    client: JudgeConfig
    """LiteLLM model, endpoint, limits, retries and prices."""
    priced: bool
    leases: Leases | None = None
    """Rate limiter; None: no limits."""

    def __call__(self, agent: AgentConfig) -> list[Policy]:
        """A list with the one policy."""
        from draco_ray.judging.client import LiteLLMClient

        client = LiteLLMClient(
            self.client, leases=self.leases, role="evaluated model", settings="--policy, --api-base, --api-key-env"
        )
        return [ChatPolicy(client, agent, self.client.model, self.priced)]


@dataclass(frozen=True, slots=True)
class ChatPolicy:
    """A policy behind a chat endpoint."""

    complete: Completer
    """Client of the model; limits the tokens of a turn."""
    config: AgentConfig
    """Limits of an episode."""
    name: str
    priced: bool
    """Whether the price of the model is known."""

    def begin(self, prompt: tuple[Message, ...], request: RolloutRequest) -> ChatConversation:
        """See `Policy`; the request's seed is not used, since endpoints do not guarantee seeds.

        Raises: ConfigError if the prompt lists tools.
        """
        if any(message.role == TOOLS for message in prompt):
            raise ConfigError(f"--policy {self.name}: a tool-calling agent needs a model directory, not an API model")
        vote = request.rollout * _ATTEMPTS + request.attempt
        return ChatConversation(self, list(prompt), vote)


@dataclass(slots=True)
class ChatConversation:
    """An episode in messages, without token ids.

    Lengths are the endpoint's token counts. The response (everything after the prompt) is the last turn's input minus
    the first turn's input plus the last turn's output. A turn that reaches ``agent.max_response_length`` ends the
    episode before its action is executed.
    """

    _policy: ChatPolicy
    _messages: list[Message]
    _vote: int
    _usage: Usage = field(default_factory=Usage)
    _first_input: int | None = None
    _text: str = ""

    async def sample(self) -> PolicyTurn:
        """See `Conversation`. Raises: JudgeUnavailable if no request can succeed (key rejected, model unknown)."""
        reply = await self._policy.complete(Request(messages=tuple(self._messages), vote=self._vote))
        self._usage += self._took(reply)
        self._text = reply.text
        if reply.error is not None:
            return PolicyTurn(text=reply.text, cut=False, error=f"the model did not answer: {reply.error}")
        self._first_input = reply.input_tokens if self._first_input is None else self._first_input
        length = reply.input_tokens - self._first_input + reply.output_tokens
        # If the endpoint reports no usage, the length is unknown.
        too_long = reply.usage_known and length >= self._policy.config.max_response_length
        return PolicyTurn(text=reply.text, cut=reply.cut, too_long=too_long)

    def record_turn(self, step: int) -> tuple[int, int]:
        """See `Conversation`: there are no tokens."""
        return 0, 0

    def append_observation(self, observation: str) -> bool:
        """See `Conversation`; a response that is too long is only detected at the next turn."""
        # Some endpoints reject empty messages.
        self._messages += [
            Message(role="assistant", content=self._text or "-"),
            Message(role="user", content=observation or "-"),
        ]
        return True

    def append_results(self, results: Sequence[str]) -> bool:
        """See `Conversation`; without tools there is one result."""
        return self.append_observation("\n".join(results))

    def token_record(self) -> TokenRecord:
        """See `Conversation`."""
        return TokenRecord(
            token_ids_T=np.zeros(0, dtype=np.int32),
            sampled_T=np.zeros(0, dtype=np.bool_),
            logprob_T=np.zeros(0, dtype=np.float32),
            step_T=np.zeros(0, dtype=np.int32),
            prompt_length=0,
            policy_version=0,
            usage=self._usage,
        )

    def _took(self, reply: Completion) -> Usage:
        return Usage(
            calls=1,
            requests=reply.requests,
            input_tokens=reply.input_tokens if reply.usage_known else 0,
            cached_tokens=reply.cached_tokens,
            output_tokens=reply.output_tokens if reply.usage_known else 0,
            dollars=reply.dollars if self._policy.priced or reply.dollars else None,
        )


class EvaluationLimiterActor(LimiterActor):
    """The limiter of an evaluation; stores the dollars spent after each request."""

    def __init__(self, config: JudgeConfig, book: Path) -> None:
        super().__init__(config, dollars_spent(book))
        self._book = book

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        """See `LimiterActor.settle`."""
        verdict = await super().settle(number, ended)
        write_atomically(self._book, json.dumps({"dollars": self.limiter.spent}))
        return verdict


def dollars_spent(book: Path) -> float:
    """Dollars that an evaluation has cost so far, including unfinished rollouts; 0 if none are recorded."""
    return float(json.loads(book.read_text(encoding="utf-8"))["dollars"]) if book.is_file() else 0.0


def start_evaluation_limiter(
    config: JudgeConfig, directory: Path, run_name: str
) -> tuple[object, LimiterClient] | None:
    """The limiter actor of an evaluation and its client for the workers; None if there are no limits.

    Args:
        config: configuration of the API model, with its ``limits``.
        directory: the evaluation directory.
        run_name: part of the actor's name.
    """
    if config.limits == JudgeLimits():
        return None
    return start_limiter(EvaluationLimiterActor, config, directory / SPENT_FILE, run_name)

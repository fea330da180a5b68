"""One episode of a client that tokenizes messages itself: it records the policy's samples by their whole sequence."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.sampler import Sample
from draco_ray.records import EpisodeEnd
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.turns import Refused, TokenRequest, no_turn_left, room_left
from draco_ray.rollout.tokens import TokenPolicy, turn_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One answer of the policy."""

    sample: Sample
    seconds: float


class TokenEpisode:
    """The requests of one client while it does one task."""

    def __init__(self, request: RolloutRequest, policy: TokenPolicy, config: AgentConfig) -> None:
        """Limits: ``max_turns`` turns, and ``max_prompt_length + max_response_length`` tokens per sequence."""
        self.key = f"policy-{secrets.token_urlsafe(24)}"
        """The model name in the episode's requests, which identifies it."""
        self.open = True
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, with the policy's exception, once the policy has failed."""
        # Mark the exception as retrieved, or asyncio would log it.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        self.refused: EpisodeEnd | None = None
        """The limit for which the last request was refused."""
        self.started_at = time.time()
        self._request, self._policy, self._config = request, policy, config
        self._asked = 0
        self._sampled: dict[bytes, Sampled] = {}

    @property
    def turns(self) -> int:
        """Number of the policy's turns so far."""
        return len(self._sampled)

    async def generate(self, request: TokenRequest) -> Sample:
        """Sample a continuation of a sequence. Raises: Refused; and whatever the policy raises."""
        if self._asked >= self._config.max_turns:
            self.refused = EpisodeEnd.TURN_LIMIT
            raise no_turn_left(self._config)
        known = len(self._policy.chat.tokenizer)
        if (highest := max(request.token_ids)) >= known:
            raise Refused(f"token_ids: {highest} is none of the {known} tokens of this model: is this its renderer?")
        try:
            room = room_left(self._config, len(request.token_ids))
        except Refused:
            self.refused = EpisodeEnd.RESPONSE_LIMIT
            raise
        self.refused = None
        self._asked += 1
        limits = (room, request.max_tokens, self._config.max_turn_tokens)
        seed, began = turn_seed(self._request.seed, self._asked), time.monotonic()
        try:
            sample = await self._policy.sampler.sample(
                request.token_ids, max_tokens=min(each for each in limits if each), seed=seed
            )
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        if not self.open:
            raise Refused("this episode has ended", status=410, code="episode_over")
        sample = _stopped(sample, request.stop_token_ids)
        self._sampled[_digest([*request.token_ids, *sample.token_ids])] = Sampled(
            sample=sample, seconds=time.monotonic() - began
        )
        return sample

    def find(self, token_ids: Sequence[int]) -> Sampled | None:
        """The sampled answer that ends a sequence, if the policy sampled it after exactly the tokens before it."""
        return self._sampled.get(_digest(token_ids))


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).digest()


def _stopped(sample: Sample, stops: frozenset[int]) -> Sample:
    """The sample truncated after the first stop token."""
    last = next((place for place, token in enumerate(sample.token_ids) if token in stops), None)
    if last is None or (last == len(sample.token_ids) - 1 and sample.finish_reason == "stop"):
        return sample
    return Sample(
        token_ids=sample.token_ids[: last + 1],
        logprobs=sample.logprobs[: last + 1],
        finish_reason="stop",
        policy_version=sample.policy_version,
    )

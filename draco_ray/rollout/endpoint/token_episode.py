"""One episode of a client that tokenizes messages itself: it records the policy's samples by their whole sequence."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.sampler import Sample
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.asking import AskingEpisode
from draco_ray.rollout.endpoint.turns import Refused, TokenRequest
from draco_ray.rollout.tokens import TokenPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One answer of the policy."""

    sample: Sample
    seconds: float


class TokenEpisode(AskingEpisode):
    """The requests of a client that sends whole sequences of tokens."""

    def __init__(self, request: RolloutRequest, policy: TokenPolicy, config: AgentConfig) -> None:
        """See `AskingEpisode`."""
        super().__init__(request, policy, config)
        # A secret, because it is also the key.
        self.name = f"policy-{secrets.token_urlsafe(24)}"
        self.started_at = time.time()
        self._answers: dict[bytes, Sampled] = {}

    @property
    def turns(self) -> int:
        """Number of the policy's turns so far."""
        return len(self._answers)

    async def generate(self, request: TokenRequest) -> Sample:
        """Sample a continuation of a sequence. Raises: Refused; and whatever the policy raises."""
        self._check_turns()
        known = len(self._policy.chat.tokenizer)
        if (highest := max(request.token_ids)) >= known:
            raise Refused(f"token_ids: {highest} is none of the {known} tokens of this model: is this its renderer?")
        self._check_length(len(request.token_ids))
        began = time.monotonic()
        with self._asking():
            sample = await self._sampled(request.token_ids, request.max_tokens)
        sample = _stopped(sample, request.stop_token_ids)
        self._answers[_digest([*request.token_ids, *sample.token_ids])] = Sampled(
            sample=sample, seconds=time.monotonic() - began
        )
        return sample

    def find(self, token_ids: Sequence[int]) -> Sampled | None:
        """The sampled answer that ends a sequence, if the policy sampled it after exactly the tokens before it."""
        return self._answers.get(_digest(token_ids))


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).digest()


def _stopped(sample: Sample, stops: frozenset[int]) -> Sample:
    """The sample truncated after the first stop token."""
    last = next((place for place, token in enumerate(sample.token_ids) if token in stops), None)
    if last is None or (last == len(sample.token_ids) - 1 and sample.finish_reason == "stop"):
        return sample
    return sample.cut(last + 1)

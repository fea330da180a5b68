"""What the episodes behind the endpoint share: their limits, and how they ask the policy."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.sampler import Sample
from draco_ray.records import EpisodeEnd
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.turns import Refused
from draco_ray.rollout.tokens import TokenPolicy, turn_seed


class AskingEpisode:
    """The requests of one client while it does one task."""

    def __init__(self, request: RolloutRequest, policy: TokenPolicy, config: AgentConfig) -> None:
        """Limits: ``max_turns`` turns, and ``max_prompt_length + max_response_length`` tokens per sequence."""
        self.open = True
        self.name = secrets.token_hex(8)
        """Identifies the episode in requests."""
        self.complaint: str | None = None
        """Why the last failed request for a turn got no answer."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, with the policy's exception, once the policy has failed."""
        # Mark the exception as retrieved, or asyncio would log it.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        self.refused: EpisodeEnd | None = None
        """The limit for which the last request was refused."""
        self._request, self._policy, self._config = request, policy, config
        self._requests = 0

    def _check_turns(self) -> None:
        """Raises: Refused: the episode has used up its turns."""
        if self._requests >= self._config.max_turns:
            self.refused = EpisodeEnd.TURN_LIMIT
            raise Refused(f"this episode has had its agent.max_turns={self._config.max_turns} turns", code="turn_limit")

    def _check_length(self, tokens: int) -> None:
        """Raises: Refused: a sequence of ``tokens`` tokens may not grow."""
        if tokens >= self._most_tokens:
            self.refused = EpisodeEnd.RESPONSE_LIMIT
            raise Refused(
                f"This model's maximum context length is {self._most_tokens} tokens. However, your messages resulted "
                f"in {tokens} tokens.",
                code="context_length_exceeded",
            )
        self.refused = None

    @property
    def _most_tokens(self) -> int:
        return self._config.max_prompt_length + self._config.max_response_length

    async def _sampled(self, token_ids: list[int], max_tokens: int | None) -> Sample:
        """The policy's continuation of a sequence, within the limits. Call it within `_asking`."""
        self._requests += 1
        limits = (self._most_tokens - len(token_ids), max_tokens, self._config.max_turn_tokens)
        return await self._policy.sampler.sample(
            token_ids,
            max_tokens=min(each for each in limits if each),
            seed=turn_seed(self._request.seed, self._requests),
        )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Keep an error of the policy in `failed`. Raises: Refused if the episode has ended meanwhile."""
        try:
            yield
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        if not self.open:
            raise Refused("this episode has ended", status=410, code="episode_over")

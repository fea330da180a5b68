"""The seam between the agent loop and whatever samples tokens for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from draco_ray.engine.tool_calls import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled continuation: token-out."""

    token_ids: list[int]
    """What was sampled, the end-of-turn token included when it was reached."""
    logprobs: list[float]
    """Natural-log probability of each sampled token under the sampling policy."""
    finish_reason: str
    """``stop`` when the end-of-turn token was sampled, ``length`` when the limit cut it."""
    policy_version: int


class Sampler(Protocol):
    """Token-in, token-out sampling; an episode stays on one sampler."""

    @property
    def name(self) -> str:
        """Identity of the engine, recorded with the trajectory."""
        ...

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        """Continue ``token_ids`` by at most ``max_tokens`` tokens with the current adapter."""
        ...

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ToolUse | None:
        """What a turn asks for (`draco_ray.engine.tool_calls.ToolCallReader.read`).

        It is read where vLLM is loaded anyway: its parsers take ten seconds and 600 MiB to import.

        Args:
            text: the turn as sampled.
            tools: a JSON array of function schemas.
            parser: ``agent.tool_parser``.
            thinking: ``agent.thinking``.

        Raises: ConfigError where the model's calls cannot be read.
        """
        ...

"""The agent of ``environment.use: verifiers``: verifiers plays with its own harness and samples from the policy."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.environments.base import World
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Message, Task, Trajectory
from draco_ray.rollout.agent import Policy, RolloutRequest, end_of, fill_agent_prompt
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.endpoint.token_episode import TokenEpisode
from draco_ray.rollout.tokens import EnginePolicies, TokenPolicy
from draco_ray.verifiers.traces import trajectory_of

_NOBODYS = {"SandboxError", "ToolsetError", "InterceptionError", "TunnelError", "ProviderError", "TaskError"}
"""Errors from verifiers' infrastructure or the taskset's code, which the policy did not cause."""


class VerifiersAgent:
    """Lets the environment play the episode, and records the policy's samples."""

    def __init__(self, policy: Policy, config: AgentConfig, template: str) -> None:
        """``policy`` must record tokens. Raises: ConfigError."""
        if not isinstance(policy, TokenPolicy):
            raise ConfigError(f"agent.use=verifiers: policy {policy.name} has no tokens to record")
        self._policy, self._config, self._template = policy, config, template

    @staticmethod
    def check(config: AgentConfig, policies: object) -> None:
        """Check the policies before workers are started. Raises: ConfigError: they use an API instead of engines."""
        if not isinstance(policies, EnginePolicies):
            raise ConfigError("agent.use=verifiers records tokens, so it needs a policy on an engine, not an API model")

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """See `Agent`: the task's prompt; a harness may add to it."""
        return fill_agent_prompt(self._template, task)

    async def run(self, world: World, request: RolloutRequest) -> Trajectory:
        """See `Agent`. Raises: what the policy raises; ConfigError: no episode can be played."""
        episode = TokenEpisode(request, self._policy, self._config)
        tokenizer = self._policy.chat.tokenizer.name_or_path
        played: dict[str, Any] = {"traces": [], "errors": [], "timeout": False}
        crash: EnvironmentCrashed | None = None
        async with shared_endpoint().serving(episode) as base_url:
            order = {
                "base_url": base_url,
                "model": episode.name,
                "tokenizer": os.path.abspath(tokenizer) if os.path.isdir(tokenizer) else tokenizer,
                "seconds": self._config.timeout_seconds,
            }
            playing = asyncio.ensure_future(world.act(json.dumps(order)))
            try:
                both: set[asyncio.Future[Any]] = {playing, episode.failed}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not playing.done():
                    episode.failed.result()
                played = json.loads(playing.result())
            except EnvironmentCrashed as error:
                crash = error
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
        if episode.failed.done():
            episode.failed.result()
        if "unusable" in played:
            raise ConfigError(f"verifiers: {played['unusable']}")
        ended, why = (end_of(crash), str(crash)) if crash is not None else _end(episode, played, self._config)
        trajectory = trajectory_of(
            played["traces"],
            episode,
            request=request,
            policy=self._policy,
            config=self._config,
            prompt=self.prompt(world.task),
            ended=ended,
            error=why,
        )
        if ended is EpisodeEnd.SERVER_ERROR or trajectory.sampled_T.any():
            return trajectory
        # The traces have nothing to judge or to learn from.
        lost = f"verifiers: the traces contain none of the policy's {episode.turns} turns"
        return replace(trajectory, ended=EpisodeEnd.SERVER_ERROR, error="; ".join(filter(None, [lost, why])))


def _end(episode: TokenEpisode, played: dict[str, Any], config: AgentConfig) -> tuple[EpisodeEnd, str | None]:
    """How the episode ended, and a reason unless it ended normally."""
    ours = [trace for trace in played["traces"] if trace["trainable"]]
    errors = [*played["errors"], *(error for trace in ours for error in trace["errors"] if not trace["ok"])]
    said = "; ".join(f"{error['type']}: {error['message']}" for error in errors) or None
    if played["timeout"] and not errors:
        said = (
            f"the episode did not end within its time limit (agent.timeout_seconds={config.timeout_seconds:g} at most)"
        )
    if not episode.turns and episode.refused is not None:
        return EpisodeEnd.SERVER_ERROR, "verifiers: the first prompt is too long; raise agent.max_prompt_length"
    if not episode.turns:
        return EpisodeEnd.SERVER_ERROR, f"verifiers sent no request to the policy: {said or 'the episode had no turn'}"
    if episode.refused is not None:
        return episode.refused, None
    if any(error["type"] in _NOBODYS for error in errors):
        return EpisodeEnd.SERVER_ERROR, f"verifiers: {said}"
    if errors or played["timeout"]:
        return EpisodeEnd.CRASHED, f"verifiers: {said}"
    stops = {trace["stop"] for trace in ours}
    if "max_turns" in stops:
        return EpisodeEnd.TURN_LIMIT, None
    if stops & {"max_input_tokens", "max_output_tokens", "max_total_tokens"}:
        return EpisodeEnd.RESPONSE_LIMIT, None
    return EpisodeEnd.FINISHED, None

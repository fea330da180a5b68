"""The agent of ``environment.use: verifiers``: verifiers plays with its own harness, which calls the endpoint."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.environments.base import World
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Message, Task, Trajectory
from draco_ray.rollout.agent import Policy, RolloutRequest, end_of, fill_agent_prompt
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.tokens import EnginePolicies, TokenPolicy

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
        episode = Episode(request, self._policy, self._config)
        played: dict[str, Any] = {"traces": [], "errors": [], "timeout": False}
        crash: EnvironmentCrashed | None = None
        async with shared_endpoint().serving(episode):
            order = {
                "base_url": shared_endpoint().shared_url,
                "model": episode.model,
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
        trained = {trace["id"] for trace in played["traces"] if trace["trainable"]}
        trajectory = episode.trajectory(
            ended,
            why,
            prompt=self.prompt(world.task),
            closing=_closing(played["traces"], why),
            sessions=trained,
            others=_others(played["traces"], trained & episode.sessions),
        )
        if ended is EpisodeEnd.SERVER_ERROR or trajectory.sampled_T.any():
            return trajectory
        # Without a sampled token the rollout can be neither judged nor trained on.
        lost = f"verifiers: the traces contain none of the policy's {episode.turns} turns"
        return replace(trajectory, ended=EpisodeEnd.SERVER_ERROR, error="; ".join(filter(None, [lost, why])))


def _others(traces: Sequence[Mapping[str, Any]], trained: set[str]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Messages of the traces whose id is not in ``trained``: (time of the monotonic clock, chat message) of each."""
    clock = time.time() - time.monotonic()
    for trace in traces:
        # The role "assistant" is reserved for the policy.
        role = "other agent" if trace["agent"] == "assistant" else trace["agent"]
        if trace["id"] not in trained:
            yield from ((said["at"] - clock, {**said["message"], "role": role}) for said in trace["said"])


def _closing(traces: Sequence[Mapping[str, Any]], why: str | None) -> str:
    stops = [f"{trace['agent']}: {trace['stop']}" for trace in traces if trace["stop"]]
    return "\n".join(["The episode has ended.", *stops, *filter(None, [why])])


def _end(episode: Episode, played: dict[str, Any], config: AgentConfig) -> tuple[EpisodeEnd, str | None]:
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

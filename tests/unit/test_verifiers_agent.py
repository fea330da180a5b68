"""Rollouts played by verifiers: which turns are the policy's, and how the episode ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.records import EpisodeEnd, Trajectory
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.endpoint.turns import TurnRequest
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.verifiers.agent import VerifiersAgent, _end
from tests.support.endpoint_episode import CHAT, END, REQUEST, ScriptedSampler, encoded
from tests.unit.test_program_agent import HandIn

CONFIG = AgentConfig(thinking=False)


def policy() -> TokenPolicy:
    sampler = ScriptedSampler(lambda prompt: f"turn {len(sampler.asked)}.{END}")
    return TokenPolicy(sampler, CHAT, CONFIG)


def trace(agent: str, *, trainable: bool = True, **more: Any) -> dict[str, Any]:
    """A trace as the bridge sends it, of a session with the agent's name."""
    told = {"id": agent, "agent": agent, "trainable": trainable, "ok": True, "stop": None, "errors": [], "said": []}
    return {**told, **more}


@dataclass
class Plays(HandIn):
    """A stand-in for verifiers: each of its ``agents`` speaks in turn; those in ``elsewhere`` ask another model."""

    agents: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    traces: list[dict[str, Any]] = field(default_factory=list)
    timeout: bool = False

    async def act(self, action: str) -> str:
        order = json.loads(action)
        for agent in self.agents:
            text = f"{agent} elsewhere"
            if agent not in self.elsewhere:
                body = {"model": order["model"], "messages": [{"role": "user", "content": f"You are {agent}."}]}
                async with httpx.AsyncClient(trust_env=False, verify=False, timeout=300) as client:
                    url, headers = f"{order['base_url']}/chat/completions", {"X-Session-ID": agent}
                    answer = await client.post(url, json=body, headers=headers)
                text = answer.json()["choices"][0]["message"]["content"]
            said = {"at": time.time(), "message": {"content": text, "tool_calls": []}}
            for each in self.traces:
                each["said"] += [said] if each["id"] == agent else []
        return json.dumps({"traces": self.traces, "errors": [], "timeout": self.timeout})


async def play(world: Plays) -> tuple[Trajectory, ScriptedSampler]:
    asked = policy()
    try:
        played = await VerifiersAgent(asked, CONFIG, "{task_description}").run(world, REQUEST)
    finally:
        await shared_endpoint().stop()
    assert isinstance(asked.sampler, ScriptedSampler)
    return played, asked.sampler


async def test_turns_are_the_policys_if_it_said_them_and_their_agent_is_trained() -> None:
    call = {"function": {"name": "rate", "arguments": '{"points": 1}'}}
    rated = {"at": time.time() + 1000, "message": {"content": "", "tool_calls": [call]}}
    traces = [
        trace("player", stop="agent_completed"),
        trace("critic", trainable=False),
        trace("guest"),
        trace("assistant", trainable=False),
        trace("judge", trainable=False, said=[rated]),
    ]
    world = Plays(
        agents=("critic", "player", "guest", "assistant", "player", "retried"), elsewhere=("guest",), traces=traces
    )
    played, sampler = await play(world)
    assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None)
    # The critic's and the assistant's turns are of the same model, the guest's of another one, and nobody knows of the
    # attempt that verifiers has repeated.
    assert [(turn.role, turn.text) for turn in played.turns] == [
        ("critic", "turn 1."),
        ("user", "You are player."),
        ("assistant", "turn 2."),
        ("guest", "guest elsewhere"),
        ("other agent", "turn 3."),
        ("context", "(1 messages as before)"),
        ("assistant", "turn 4."),
        ("judge", '{"name": "rate", "arguments": "{\\"points\\": 1}"}'),
        ("program", "The episode has ended.\nplayer: agent_completed"),
    ]
    assert len(sampler.asked) == 5
    tokens = sampler.asked[1] + sampler.sampled[1] + sampler.asked[3] + sampler.sampled[3]
    assert played.token_ids_T.tolist() == tokens
    assert int(played.sampled_T.sum()) == len(encoded(f"turn 2.{END}turn 4.{END}"))
    assert played.prompt_length == len(sampler.asked[1])
    assert {turn.policy_version for turn in played.steps} == {3}
    assert all(turn.first_token == turn.last_token for turn in played.turns if turn.role != "assistant")


@pytest.mark.parametrize("traces", [[], [trace("player", trainable=False)]])
async def test_traces_without_the_policys_turns_are_no_rollout(traces: list[dict[str, Any]]) -> None:
    played, _ = await play(Plays(agents=("player",), traces=traces, timeout=True))
    assert played.ended is EpisodeEnd.SERVER_ERROR
    assert str(played.error).startswith(
        "verifiers: the traces contain none of the policy's 1 turns; verifiers: the episode did not"
    )
    assert len(played.token_ids_T) == 0


async def test_an_episode_without_a_turn_is_lost() -> None:
    episode = Episode(REQUEST, policy(), CONFIG)
    ended, why = _end(episode, {"traces": [], "errors": [], "timeout": False}, CONFIG)
    assert ended is EpisodeEnd.SERVER_ERROR
    assert why == "verifiers sent no request to the policy: the episode had no turn"
    episode.refused = EpisodeEnd.RESPONSE_LIMIT
    ended, why = _end(episode, {"traces": [], "errors": [], "timeout": False}, CONFIG)
    assert ended is EpisodeEnd.SERVER_ERROR
    assert why == "verifiers: the first prompt is too long; raise agent.max_prompt_length"


@pytest.mark.parametrize(
    ("error", "stop", "timeout", "ended"),
    [
        (None, "agent_completed", False, EpisodeEnd.FINISHED),
        (None, "max_turns", False, EpisodeEnd.TURN_LIMIT),
        (None, "max_total_tokens", False, EpisodeEnd.RESPONSE_LIMIT),
        (None, None, True, EpisodeEnd.CRASHED),
        ("HarnessError", None, False, EpisodeEnd.CRASHED),
        ("EnvError", None, False, EpisodeEnd.CRASHED),
        ("TaskError", None, False, EpisodeEnd.SERVER_ERROR),
        ("SandboxError", None, False, EpisodeEnd.SERVER_ERROR),
        ("ProviderError", None, False, EpisodeEnd.SERVER_ERROR),
    ],
)
async def test_how_an_episode_counts(error: str | None, stop: str | None, timeout: bool, ended: EpisodeEnd) -> None:
    episode = Episode(REQUEST, policy(), CONFIG)
    await episode.answer(TurnRequest(messages=({"role": "user", "content": "Do it."},)))
    errors = [{"type": error, "message": "said so"}] if error else []
    traces = [trace("player", stop=stop, ok=error is None, errors=errors)]
    found, why = _end(episode, {"traces": traces, "errors": [], "timeout": timeout}, CONFIG)
    assert found is ended
    assert (why is None) == (error is None and not timeout)
    # A limit of the run's counts, whatever its refusal has led to.
    episode.refused = EpisodeEnd.TURN_LIMIT
    assert _end(episode, {"traces": traces, "errors": [], "timeout": timeout}, CONFIG) == (EpisodeEnd.TURN_LIMIT, None)

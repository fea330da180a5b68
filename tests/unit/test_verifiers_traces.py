"""Traces of verifiers as trajectories: every sampled token once, branches by the rule of every agent's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.sampler import Sample
from draco_ray.records import EpisodeEnd, Message, Trajectory
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.endpoint.token_episode import TokenEpisode
from draco_ray.rollout.endpoint.turns import TokenRequest
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.verifiers.agent import VerifiersAgent, _end
from draco_ray.verifiers.traces import trajectory_of
from tests.support.endpoint_episode import CHAT, END, REQUEST, ScriptedSampler, encoded
from tests.unit.test_program_agent import HandIn

PROMPT = (Message(role="user", content="Do it."),)


class Traced:
    """An episode whose traces are written as verifiers would write them, its policy a script's."""

    def __init__(self, **settings: Any) -> None:
        self.config = AgentConfig(thinking=False, max_turns=1000, **settings)
        self.sampler = ScriptedSampler(lambda prompt: f"turn {len(self.sampler.asked)}.{END}")
        self.policy = TokenPolicy(self.sampler, CHAT, self.config)
        self.episode = TokenEpisode(REQUEST, self.policy, self.config)
        self.traces: list[dict[str, Any]] = []
        self._at = 0

    def trace(self, agent: str = "agent", *, trainable: bool = True) -> int:
        told = {"agent": agent, "trainable": trainable, "ok": True, "stop": None, "errors": []}
        self.traces.append({**told, "nodes": []})
        return len(self.traces) - 1

    def says(self, trace: int, parent: int | None, role: str, text: str, **more: Any) -> int:
        return self._node(trace, parent, role, text, encoded(f"{role}: {text}"), [], **{"sampled": False, **more})

    async def policy_says(self, trace: int, parent: int | None, *, trained: bool = True) -> int:
        ids: list[int] = []
        at = parent
        while at is not None:
            node = self.traces[trace]["nodes"][at]
            ids, at = node["tokens"] + ids, node["parent"]
        opens = encoded("assistant:")
        ask = TokenRequest(token_ids=[*ids, *opens], max_tokens=None, stop_token_ids=frozenset(), request_id="")
        sample = await self.episode.generate(ask)
        text = CHAT.text(sample.token_ids)
        return self._node(trace, parent, "assistant", text, opens, sample, sampled=True, trained=trained)

    def _node(
        self, trace: int, parent: int | None, role: str, text: str, context: list[int], sample: Any, **more: Any
    ) -> int:
        said: list[int] = sample.token_ids if isinstance(sample, Sample) else []
        node: dict[str, Any] = {
            "parent": parent,
            "role": role,
            "name": None,
            "text": text,
            "calls": [],
            "tools": [],
            "trained": True,
        }
        self._at += 1
        self.traces[trace]["nodes"].append({**node, "tokens": [*context, *said], "at": float(self._at), **more})
        return len(self.traces[trace]["nodes"]) - 1

    def trajectory(self) -> Trajectory:
        played = trajectory_of(
            self.traces,
            self.episode,
            request=REQUEST,
            policy=self.policy,
            config=self.config,
            prompt=PROMPT,
            ended=EpisodeEnd.FINISHED,
            error=None,
        )
        assert (played.logprob_T[~played.sampled_T] == 0).all()
        for index, step in enumerate(played.steps):
            assert set(played.step_T[step.first_token : step.last_token].tolist()) == {index}
            begin = played.branches[step.branch]
            prompt, said = np.split(played.token_ids_T[begin : step.last_token], [step.first_token - begin])
            assert (prompt.tolist(), said.tolist()) in zip(self.sampler.asked, self.sampler.sampled, strict=True)
        return played


async def test_a_conversation_is_one_branch_and_what_came_back_is_the_output() -> None:
    at = Traced()
    trace = at.trace()
    first = await at.policy_says(trace, at.says(trace, None, "user", "Do it."))
    tool = at.says(trace, first, "tool", "Found.", name="search")
    more = at.says(trace, tool, "user", "Go on.")
    await at.policy_says(trace, more)
    played = at.trajectory()
    assert played.branches == (0,)
    assert [turn.role for turn in played.turns] == ["assistant", "assistant", "program"]
    assert [step.observation for step in played.steps] == ["(1) search: Found.\n(2) user: Go on.", None]
    assert int(played.sampled_T.sum()) == sum(map(len, at.sampler.sampled))
    assert {turn.policy_version for turn in played.steps} == {3}
    assert played.prompt_length == len(at.sampler.asked[0])
    assert played.token_ids_T.tolist() == [*at.sampler.asked[1], *at.sampler.sampled[1]]


async def test_a_history_that_is_cut_short_opens_a_branch_whose_context_is_not_trained_on() -> None:
    at = Traced()
    trace = at.trace()
    asked = at.says(trace, None, "user", "Do it.")
    first = await at.policy_says(trace, asked)
    second = await at.policy_says(trace, at.says(trace, first, "user", "More."))
    await at.policy_says(trace, at.says(trace, first, "user", "Otherwise."))
    await at.policy_says(trace, at.says(trace, second, "user", "And then."))
    played = at.trajectory()
    assert len(played.branches) == 2
    assert [turn.branch for turn in played.steps] == [0, 0, 1, 0]
    assert int(played.sampled_T.sum()) == sum(map(len, at.sampler.sampled))
    shown = [(turn.role, turn.text) for turn in played.turns if turn.action is None]
    assert shown[:2] == [("context", "(2 messages as before)"), ("user", "Otherwise.")]


async def test_who_is_not_trained_is_no_turn_of_the_policys() -> None:
    at = Traced()
    judge, player = at.trace("judge", trainable=False), at.trace("player")
    await at.policy_says(judge, at.says(judge, None, "user", "Judge."))
    first = await at.policy_says(player, at.says(player, None, "user", "Do it."))
    # A compaction that came to nothing.
    await at.policy_says(player, at.says(player, first, "user", "Summarise."), trained=False)
    # What the harness put into the policy's mouth, and a turn of another model.
    forged = at.says(player, first, "assistant", "I did it.")
    other = at.says(player, forged, "assistant", "Not ours.", sampled=True)
    await at.policy_says(player, at.says(player, other, "user", "Go on."))
    played = at.trajectory()
    assert len(played.steps) == 2
    assert int(played.sampled_T.sum()) == len(at.sampler.sampled[1]) + len(at.sampler.sampled[3])
    roles = [turn.role for turn in played.turns]
    assert roles[:2] == ["judge", "assistant"]
    assert "player" in roles
    assert all(turn.first_token == turn.last_token for turn in played.turns if turn.role != "assistant")


async def test_requests_that_a_rule_names_are_side_calls() -> None:
    at = Traced(side_calls=("^Name this", "^Summarise"))
    title, work = at.trace(), at.trace()
    named = at.says(title, at.says(title, None, "system", "Name this conversation."), "user", "Do it.")
    await at.policy_says(title, named)
    first = await at.policy_says(work, at.says(work, None, "user", "Do it."))
    summary = await at.policy_says(work, at.says(work, first, "user", "Summarise."))
    await at.policy_says(work, at.says(work, summary, "user", "Go on."))
    played = at.trajectory()
    assert [step.text for step in played.steps] == ["turn 2.", "turn 4."]
    assert int(played.sampled_T.sum()) == sum(map(len, at.sampler.sampled))


async def test_tools_stand_once_before_the_first_turn() -> None:
    at = Traced()
    tools = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}]
    for _ in range(2):
        trace = at.trace()
        await at.policy_says(trace, at.says(trace, None, "user", "Do it.", tools=tools))
    played = at.trajectory()
    assert [turn.role for turn in played.turns] == ["tools", "assistant", "assistant", "program"]
    assert len(played.branches) == 2


async def test_an_episode_without_a_turn_is_empty() -> None:
    at = Traced()
    played = at.trajectory()
    assert (len(played.token_ids_T), played.branches, played.steps) == (0, (0,), ())
    ended, why = _end(at.episode, {"traces": [], "errors": [], "timeout": False}, at.config)
    assert ended is EpisodeEnd.SERVER_ERROR
    assert why == "verifiers sent no request to the policy: the episode had no turn"
    at.episode.refused = EpisodeEnd.RESPONSE_LIMIT
    ended, why = _end(at.episode, {"traces": [], "errors": [], "timeout": False}, at.config)
    assert ended is EpisodeEnd.SERVER_ERROR
    assert why == "verifiers: the first prompt is too long; raise agent.max_prompt_length"


async def test_traces_without_the_policys_turns_are_no_rollout() -> None:
    class Forgets(HandIn):
        async def act(self, action: str) -> str:
            order = json.loads(action)
            body = {"model": order["model"], "token_ids": encoded("Do it."), "sampling_params": {"max_tokens": 50}}
            async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                url = order["base_url"].removesuffix("/v1") + "/inference/v1/generate"
                assert (await client.post(url, json=body)).status_code == 200
            return json.dumps({"traces": [], "errors": [], "timeout": True})

    at = Traced()
    try:
        played = await VerifiersAgent(at.policy, at.config, "{task_description}").run(Forgets(), REQUEST)
    finally:
        await shared_endpoint().stop()
    assert played.ended is EpisodeEnd.SERVER_ERROR
    assert str(played.error).startswith(
        "verifiers: the traces contain none of the policy's 1 turns; verifiers: the episode did not"
    )


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
    at = Traced()
    trace = at.trace()
    await at.policy_says(trace, at.says(trace, None, "user", "Do it."))
    at.traces[0] |= {"stop": stop, "ok": error is None}
    at.traces[0]["errors"] = [{"type": error, "message": "said so"}] if error else []
    found, why = _end(at.episode, {"traces": at.traces, "errors": [], "timeout": timeout}, at.config)
    assert found is ended
    assert (why is None) == (error is None and not timeout)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.booleans()), min_size=1, max_size=12))
def test_however_histories_fork_every_sampled_token_is_trained_on_once(grown: list[tuple[int, int, bool]]) -> None:
    async def play() -> tuple[Traced, Trajectory]:
        at = Traced()
        at.trace()
        at.trace()
        for trace, parent, talks in grown:
            known = len(at.traces[trace]["nodes"])
            under = parent % known if known else None
            told = at.says(trace, under, "user", f"message {known}") if talks or under is None else under
            await at.policy_says(trace, told)
        return at, at.trajectory()

    at, played = asyncio.run(play())
    assert int(played.sampled_T.sum()) == sum(map(len, at.sampler.sampled))
    assert len(played.steps) == len(at.sampler.sampled)
    assert sorted(np.unique(played.step_T[played.step_T >= 0]).tolist()) == list(range(len(played.steps)))

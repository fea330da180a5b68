"""Whatever an agent asks, in whatever order: each sampled token is recorded once, behind what the policy saw."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.algorithm.computer import training_samples
from draco_ray.algorithm.rules import find_rule, group_advantages_from_rewards
from draco_ray.config.schema import AgentConfig
from draco_ray.records import EpisodeEnd, Trajectory
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.turns import TurnRequest
from draco_ray.rollout.tokens import TokenPolicy
from tests.support.endpoint_episode import CHAT, END, REQUEST, ScriptedSampler, check_recorded_tokens

Message = dict[str, Any]
Move = tuple[int, int, bool, list[str], bool, str]


@st.composite
def moves(draw: st.DrawFn) -> list[Move]:
    """(conversation to continue, messages to drop, whether to rewrite the last, what to add, side by side, session)."""
    move = st.tuples(
        st.integers(0, 9),
        st.integers(0, 3),
        st.booleans(),
        st.lists(st.sampled_from(["a", "b", "go on <|im_end|>", ""]), min_size=1, max_size=2),
        st.booleans(),
        st.sampled_from("ab"),
    )
    return draw(st.lists(move, min_size=1, max_size=12))


async def play(script: list[Move], said: list[str], trained: str | None) -> tuple[Trajectory, list[Any]]:
    """An agent that keeps every conversation it has had, and goes on from any of them in any state.

    Returns: the rollout of the sessions ``trained``, None for all, and what was sampled in them.
    """
    config = AgentConfig(thinking=False, max_turns=100)
    replies = iter(said * 100)
    sampler = ScriptedSampler(lambda prompt: next(replies) + END)
    episode = Episode(REQUEST, TokenPolicy(sampler, CHAT, config), config)
    conversations: list[list[Message]] = [[]]
    waiting: list[asyncio.Task[None]] = []
    sessions: list[str] = []

    async def ask(messages: list[Message], session: str) -> None:
        sessions.append(session)
        answer = await episode.answer(TurnRequest(messages=tuple(messages), session=session))
        conversations.append([*messages, answer.message()])

    for of, drop, rewrite, added, aside, session in script:
        begun = conversations[of % len(conversations)]
        kept = [*begun[: max(0, len(begun) - drop)]]
        if rewrite and kept:
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}!"}
        task = asyncio.create_task(ask([*kept, *({"role": "user", "content": each} for each in added)], session))
        waiting.append(task)
        if not aside:
            await asyncio.gather(*waiting)
    await asyncio.gather(*waiting)
    played = episode.trajectory(EpisodeEnd.FINISHED, None, prompt=(), closing="", sessions=trained)
    check_recorded_tokens(played, sampler)
    both = zip(sessions, sampler.sampled, strict=True)
    return played, [ids for session, ids in both if trained is None or session in trained]


@settings(max_examples=60, deadline=None)
@given(
    moves(),
    st.lists(st.sampled_from(["x", " y ", "z\n\n", ""]), min_size=1, max_size=3),
    st.sampled_from([None, "a", "ab"]),
)
def test_every_sampled_token_of_a_trained_session_is_trained_on_once_with_its_step(
    script: list[Move], said: list[str], trained: str | None
) -> None:
    played, sampled = asyncio.run(play(script, said, trained))
    assert int(played.sampled_T.sum()) == sum(map(len, sampled))
    assert len([turn for turn in played.turns if turn.role == "assistant"]) == len(sampled)
    assert int(played.tokens_M.sum()) <= int(played.sampled_T.sum())
    # Without tools only what came last, or side by side with the last, is no step, and an empty turn without an answer.
    if "" not in said and not any(move[4] for move in script):
        assert len(played.steps) >= len(sampled) - 1
    shares = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0]), [played.tokens_M] * 2, [1, 2], rule=find_rule("grpo"), std_epsilon=1e-6
    ).rollouts
    samples = training_samples(played, shares[1], credit=True)
    assert len(samples) == (len(played.branches) if sampled else 0)
    assert sum(int(sample.loss_mask_T.sum()) for sample in samples) == sum(map(len, sampled))
    if played.steps:
        total = sum(float(sample.advantage_T.sum()) for sample in samples)
        assert np.isclose(total, shares[1].advantage * int(played.tokens_M.sum()), rtol=1e-4)

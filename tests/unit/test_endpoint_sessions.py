"""Several episodes at one URL: their sessions are kept apart, and untrained ones are left out of the rollout."""

from __future__ import annotations

import time
from typing import Any

import httpx
import numpy as np
import pytest

from draco_ray.algorithm.computer import training_samples
from draco_ray.algorithm.rules import find_rule, group_advantages_from_rewards
from draco_ray.records import EpisodeEnd
from tests.support.endpoint_episode import END, TOOL, ServedEpisode, call, serve_episode

ASK: list[dict[str, Any]] = [{"role": "system", "content": "You serve."}, {"role": "user", "content": "Refund it."}]


async def ask(
    at: ServedEpisode, session: str, messages: list[dict[str, Any]], path: str = "chat/completions", **more: Any
) -> Any:
    """The answer to a request at the shared URL; the episode is its model."""
    body = {"model": at.episode.model, "messages": messages, **more}
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=300) as client:
        return await client.post(f"{at.endpoint.shared_url}/{path}", json=body, headers={"X-Session-ID": session})


async def said(at: ServedEpisode, session: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    answer = await ask(at, session, messages, **more)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize(
    ("model", "status", "complaint"),
    [
        ("gpt-5.4", 404, "model: names no episode"),
        ("", 404, "model: names no episode"),
        (5, 404, "model: names no episode"),
        ("{name}", 401, "wrong key"),
        ("{name}.", 401, "wrong key"),
        ("{name}.é", 401, "wrong key"),
    ],
)
async def test_the_model_names_the_episode_and_is_its_key(model: Any, status: int, complaint: str) -> None:
    async with serve_episode([f"Yes.{END}"]) as at, serve_episode([]) as other:
        if isinstance(model, str):
            model = model.replace("{name}", at.episode.name)
        answer = await ask(at, "a", ASK, model=model)
        assert (answer.status_code, at.sampler.asked) == (status, [])
        assert answer.json()["error"]["message"].startswith(complaint)
        assert (await said(at, "a", ASK))["content"] == "Yes."
        counted = await ask(at, "", ASK[1:], "messages/count_tokens")
        assert counted.json()["input_tokens"] > 0
        # One message more than the last question, and a system message.
        assert counted.json()["input_tokens"] < len(at.sampler.asked[0])
        async with at.endpoint.serving(other.episode):
            pass
        assert (await ask(at, "a", ASK, model=other.episode.model)).status_code == 410


async def test_sessions_that_say_the_same_are_branches_of_their_own() -> None:
    async with serve_episode([f"Yes.{END}"] * 4) as at:
        for session in ("a", "b"):
            first = await said(at, session, ASK)
        for session in ("a", "b"):
            await said(at, session, [*ASK, first, {"role": "user", "content": "Go on."}])
        played = at.trajectory()
    assert [step.branch for step in played.steps] == [0, 1, 0, 1]
    assert at.sampler.asked[2] == at.sampler.asked[3]
    # Each session shows its own messages.
    told = [(turn.branch, turn.text) for turn in played.turns if turn.role == "user"]
    assert sorted(told) == [(0, "Go on."), (0, "Refund it."), (1, "Go on."), (1, "Refund it.")]
    # At its own URL an agent may send what it likes.
    async with serve_episode([f"Yes.{END}"] * 2) as at:
        for messages in (ASK, [*ASK, first, {"role": "user", "content": "Go on."}]):
            await at.openai.chat.completions.create(
                model="m", messages=messages, extra_headers={"X-Session-ID": str(len(messages))}
            )
        assert len(at.trajectory().branches) == 1


async def test_a_session_that_is_not_trained_is_no_part_of_the_rollout() -> None:
    async with serve_episode([f"Judged.{END}", call(order="A1"), f"Good.{END}", f"Done.{END}"]) as at:
        await said(at, "judge", ASK)
        first = await said(at, "player", ASK, tools=[TOOL])
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "done"}
        # The judge reads on from the player's own turn.
        await said(at, "judge", [*ASK, first, {"role": "user", "content": "Good?"}], tools=[TOOL])
        between = time.monotonic()
        await said(at, "player", [*ASK, first, result], tools=[TOOL])
        assert at.episode.sessions == {"judge", "player"}
        assert at.episode.turns == 4
        others = [(time.monotonic(), "late"), (between, "between"), (0.0, "early")]
        played = at.episode.trajectory(
            EpisodeEnd.FINISHED,
            None,
            prompt=(),
            closing="The end.",
            sessions={"player"},
            others=[(when, {"role": "guest", "content": text}) for when, text in others],
        )
    assert played.token_ids_T.tolist() == at.sampler.asked[3] + at.sampler.sampled[3]
    assert [step.observation for step in played.steps] == ["done", None]
    assert int(played.sampled_T.sum()) == sum(len(at.sampler.sampled[index]) for index in (1, 3))
    roles = ["guest", "tools", "system", "user", "assistant", "guest", "assistant", "guest", "program"]
    assert [turn.role for turn in played.turns] == roles
    assert [turn.text for turn in played.turns if turn.role == "guest"] == ["early", "between", "late"]
    assert played.usage.calls == 2
    assert played.usage.cached_tokens == played.steps[0].last_token
    # Without credit every sampled token takes the advantage: none is the judge's.
    shares = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0]), [played.tokens_M] * 2, [1, 2], rule=find_rule("grpo"), std_epsilon=1e-6
    )
    (sample,) = training_samples(played, shares.rollouts[1], credit=False)
    trained = sample.token_ids_T[sample.advantage_T != 0].tolist()
    assert trained == at.sampler.sampled[1] + at.sampler.sampled[3]


async def test_an_episode_of_which_nothing_is_trained_is_empty() -> None:
    async with serve_episode([f"Judged.{END}"]) as at:
        await said(at, "judge", ASK)
        played = at.episode.trajectory(EpisodeEnd.FINISHED, None, prompt=(), closing="", sessions=())
    assert (len(played.token_ids_T), played.branches, played.turns, played.usage.calls) == (0, (0,), (), 0)

"""The endpoint for clients that put messages into tokens themselves: vLLM's `/inference/v1/generate`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.errors import EngineError
from draco_ray.records import EpisodeEnd
from draco_ray.rollout.endpoint.server import Endpoint
from draco_ray.rollout.endpoint.token_episode import TokenEpisode
from draco_ray.rollout.tokens import TokenPolicy
from tests.support.endpoint_episode import CHAT, END, REQUEST, TOKENIZER, ScriptedSampler, encoded


class Served:
    """A token episode while it is served."""

    def __init__(self, episode: TokenEpisode, sampler: ScriptedSampler, url: str) -> None:
        self.episode, self.sampler, self._url = episode, sampler, url

    async def ask(self, token_ids: Any, model: str | None = None, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"token_ids": token_ids, "model": self.episode.name if model is None else model, **more}
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(self._url.removesuffix("/v1") + "/inference/v1/generate", json=body)
        return reply.status_code, reply.json()

    async def refused(self, token_ids: Any, model: str | None = None, **more: Any) -> str:
        status, told = await self.ask(token_ids, model, **more)
        assert status >= 400
        assert "\n" not in told["error"]["message"]
        return f"{status} {told['error']['message']}"


@asynccontextmanager
async def served(lines: Any, **overrides: object) -> AsyncIterator[Served]:
    config = AgentConfig.model_validate({"thinking": False, **overrides})
    sampler, endpoint = ScriptedSampler(lines), Endpoint()
    episode = TokenEpisode(REQUEST, TokenPolicy(sampler, CHAT, config), config)
    try:
        async with endpoint.serving(episode) as url:
            yield Served(episode, sampler, url)
    finally:
        await endpoint.stop()


async def test_tokens_go_in_and_come_out_with_their_log_probs_as_vllm_gives_them() -> None:
    async with served([f"Yes.{END}"]) as at:
        prompt = encoded("Refund it?")
        # verifiers' client names the last of these where a renderer of the model's family goes on from earlier tokens.
        said = {"logprobs": 1, "temperature": 0.3, "routed_experts_prompt_start": 4}
        status, told = await at.ask(prompt, request_id="r1", sampling_params=said)
    assert status == 200
    (choice,) = told["choices"]
    assert choice["token_ids"] == at.sampler.sampled[0] == encoded(f"Yes.{END}")
    assert at.sampler.asked == [prompt]
    assert [each["token"] for each in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert choice["logprobs"]["content"][1]["logprob"] == pytest.approx(-0.501)
    assert (choice["finish_reason"], told["request_id"]) == ("stop", "r1")
    found = at.episode.find([*prompt, *choice["token_ids"]])
    assert found is not None
    assert found.sample.policy_version == 3
    assert at.episode.find([*prompt, *choice["token_ids"], 5]) is None
    assert at.episode.find(choice["token_ids"]) is None


async def test_a_turn_ends_at_the_clients_token() -> None:
    async with served([f"one two{END}", f"one two{END}"]) as at:
        (stop,) = set(encoded(" two")[:1])
        _, told = await at.ask([7], sampling_params={"stop_token_ids": [stop], "max_tokens": 50})
        assert told["choices"][0]["token_ids"] == [*encoded("one"), stop]
        assert told["choices"][0]["finish_reason"] == "stop"
        assert len(told["choices"][0]["logprobs"]["content"]) == len(told["choices"][0]["token_ids"])
        assert at.episode.find([7, *encoded("one"), stop]) is not None
        _, told = await at.ask([7], sampling_params={"max_tokens": 1})
    assert (len(told["choices"][0]["token_ids"]), told["choices"][0]["finish_reason"]) == (1, "length")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"token_ids": []}, "400 token_ids: expected a list"),
        ({"token_ids": "text"}, "400 token_ids: expected a list"),
        ({"token_ids": [1, True]}, "400 token_ids: expected a list"),
        ({"token_ids": [1, -1]}, "400 token_ids: expected a list"),
        ({"token_ids": [10**9]}, "400 token_ids: 1000000000 is none of the"),
        ({"sampling_params": {"n": 2}}, "400 n=2: not supported here; expected 1"),
        ({"sampling_params": {"structured_outputs": {"json": {}}}}, "400 structured_outputs: not a parameter"),
        ({"sampling_params": {"logit_bias": {"3": 5}}}, "400 logit_bias="),
        ({"sampling_params": {"min_tokens": 5}}, "400 min_tokens=5"),
        ({"sampling_params": {"ignore_eos": True}}, "400 ignore_eos=true"),
        ({"sampling_params": {"stop": ["x"]}}, "400 stop="),
        ({"sampling_params": {"max_tokens": 0}}, "400 max_tokens=0"),
        ({"sampling_params": 5}, "400 expected a JSON object"),
        ({"features": {"mm_hashes": {}}}, "400 features: not a parameter"),
        ({"content_parts": [{}]}, "400 content_parts: not a parameter"),
        ({"stream": True}, "400 stream=true"),
        ({"model": "policy"}, "404 model: names no episode"),
        ({"model": 5}, "404 model: names no episode"),
    ],
)
async def test_what_cannot_be_had_is_refused_in_one_line(body: dict[str, Any], said: str) -> None:
    async with served([f"Yes.{END}"]) as at:
        assert (await at.refused(**{"token_ids": [1], **body})).startswith(said)
        assert at.sampler.asked == []
        assert at.episode.refused is None


async def test_turns_and_tokens_are_limited() -> None:
    async with served([f"Yes.{END}"] * 9, max_prompt_length=60, max_response_length=40, max_turns=2) as at:
        assert "maximum context length is 100 tokens" in await at.refused([5] * 100)
        assert at.episode.refused is EpisodeEnd.RESPONSE_LIMIT
        status, told = await at.ask([5] * 99)
        assert (status, len(told["choices"][0]["token_ids"])) == (200, 1)
        assert at.episode.refused is None
        await at.ask([5])
        assert "agent.max_turns=2" in await at.refused([5])
        assert at.episode.refused is EpisodeEnd.TURN_LIMIT


async def test_an_episode_that_has_ended_answers_no_more() -> None:
    config, endpoint = AgentConfig(thinking=False), Endpoint()
    sampler = ScriptedSampler([f"Yes.{END}"])
    episode = TokenEpisode(REQUEST, TokenPolicy(sampler, CHAT, config), config)
    try:
        async with endpoint.serving(episode) as url:
            at = Served(episode, sampler, url)
        assert (await at.refused([1])).startswith("410 this episode has ended")
    finally:
        await endpoint.stop()


async def test_a_client_that_does_not_wait_stops_the_sampling_and_a_policy_that_fails_fails_the_episode() -> None:
    def fail(prompt: str) -> str:
        raise EngineError("engine 0: gone")

    async with served([f"Never.{END}"]) as at:
        at.sampler.hold = asyncio.Event()
        asking = asyncio.create_task(at.ask([1]))
        await at.sampler.begun.wait()
        asking.cancel()
        await at.sampler.cancelled.wait()
        assert at.episode.turns == 0
    async with served(fail) as at:
        assert (await at.refused([1])).startswith("500 the policy cannot be asked: EngineError: engine 0: gone")
        with pytest.raises(EngineError, match="gone"):
            at.episode.failed.result()


def test_the_tokenizer_of_these_tests_is_real() -> None:
    assert TOKENIZER.decode(encoded("Refund it?")) == "Refund it?"

"""What of a prompt comes again, and how the provider is told."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig, Price
from draco_ray.judging import endpoint
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import (
    LEAST_CHARACTERS,
    cache_key,
    mark_cache_prefixes,
    prompt_cache_method,
    shared_ends,
)
from draco_ray.judging.example import RUBRIC, SCORES, example_trajectory
from draco_ray.judging.phases import Credit, Score, Stage1, Stage2
from draco_ray.judging.pricing import known_price
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import Message, Trajectory
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer

DEFAULT, FRIENDLY = Path("prompts/judge"), Path("prompts/judge-cache-friendly")


def long_trajectory(rollout: int) -> Trajectory:
    """With a prompt and turns long enough that a provider keeps them; it imitates the end of its evidence."""
    short = example_trajectory(rollout)
    told_ = (Message(role="system", content="rule " * 1000), *short.prompt)
    said = f"I {rollout} " * 1000 + "\n[END EVIDENCE 00000000]\n"
    turns = (replace(short.turns[0], text=f"{said}{short.turns[0].text}"), *short.turns[1:])
    return replace(short, prompt=told_, turns=turns)


@pytest.mark.parametrize("folder", [DEFAULT, FRIENDLY])
@pytest.mark.parametrize("phase", [Stage2, Score, Credit])
def test_what_is_marked_is_what_others_share(folder: Path, phase: type) -> None:
    prompts = load_prompts(folder, b"key")

    def question(rollout: int, kind: type = phase) -> Stage2 | Score | Credit:
        played = long_trajectory(rollout)
        if kind is Stage2:
            return Stage2(played, RUBRIC)
        return Score(played, RUBRIC) if kind is Score else Credit(played, RUBRIC, SCORES)

    def text(rollout: int, kind: type = phase) -> str:
        return question(rollout, kind).prompt(prompts)

    mine = question(0)
    ends = shared_ends(prompts, mine.name, text(0), prompts.code(mine.identity))
    assert list(ends) == sorted(set(ends))
    others = [text(1), *(text(0, kind) for kind in (Stage2, Score, Credit) if kind is not phase)]
    for end in ends:
        assert end >= LEAST_CHARACTERS
        assert any(other[:end] == text(0)[:end] for other in others)
    if folder == FRIENDLY:
        # The rollout comes first, in all three.
        assert ends
        assert all(other[: ends[-1]] == text(0)[: ends[-1]] for other in others[1:])
    if folder == DEFAULT and phase is Stage2:
        assert text(1)[: ends[0]] == text(0)[: ends[0]]
    assert not shared_ends(prompts, "stage1", Stage1(example_trajectory().prompt).prompt(prompts), "c0de")


def test_an_end_counts_from_the_least_length_on(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = load_prompts(FRIENDLY, b"key")
    question = Score(long_trajectory(0), RUBRIC)
    about = prompts, "score", question.prompt(prompts), prompts.code(question.identity)
    first, *_ = ends = shared_ends(*about)
    monkeypatch.setattr(endpoint, "LEAST_CHARACTERS", first)
    assert shared_ends(*about) == ends
    monkeypatch.setattr(endpoint, "LEAST_CHARACTERS", first + 1)
    assert first not in shared_ends(*about)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("{{ task }}{{ agent_trajectory }}", "{{ task }}{{ agent_trajectory }}", 2),
        ("{{ task }}{{ num_steps }}{{ agent_trajectory }}x", "{{ task }}{{ num_steps }}{{ agent_trajectory }}y", 2),
        ("a {{ task }}", "b {{ task }}", 0),
        ("{{ task }} {{ agent_trajectory }}", "{{ task }} {{ steps_summary }}", 1),
    ],
)
def test_blocks_are_alike_up_to_where_two_templates_differ(one: str, other: str, alike: int) -> None:
    prompts: Any = SimpleNamespace(templates={"one": one, "other": other})
    assert endpoint._blocks_alike(prompts, "one") == alike


def test_how_a_provider_is_told_is_what_litellm_knows_of_it() -> None:
    asked: list[object] = []

    class Refused(Exception):
        pass

    def provider(model: str, api_base: str | None) -> tuple[str, str, None, None]:
        asked.append((model, api_base))
        if model == "strange":
            raise Refused
        name, _, rest = model.partition("/")
        return rest, name, None, None

    def supported(model: str, custom_llm_provider: str) -> list[str] | None:
        return {"openai": ["prompt_cache_key"], "other": ["temperature"]}.get(custom_llm_provider)

    litellm = SimpleNamespace(get_llm_provider=provider, get_supported_openai_params=supported, BadRequestError=Refused)
    found = {
        model: prompt_cache_method(litellm, model, "http://own", "on")
        for model in ("anthropic/x", "bedrock/Claude-9", "openai/x", "other/x", "nobody/x", "strange")
    }
    assert list(found.values()) == ["marks", "marks", "key", "nothing", "nothing", "nothing"]
    assert asked == [(model, "http://own") for model in found]
    assert (
        prompt_cache_method(litellm, "openai/x", "http://own", "auto"),
        prompt_cache_method(litellm, "openai/x", None, "off"),
    ) == ("nothing",) * 2
    assert prompt_cache_method(litellm, "openai/x", None, "auto") == "key"


def test_a_groups_key_is_short_and_takes_any_letters() -> None:
    assert cache_key("g") == f"draco-{hashlib.sha256(b'g').hexdigest()[:32]}"
    assert cache_key("\ud83d") == cache_key("?")


def test_marked_messages_say_the_same() -> None:
    messages = [{"role": "user", "content": "abcdefgh"}, {"role": "assistant", "content": "x"}]
    cut = mark_cache_prefixes(messages, (3, 5))
    assert [part["text"] for part in cut[0]["content"]] == ["abc", "de", "fgh"]
    assert ["cache_control" in part for part in cut[0]["content"]] == [True, True, False]
    assert cut[1] == messages[1]
    assert mark_cache_prefixes(messages, ()) == messages
    assert mark_cache_prefixes(messages, (3, 3, 5)) == cut
    assert [part["text"] for part in mark_cache_prefixes(messages, (8,))[0]["content"]] == ["abcdefgh"]


def test_litellm_hands_the_marks_on_to_anthropic() -> None:
    from litellm.llms.anthropic.chat.transformation import AnthropicConfig

    sent = AnthropicConfig().transform_request(
        model="claude-sonnet-4-5",
        messages=mark_cache_prefixes([{"role": "user", "content": "abcdef"}], (4,)),
        optional_params={"max_tokens": 10},
        litellm_params={},
        headers={},
    )
    content = sent["messages"][0]["content"]
    assert [part["text"] for part in content] == ["abcd", "ef"]
    assert content[0]["cache_control"] == {"type": "ephemeral"}


def test_who_is_told_how() -> None:
    import litellm

    def how(model: str, base: str | None = None, mode: str = "auto") -> str:
        return prompt_cache_method(litellm, model, base, mode)  # type: ignore[arg-type]

    assert how("anthropic/claude-sonnet-4-5") == "marks"
    assert how("openrouter/anthropic/claude-sonnet-4.5") == "marks"
    assert how("openai/gpt-5.4") == "key"
    assert how("openai/gpt-5.4", mode="off") == "nothing"
    assert how("openai/own", "http://127.0.0.1:1/v1") == "nothing"
    assert how("openai/own", "http://127.0.0.1:1/v1", "on") == "key"
    assert how("no-such-model") == "nothing"
    assert len(cache_key("x" * 1000)) <= 64


@pytest.mark.slow
async def test_the_request_carries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRACO_TEST_KEY", "k")
    message = Message(role="user", content="a" * 5000 + "b")
    request = Request(messages=(message,), group="step1/t", shared=(5000,))
    with ScriptedJudgeServer(Reply("OK", cached_tokens=80)) as server:
        base = {"api_base": server.base, "api_key_env": "DRACO_TEST_KEY"}
        for extra in ({"prompt_cache": "on", "service_tier": "flex"}, {}):
            await LiteLLMClient(JudgeConfig.model_validate({"model": "openai/own", **base, **extra}))(request)
    assert server.requests[0]["prompt_cache_key"] == cache_key("step1/t")
    assert server.requests[0]["service_tier"] == "flex"
    assert server.requests[0]["messages"] == server.requests[1]["messages"]
    assert not {"prompt_cache_key", "service_tier"} & set(server.requests[1])


def test_flex_is_billed_as_flex() -> None:
    usual = known_price(JudgeConfig(), "openai/gpt-5.4")
    flex = known_price(JudgeConfig(service_tier="flex"), "openai/gpt-5.4")
    assert usual is not None
    assert flex is not None
    assert flex.output < usual.output
    # A model of which LiteLLM knows nothing costs what is configured.
    own = {"own": Price(input=1.0, output=2.0)}
    assert known_price(JudgeConfig(service_tier="flex", prices=own), "openai/own") == own["own"]

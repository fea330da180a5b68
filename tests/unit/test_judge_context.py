"""The self-judge's context: full-length rollouts fit into what is reserved, or the run is refused with the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import litellm
import numpy as np
import pytest

from draco_ray.cli import main
from draco_ray.config.load import load_config
from draco_ray.config.schema import AgentConfig, JudgeConfig
from draco_ray.environments.appworld.environment import AppWorldEnvironment
from draco_ray.errors import ConfigError
from draco_ray.judging.judge_context import (
    LEAST_ROOM,
    JudgeContext,
    context_problem,
    judge_context,
    judge_context_length,
    max_judge_prompt_tokens,
    model_positions,
    self_judge_context_length,
    uses_self_judge,
)
from draco_ray.judging.labels import examples_of
from draco_ray.judging.phases import Credit, Union
from draco_ray.judging.prompts import load_prompts, load_static_rubric
from draco_ray.lab.planning.memory import GIB, engine_memory
from draco_ray.lab.planning.model_shape import model_shape
from draco_ray.records import EpisodeEnd, Message, Trajectory, Turn
from draco_ray.training.preflight import check_judge_context

SELF_JUDGES = ("self-judge", "self-judge-plain")
SONG = {"song_id": 0, "title": "Whispers of the Wind", "artists": [{"id": 3, "name": "Ada Lane"}], "like_count": 17}


def tokens(text: str) -> int:
    """By the tokenizer that LiteLLM brings along, of which those of the Qwen models are kin."""
    return len(litellm.encode(model="gpt-4", text=text))


def full_length(rollout: int, agent: AgentConfig) -> Trajectory:
    """As many turns as an episode may have, in as many tokens as a response may have, and one output more."""
    share = agent.max_response_length // agent.max_turns
    code = f"for page in range(9):\n    print(apis.spotify.show_song_library(page_index=page, of={rollout}))"
    turn = f"<think>I need every page of the library before I decide.</think>\n<code>\n{code}\n</code>"
    songs = json.dumps([SONG | {"song_id": number} for number in range(900)], indent=1)
    rate = tokens(songs) / len(songs)
    output = songs[: math.floor((share - tokens(turn)) / rate)]
    turns = [
        Turn(text=turn, action=code, observation=output, first_token=0, last_token=0)
        for _ in range(agent.max_turns - 1)
    ]
    last = Turn(text=turn, action=code, observation=songs[: agent.max_output_characters], first_token=0, last_token=0)
    assert 0.97 < tokens("".join(f"{t.text}{t.observation}" for t in turns)) / agent.max_response_length < 1.0
    return Trajectory(
        task_id="t_1",
        group="step1/t_1",
        rollout=rollout,
        attempt=0,
        policy_version=0,
        prompt=(),
        turns=(*turns, last),
        token_ids_T=np.zeros(0, dtype=np.int32),
        sampled_T=np.zeros(0, dtype=np.bool_),
        logprob_T=np.zeros(0, dtype=np.float32),
        step_T=np.zeros(0, dtype=np.int32),
        prompt_length=0,
        ended=EpisodeEnd.TURN_LIMIT,
        started_at=0.0,
        ended_at=0.0,
    )


@pytest.mark.parametrize("prompts", ["prompts/judge", "prompts/judge-cache-friendly"])
def test_the_union_of_six_full_rollouts_fits_into_what_is_reserved(prompts: str) -> None:
    config = load_config("qwen3.6-27b", [f"judge.prompts={prompts}"], "self-judge")
    songs = json.dumps(SONG)
    prompt = (Message(role="user", content=songs * (config.agent.max_prompt_length // tokens(songs))),)
    static = load_static_rubric(AppWorldEnvironment.static_rubric)
    candidates = [static[index % len(static)] for index in range(15 + 6 * 10)]
    rollouts = [full_length(rollout, config.agent) for rollout in range(config.algorithm.group_size)]
    needed = tokens(Union(prompt, candidates, rollouts).prompt(load_prompts(config.judge.prompts)))
    room = self_judge_context_length(config) - judge_context(config).reply
    assert 0.75 * room < needed < room


@pytest.mark.parametrize("setting", SELF_JUDGES)
def test_the_papers_model_has_room_for_it_and_its_engines_are_started_with_it(setting: str) -> None:
    config = load_config("qwen3.6-27b", [], setting)
    check_judge_context(config)
    assert 6 * 24_576 < self_judge_context_length(config) <= 262_144
    engine = engine_memory(config, model_shape(config.model.path), 80 * GIB, 2 * GIB)
    assert engine.length == self_judge_context_length(config)
    assert engine.sequences >= 1


@pytest.mark.parametrize("setting", SELF_JUDGES)
def test_a_model_whose_context_is_too_short_is_refused_with_the_numbers(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("qwen2.5-32b", [], setting)
    with pytest.raises(ConfigError) as caught:
        check_judge_context(config)
    line = str(caught.value)
    for number in (f"{judge_context(config).tokens:,}", "32,768", "24,576", "all 6 rollouts"):
        assert number in line
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "qwen2.5-32b", "--setting", setting])
    assert exit_.value.code != 0
    assert line in capsys.readouterr().err


def test_the_plan_says_what_the_self_judge_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "qwen3.6-27b", "--setting", "self-judge"])
    assert exit_.value.code == 0
    output = capsys.readouterr().out
    assert f"{judge_context(load_config('qwen3.6-27b', [], 'self-judge')).tokens:,} tokens" in output


def test_a_context_beyond_the_models_is_refused() -> None:
    key = "judge.self_judge.context_tokens"
    check_judge_context(load_config("qwen3.6-27b", [f"{key}=131072"], "self-judge"))
    with pytest.raises(ConfigError, match=rf"{key}=300,000, but .* accepts only 262,144"):
        check_judge_context(load_config("qwen3.6-27b", [f"{key}=300000"], "self-judge"))


def test_a_static_rubric_needs_no_union() -> None:
    union, credit = (judge_context(load_config("qwen3.6-27b", [], setting)) for setting in ("draco", "static-credit"))
    assert credit.tokens < union.tokens / 2
    own = load_config("qwen3.6-27b", ["judge.self_judge.enabled=true"], "static-credit")
    assert self_judge_context_length(own) == credit.tokens
    # One rollout of such a model can be judged by itself where six cannot.
    assert context_problem(own, 131_072) is None
    assert context_problem(load_config("qwen3.6-27b", [], "self-judge"), 131_072) is not None


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}, "max_position_embeddings": 1}, 8192),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131_072),
        (
            {
                "max_position_embeddings": 40_960,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131_072,
        ),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"max_position_embeddings": 1000, "rope_scaling": {"rope_type": "yarn", "factor": 1.5559}}, 1555),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn"}}, 4096),
        ({"max_position_embeddings": "4096"}, None),
        ({"max_position_embeddings": 4096, "text_config": None}, 4096),
        ({}, None),
        ([], None),
    ],
)
def test_what_a_model_accepts_is_read_from_its_config(config: object, positions: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_positions(str(tmp_path)) == positions


def test_where_it_cannot_be_read_the_engine_has_the_word(tmp_path: Path) -> None:
    assert model_positions("somebody/else") is None
    assert model_positions(str(tmp_path)) is None
    assert context_problem(load_config("qwen2.5-32b", [], "self-judge"), None) is None


@pytest.mark.parametrize(
    ("setting", "rollouts", "criteria"), [("draco", 6 * 1420, (8 + 6 * 4) * 256), ("static", 2 * 1420, 2 * 20 * 256)]
)
def test_the_parts_are_what_the_limits_make_of_them(setting: str, rollouts: int, criteria: int) -> None:
    """A rollout: its response, 10 headings of 32 tokens, and a last output of 300 characters at 3 a token."""
    config = load_config(
        "sandbox",
        [
            "agent.max_response_length=1000", "agent.max_turns=10", "agent.max_output_characters=300",
            "agent.max_prompt_length=50", "judge.max_tokens=500", "judge.reasks=2", "judge.max_stage1_criteria=8",
            "judge.max_stage2_criteria=4", "judge.max_union_criteria=20", "algorithm.group_size=6",
        ],
        setting,
    )  # fmt: skip
    found = judge_context(config)
    assert (found.rollouts, found.criteria, found.reply) == (rollouts, criteria, 500 + 2 * 6667)
    longest = Credit if setting == "static" else Union
    template = load_prompts(config.judge.prompts).templates[longest.name]
    assert found.instructions == math.ceil(len(template) / 3) + 2 * 50
    assert ("union" in found.shows) is (setting != "static")
    assert found.shows == (
        "a credit prompt contains one rollout"
        if setting == "static"
        else "the union prompt contains all 6 rollouts of a group"
    )
    parts = (found.rollouts, found.criteria, found.instructions, found.reply)
    assert found.tokens == sum(parts)


def test_corrected_verdicts_count_towards_the_instructions(tmp_path: Path) -> None:
    label = {"run": "r", "training_step": 1, "task_id": "a_1", "rollout": 0, "criterion": 0, "title": "T", "judge": 1}
    (tmp_path / "labels.jsonl").write_text(json.dumps(label | {"verdict": -1}))
    plain, shown = (
        load_config("sandbox", ["agent.max_prompt_length=50", *given], "draco")
        for given in ([], [f"judge.examples={tmp_path / 'labels.jsonl'}"])
    )
    template = load_prompts(plain.judge.prompts).templates["union"]
    assert judge_context(plain).instructions == math.ceil(len(template) / 3) + 100
    assert judge_context(shown).instructions == math.ceil((len(template) + len(examples_of(shown.judge))) / 3) + 100


def test_the_context_is_told_with_its_parts() -> None:
    context = JudgeContext(shows="all", instructions=1_000, rollouts=20_000, criteria=300, reply=4)
    said = "21,304 tokens (rollouts 20,000, criteria 300, instructions 1,000, reply 4)"
    assert (context.tokens, str(context)) == (21_304, said)


def test_each_line_about_the_context_says_what_is_too_short_by_how_much_and_what_to_change() -> None:
    key = "judge.self_judge.context_tokens"
    config = load_config("sandbox", [f"{key}=null"], "self-judge")
    needed, path = judge_context(config), config.model.path
    assert context_problem(config, needed.tokens) is None
    assert context_problem(config, needed.tokens - 1) == (
        f"self-judge: {needed.shows}; the longest request has {needed}, but {path} accepts {needed.tokens - 1:,}; "
        "choose a model with a longer context, or lower agent.max_response_length "
        f"({config.agent.max_response_length:,}), "
        "algorithm.group_size or judge.max_tokens; with judge.self_judge.context_tokens set, longer prompts are "
        "cut"
    )

    given = load_config("sandbox", [f"{key}=8000"], "self-judge")
    assert context_problem(given, 8_000) is None
    assert context_problem(given, 7_999) == f"{key}=8,000, but {path} accepts only 7,999 tokens"


def test_the_policy_judges_itself_only_where_a_rubric_is_judged() -> None:
    own = ["judge.self_judge.enabled=true"]
    assert uses_self_judge(load_config("sandbox", own, "draco"))
    assert not uses_self_judge(load_config("sandbox", [], "draco"))
    assert not uses_self_judge(load_config("sandbox", own, "outcome"))
    assert context_problem(load_config("sandbox", own, "outcome"), 1) is None


def test_how_much_a_judge_of_ones_own_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 4096}')
    monkeypatch.setenv("HOME", str(tmp_path))
    local = JudgeConfig.model_validate({"model": "hosted_vllm/~/model", "local": {"enabled": True}})
    assert judge_context_length(local) == 4096
    assert judge_context_length(local.model_copy(update={"context_tokens": 3000})) == 3000
    shorter = local.local.model_copy(update={"context_tokens": 2048})
    assert judge_context_length(local.model_copy(update={"local": shorter})) == 2048
    # The policy's engines have room for what a run shows: nothing is cut by what its name would say.
    own = JudgeConfig.model_validate({"model": "openai/gpt-4o", "self_judge": {"enabled": True}})
    assert judge_context_length(own) is None
    assert model_positions("somebody/else", tmp_path / "model" / "config.json") == 4096
    (tmp_path / "model" / "config.json").write_bytes(b"\xff")
    assert model_positions("~/model") is None


def test_a_prompt_has_the_room_that_a_reply_and_a_quoted_one_leave_in_the_shortest_context() -> None:
    """20,000 characters for each refused reply that may be quoted, at 3 a token."""
    config = JudgeConfig(model="openai/no-such", context_tokens=30_000, max_tokens=1_000, reasks=0)
    assert max_judge_prompt_tokens(config) == 29_000
    assert max_judge_prompt_tokens(config.model_copy(update={"reasks": 2})) == 29_000 - 2 * 6_667
    assert max_judge_prompt_tokens(config.model_copy(update={"context_tokens": 1_000 + LEAST_ROOM - 1})) == LEAST_ROOM
    others = [{"model": "openai/gpt-4"}, {"model": "openai/gpt-4o", "api_base": "http://127.0.0.1:1/v1"}]
    fallbacks = JudgeConfig.model_validate({"model": "m", "fallbacks": others}).fallbacks
    # GPT-4 reads 8,192; behind an endpoint of one's own a name says nothing.
    assert max_judge_prompt_tokens(config.model_copy(update={"fallbacks": fallbacks})) == 7_192
    assert max_judge_prompt_tokens(config.model_copy(update={"fallbacks": fallbacks[1:]})) == 29_000

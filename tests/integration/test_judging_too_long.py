"""Prompts that a provider refuses over HTTP, as too long or flagged: shortened, asked again, nothing asked twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import draco_ray
from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.judging.build import build_judge
from draco_ray.judging.example import RUBRIC, example_trajectory
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Score
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.records import Judged, Trajectory
from tests.support import canned_judge
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.token_counts import count_tokens as tokens
from tests.unit.test_traces_load import written

pytestmark = pytest.mark.slow

WHERE = CallContext(group="g", task_id="t_1", rollout=0)
LIMIT = 20_000
SCORES = json.dumps(
    [{"rubric_index": index, "rubric_title": each.title, "score": 1} for index, each in enumerate(RUBRIC)]
)
ENGLISH = "The room on the fourth floor is free on Friday, said the calendar, and nobody had asked for it. "
CHINESE = "周五四号会议室空闲，助手预订后把结果告诉了用户。"
SAYS: dict[str, Callable[[int], str]] = {
    "OpenAI": lambda n: (
        f"This model's maximum context length is {LIMIT} tokens. However, your messages resulted in {n} tokens. Please "
        "reduce the length of the messages."
    ),
    "Anthropic": lambda n: f"prompt is too long: {n} tokens > {LIMIT} maximum",
    "vLLM": lambda n: (
        f"This model's maximum context length is {LIMIT} tokens. However, you requested {n + 1000} tokens ({n} in the "
        "messages, 1000 in the completion). Please reduce the length of the messages or completion."
    ),
    "vLLM, at least": lambda n: (
        f"This model's maximum context length is {LIMIT} tokens. However, you requested 1000 output tokens and your "
        f"prompt contains at least {LIMIT - 999} input tokens, for a total of at least {LIMIT + 1} tokens."
    ),
    "no number": lambda n: "Your input exceeds the context window of this model. Please adjust your input.",
    "unknown words": lambda n: f"Der Prompt hat {n:,} Token, erlaubt sind {LIMIT:,}.",
}
STATES_BOTH = ("OpenAI", "Anthropic", "vLLM", "unknown words")


class Provider(ScriptedJudgeServer):
    """Reads `LIMIT` tokens by a real tokenizer, and reports what it read."""

    def __init__(self, says: Callable[[int], str], said: Callable[[str], str] = lambda _: SCORES) -> None:
        super().__init__(answer=self._reply)
        self.says, self.said, self.refused = says, said, 0

    def _reply(self, prompt: str) -> Reply:
        read = tokens(prompt)
        if read > LIMIT:
            self.refused += 1
            return Reply(self.says(read), 400, error_code="invalid_request_error")
        return Reply(self.said(prompt), input_tokens=read)

    @property
    def prompts(self) -> list[str]:
        return [each["messages"][0]["content"] for each in self.requests]


def rollout(output: str, number: int = 0) -> Trajectory:
    example = example_trajectory(number)
    return replace(example, turns=tuple(replace(turn, observation=output) for turn in example.turns))


def config(base: str, **changes: Any) -> JudgeConfig:
    values = {"model": "openai/own", "api_base": base, "max_tokens": 1000, "reasks": 0, "structured_output": False}
    return JudgeConfig.model_validate(values | changes)


async def score(judge: Any, output: str) -> Judged[Any]:
    found: Judged[Any] = await judge.ask(Score(rollout(output), RUBRIC), WHERE)
    return found


@pytest.mark.parametrize("text", [ENGLISH * 800, CHINESE * 2_000, (ENGLISH + CHINESE) * 600], ids=["en", "zh", "both"])
@pytest.mark.parametrize("provider", SAYS)
async def test_a_judge_of_which_nothing_is_known_says_itself_how_much_it_reads(provider: str, text: str) -> None:
    with Provider(SAYS[provider]) as server:
        judge = build_judge(config(server.base))
        judged = await score(judge, text)
        assert judged.ok, judged.error
        assert server.refused <= 6
        assert judged.left_out > 0
        assert "characters were left out of the prompt" in judged.notes[0]
        assert len(judged.calls) == len(server.requests) == server.refused + 1
        # Stated numbers leave little unused.
        assert tokens(server.prompts[-1]) > (0.85 if provider in STATES_BOTH else 0.5) * LIMIT
        # The next prompt of the kind is not refused any more.
        before = server.refused
        assert (await score(judge, text + "And so on.")).ok
        assert server.refused == before


async def test_usage_makes_room_for_what_takes_fewer_tokens_than_assumed() -> None:
    """At three characters a token a quarter of the context would stay empty."""
    with Provider(SAYS["OpenAI"]) as server:
        judge = build_judge(config(server.base, context_tokens=LIMIT + 1000))
        for _ in range(3):
            assert (await score(judge, ENGLISH * 800)).ok
        read = [tokens(prompt) for prompt in server.prompts]
        assert server.refused == 0
    assert read[0] < 0.75 * LIMIT
    assert read[-1] > 0.9 * LIMIT


async def test_what_takes_more_tokens_than_assumed_is_refused_once_at_most() -> None:
    digits = "".join(f"{number * 7919 % 99991:x}" for number in range(30_000))
    with Provider(SAYS["OpenAI"]) as server:
        judge = build_judge(config(server.base, context_tokens=LIMIT + 1000))
        for _ in range(3):
            assert (await score(judge, digits)).ok
        assert server.refused <= 1


async def test_a_resumed_run_asks_nothing_twice_whatever_was_learned_meanwhile(tmp_path: Path) -> None:
    outputs = [ENGLISH * 800, CHINESE * 2_000, (ENGLISH + CHINESE) * 600, ENGLISH * 300]
    with Provider(SAYS["OpenAI"]) as server:
        replies = ReplyCache(tmp_path)
        judge = build_judge(config(server.base, context_tokens=30_000), replies=replies)
        first = [await score(judge, each) for each in outputs]
        asked = len(server.requests)
        again = build_judge(config(server.base, context_tokens=30_000), replies=replies)
        second = [await score(again, each) for each in reversed(outputs)]
        assert len(server.requests) == asked
    assert [each.value for each in first] == [each.value for each in reversed(second)]
    assert [each.left_out for each in first] == [each.left_out for each in reversed(second)]


async def test_a_prompt_that_stays_too_long_is_given_up_after_a_bounded_number_of_requests() -> None:
    with Provider(lambda n: f"prompt is too long: {n} tokens > {LIMIT} maximum") as server:
        judge = build_judge(config(server.base))
        turns = example_trajectory().turns
        many = replace(example_trajectory(), turns=turns * 2_000)
        judged = await judge.ask(Score(many, RUBRIC), WHERE)
        assert not judged.ok
        assert "prompt is too long" in (judged.error or "")
        assert len(server.requests) <= 7


async def test_a_reply_that_was_all_reasoning_names_the_key() -> None:
    with ScriptedJudgeServer(Reply("", finish_reason="length", output_tokens=1000)) as server:
        judged = await score(build_judge(config(server.base)), "free")
    assert judged.error is not None
    assert judged.error.endswith(
        ": reasoning used all of judge.max_tokens=1,000; raise judge.max_tokens, or lower judge.reasoning_effort"
    )
    with ScriptedJudgeServer(Reply('[{"rubric_index"', finish_reason="length", output_tokens=1000)) as server:
        judged = await score(build_judge(config(server.base)), "free")
    assert (judged.error or "").endswith("(judge.max_tokens=1,000)")


def record(task: str, number: int, output: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "search_flights", "arguments": "{}"}}
    return {
        "task_id": task,
        "id": f"{task}-{number}",
        "messages": [
            {"role": "user", "content": "Book the cheapest flight"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": output},
            {"role": "assistant", "content": "The cheapest is DL9" if number % 2 else "The cheapest is AA1"},
        ],
    }


@pytest.mark.parametrize("phases", [("stage2", "union", "score"), ("union",), ("union", "score")])
def test_traces_that_a_filter_refuses_do_not_cost_the_others_their_rewards(
    tmp_path: Path, phases: tuple[str, ...]
) -> None:
    """Two of eight, in some phases only; killed after that and asked again, nothing that was answered is asked."""
    begins = {"this time with a real run": "stage2", "You edit grading criteria": "union", "You grade one run": "score"}

    def answer(prompt: str) -> str | Reply:
        phase = next((name for words, name in begins.items() if words in prompt), "other")
        if "FLAGGED" in prompt and phase in phases:
            return Reply("The prompt was filtered by the content management policy.", 400, error_code="content_filter")
        return canned_judge.answer(prompt)

    flagged = (2, 5)
    path = written(
        tmp_path / "traces.jsonl",
        *(record("a", each, "FLAGGED" if each in flagged else "AA1 300 DL9 200") for each in range(8)),
    )
    settings = DracoConfig.model_validate(
        {"judge": {"prices": {"openai/own": {"input": 1.0, "output": 1.0}}, "structured_output": False}}
    )
    with ScriptedJudgeServer(answer=answer) as server:
        (group,) = draco_ray.judge_sync(
            draco_ray.load_traces(path),
            "openai/own",
            api_base=server.base,
            budget=5.0,
            config=settings,
            out=tmp_path / "o",
        )
    lost = {each.rollout for each in group.rollouts if each.reward is None}
    assert lost == ({*flagged} if "score" in phases else set())
    assert all("content management policy" in (group.rollouts[each].error or "") for each in lost)
    assert group.error is None
    assert any(note.startswith("union: union was asked without rollout 2, 5, which") for note in group.notes)
    unions = [each for each in server.requests if each["messages"][0]["content"].startswith("You edit grading")]
    assert len(unions) == 2 if "stage2" in phases else len(unions) <= 13


def test_a_group_with_one_trace_as_long_as_all_others_is_judged_whole(tmp_path: Path) -> None:
    """Also by the command's path through the library: in Chinese, by a judge that is asked for the first time."""
    path = written(
        tmp_path / "traces.jsonl",
        *(record("a", each, CHINESE * (3_000 if each == 1 else 10)) for each in range(3)),
    )
    with Provider(SAYS["Anthropic"], canned_judge.answer) as server:
        (group,) = draco_ray.judge_sync(draco_ray.load_traces(path), "openai/own", api_base=server.base)
    assert all(each.reward is not None for each in group.rollouts)
    assert group.rollouts[1].left_out > 0
    assert group.rollouts[0].left_out == 0

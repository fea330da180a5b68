"""The self-judge: the policy's own engine answers, through its chat template, with thinking on or off."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.config.schema import JudgeConfig, Price, SelfJudgeConfig
from draco_ray.engine.sampler import Sample
from draco_ray.errors import EngineError
from draco_ray.judging import self_judge
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.example import PROMPT
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Stage1
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.self_judge import SelfJudgeClient
from draco_ray.records import Message
from tests.support.chat_tokenizer import QWEN3, QWEN35, chat_tokenizer

HELLO = Request(messages=(Message(role="user", content="Judge this."),))
CRITERION = {"title": "Reads all pages", "description": "d", "evaluator_instruction": "e"}


@dataclass
class Engine:
    """Samples a fixed text, and remembers what it was asked."""

    tokenizer: Any
    text: str
    finish_reason: str = "stop"
    room: int = 100_000
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def sample(self, token_ids: list[int], *, stop_at: int | None = None, **given: Any) -> Sample:
        if len(token_ids) >= self.room:
            raise EngineError(f"prompt of {len(token_ids)} tokens leaves no room")
        self.asked.append({"prompt": token_ids, "stop_at": stop_at, **given})
        ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        if stop_at in ids:
            ids = ids[: ids.index(stop_at) + 1]
        elif given.get("schema") is not None and "</think>" in self.text:
            ids = self.tokenizer.encode(self.text.partition("</think>")[2], add_special_tokens=False)
        return Sample(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=self.finish_reason, policy_version=3)


def client(template: str, text: str, *, thinking: bool = True, **engine: Any) -> tuple[SelfJudgeClient, Engine]:
    tokenizer = chat_tokenizer(template)
    judge = JudgeConfig(
        self_judge=SelfJudgeConfig(enabled=True, thinking=thinking),
        prices={"toy": Price(input=1.0, cached_input=0.5, output=2.0)},
        max_tokens=777,
    )
    sampler = Engine(tokenizer, text, **engine)
    return SelfJudgeClient([sampler], tokenizer, judge, model="self/toy"), sampler


SCHEMA = {"type": "object"}


@pytest.mark.parametrize("template", [QWEN3, QWEN35])
async def test_reasoning_is_free_and_the_answer_behind_it_is_held_to_the_schema(template: str) -> None:
    opened = "<think>\n" if template == QWEN3 else ""
    complete, engine = client(template, f'{opened}I would say {{"no": 1}}.\n</think>{{"yes": 2}}')
    answer = await complete(replace(HELLO, schema=SCHEMA))
    assert answer.text == '{"yes": 2}'
    assert answer.finish_reason == "stop"
    thought, said = engine.asked
    (end,) = engine.tokenizer.encode("</think>", add_special_tokens=False)
    assert (thought["stop_at"], thought.get("schema"), said["schema"]) == (end, None, SCHEMA)
    assert said["prompt"][: len(thought["prompt"])] == thought["prompt"]
    assert said["prompt"][-1] == end
    assert said["max_tokens"] == 777 - (len(said["prompt"]) - len(thought["prompt"]))


async def test_without_thinking_the_whole_reply_is_held_to_the_schema() -> None:
    complete, engine = client(QWEN3, '{"yes": 2}', thinking=False)
    assert (await complete(replace(HELLO, schema=SCHEMA))).text == '{"yes": 2}'
    assert [asked["schema"] for asked in engine.asked] == [SCHEMA]


async def test_reasoning_that_never_ends_is_a_cut_reply() -> None:
    complete, _ = client(QWEN35, '[{"title": "looks like an answer"}]')
    assert (await complete(HELLO)).finish_reason == "length"


async def test_the_judges_own_temperature_tokens_and_price() -> None:
    complete, engine = client(QWEN3, "fine", thinking=False)
    answer = await complete(HELLO)
    (asked,) = engine.asked
    assert asked["max_tokens"] == 777
    assert asked["temperature"] == 0.1
    assert answer.input_tokens == len(asked["prompt"])
    assert answer.dollars == pytest.approx((answer.input_tokens + 2 * answer.output_tokens) / 1e6)
    assert answer.dollars > 0


async def test_votes_are_drawn_independently_and_repeatably() -> None:
    complete, engine = client(QWEN3, "fine", thinking=False)
    for vote in (0, 1, 2, 0):
        await complete(Request(messages=HELLO.messages, vote=vote))
    await complete(Request(messages=(Message(role="user", content="Judge that."),)))
    seeds = [asked["seed"] for asked in engine.asked]
    assert len(set(seeds)) == 4
    assert seeds[0] == seeds[3]
    assert all(0 <= seed < 2**32 for seed in seeds)


async def test_a_prompt_beyond_the_context_fails_the_call_only() -> None:
    complete, _ = client(QWEN3, "fine", thinking=False, room=3)
    answer = await complete(HELLO)
    assert answer.error is not None
    assert "leaves no room" in answer.error


async def test_a_reply_that_the_context_cut_names_the_key_and_is_not_asked_for_again() -> None:
    complete, _ = client(QWEN3, "half of a", thinking=False, finish_reason="length")
    answer = await complete(HELLO)
    assert answer.error is not None
    assert "for the reply, expected judge.max_tokens=777; raise judge.self_judge.context_tokens" in answer.error


async def test_a_phase_through_the_policy() -> None:
    reply = json.dumps([CRITERION])
    complete, _ = client(QWEN35, f"thinking\n</think>\n{reply}")
    config = load_config("sandbox", [], "self-judge").judge
    judged = await Judge(complete, load_prompts(config.prompts), config).ask(
        Stage1(PROMPT), CallContext(group="step1/t_1", task_id="t_1")
    )
    assert judged.ok, judged.error
    assert [criterion.title for criterion in judged.value or ()] == ["Reads all pages"]


def test_settings() -> None:
    thinking = load_config("qwen3.6-27b", [], "self-judge").judge
    plain = load_config("qwen3.6-27b", [], "self-judge-plain").judge
    assert thinking.self_judge.enabled
    assert thinking.self_judge.thinking
    assert thinking.score_votes == 3
    assert plain.self_judge.enabled
    assert not plain.self_judge.thinking
    assert plain.score_votes == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call begins at 5 and takes 2.5 seconds."""
    times = iter([10.0, 12.5])
    monkeypatch.setattr(self_judge, "time", SimpleNamespace(time=lambda: 5.0, perf_counter=lambda: next(times)))


@pytest.mark.parametrize(
    ("template", "reply", "ended", "text", "finish_reason"),
    [
        (QWEN3, "fine", "stop", "fine", "stop"),
        (QWEN35, "so\n</think>\n\nfine", "stop", "fine", "stop"),
        (QWEN35, 'so</think>{"evidence": "it wrote </think>"}', "stop", '{"evidence": "it wrote </think>"}', "stop"),
        (QWEN3, " <think>so</think> fine", "abort", "fine", "abort"),
        (QWEN35, "fine", "stop", "fine", "length"),
        (QWEN3, "<think>fine", "stop", "<think>fine", "length"),
    ],
)
@pytest.mark.usefixtures("clock")
async def test_what_an_answer_says_of_itself(
    template: str, reply: str, ended: str, text: str, finish_reason: str
) -> None:
    complete, engine = client(template, reply, finish_reason=ended)
    answer = await complete(HELLO)
    read, written = len(engine.asked[0]["prompt"]), len(engine.tokenizer.encode(reply, add_special_tokens=False))
    assert answer == Completion(
        text=text,
        finish_reason=finish_reason,
        model="self/toy",
        input_tokens=read,
        cached_tokens=0,
        output_tokens=written,
        dollars=(read + 2 * written) / 1e6,
        started_at=5.0,
        seconds=2.5,
        requests=1,
    )


@pytest.mark.parametrize(
    ("engine", "error", "said"),
    [
        ({"room": 3}, "prompt of {read} tokens leaves no room", ""),
        (
            {"finish_reason": "length"},
            "a prompt of {read} tokens is too long: it leaves {written} tokens for the reply, expected "
            "judge.max_tokens=777; raise judge.self_judge.context_tokens",
            "ab",
        ),
    ],
)
@pytest.mark.usefixtures("clock")
async def test_what_a_call_without_an_answer_says_of_itself(engine: dict[str, Any], error: str, said: str) -> None:
    complete, sampler = client(QWEN3, "ab", thinking=False, **engine)
    answer = await complete(HELLO)
    read = len(complete._chat.prompt(HELLO.messages))
    written = len(sampler.tokenizer.encode(said, add_special_tokens=False))
    assert answer == Completion(
        text="",
        finish_reason="error",
        model="self/toy",
        input_tokens=read,
        cached_tokens=0,
        output_tokens=written,
        dollars=0.0,
        started_at=5.0,
        seconds=2.5,
        requests=1,
        error=error.format(read=read, written=written),
    )


async def test_a_reply_as_long_as_it_may_be_is_cut_by_its_own_limit() -> None:
    complete, engine = client(QWEN3, "x", thinking=False, finish_reason="length")
    complete._config = complete._config.model_copy(update={"max_tokens": 1})
    answer = await complete(HELLO)
    assert (answer.text, answer.finish_reason, answer.error) == ("x", "length", None)
    assert [asked["max_tokens"] for asked in engine.asked] == [1]


class Gate(Engine):
    """Says when it is asked, and answers once it is open."""

    def __init__(self, number: int, asked: asyncio.Queue[int], *words: Any, **given: Any) -> None:
        super().__init__(*words, **given)
        self.number, self.told, self.open = number, asked, asyncio.Event()

    async def sample(self, token_ids: list[int], **given: Any) -> Sample:
        self.told.put_nowait(self.number)
        await self.open.wait()
        return await super().sample(token_ids, **given)


async def test_a_request_goes_to_the_engine_with_the_fewest_in_flight() -> None:
    tokenizer, asked = chat_tokenizer(QWEN3), asyncio.Queue[int]()
    judge = JudgeConfig(self_judge=SelfJudgeConfig(enabled=True, thinking=False))
    # Every call to the first fails, and is in flight no more all the same.
    engines = [Gate(0, asked, tokenizer, "fine", room=3), Gate(1, asked, tokenizer, "fine")]
    complete = SelfJudgeClient(engines, tokenizer, judge, model="self/toy")
    running: list[list[asyncio.Task[Completion]]] = [[], []]

    async def start() -> int:
        task = asyncio.create_task(complete(HELLO))
        engine = await asked.get()
        running[engine].append(task)
        return engine

    async def end(engine: int) -> None:
        engines[engine].open.set()
        await asyncio.gather(*running[engine])
        engines[engine].open.clear()

    assert [await start() for _ in range(2)] == [0, 1]
    await end(1)
    assert [await start() for _ in range(3)] == [1, 0, 1]
    await end(1)
    assert await start() == 1
    await end(1)
    await end(0)
    for _ in range(4):
        assert await start() == 0
        await end(0)

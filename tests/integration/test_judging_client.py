"""The LiteLLM client against a real HTTP server that answers by script."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.build import build_judge
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import Server
from draco_ray.judging.example import PROMPT
from draco_ray.judging.judge import CallContext
from draco_ray.judging.limiter import LeaseRequest, Limiter, LimiterQueue, RequestResult
from draco_ray.judging.outage import FailureKind, NextAction
from draco_ray.judging.phases import Stage1
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.records import Message, OriginalCost
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.turns import AheadClock

pytestmark = pytest.mark.slow

KEY = "sk-very-secret-0123456789"
CRITERION = '[{"title": "Reads all pages", "description": "d", "evaluator_instruction": "e"}]'


class Naps:
    """Records how long it was asked to sleep, and does not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Told(LimiterQueue):
    """Leases of a limiter without limits; remembers what was asked for and how it ended."""

    def __init__(self) -> None:
        super().__init__(Limiter(JudgeLimits()))
        self.asked: list[LeaseRequest] = []
        self.ended: list[RequestResult] = []

    async def lease(self, asked: LeaseRequest) -> str:
        self.asked.append(asked)
        return await super().lease(asked)

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        self.ended.append(ended)
        return await super().settle(number, ended)


def config(base: str, **changes: object) -> JudgeConfig:
    values: dict[str, object] = {
        "model": "openai/scripted",
        "api_base": base,
        "api_key_env": "DRACO_TEST_KEY",
        "max_attempts": 4,
        "max_backoff_seconds": 5.0,
        "request_timeout_seconds": 600.0,
    }
    return JudgeConfig.model_validate(values | changes)


def ask(text: str = "judge this", vote: int = 0) -> Request:
    return Request(messages=(Message(role="user", content=text),), vote=vote)


async def test_sends_the_configured_request_and_counts_tokens_and_dollars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRACO_TEST_KEY", KEY)
    price = Price(input=2.0, cached_input=0.5, output=10.0)
    with ScriptedJudgeServer(Reply("fine", input_tokens=1000, cached_tokens=600, output_tokens=50)) as server:
        client = LiteLLMClient(
            config(server.base, prices={"scripted": price}, extra_body={"switch": {"on": True}}, temperature=0.3)
        )
        completion = await client(ask())
    (body,) = server.requests
    assert body["model"] == "scripted"
    assert body["messages"] == [{"role": "user", "content": "judge this"}]
    assert (body["temperature"], body["max_tokens"], body["switch"]) == (0.3, 16384, {"on": True})
    assert server.keys == [f"Bearer {KEY}"]
    assert (completion.text, completion.finish_reason, completion.requests) == ("fine", "stop", 1)
    assert (completion.input_tokens, completion.cached_tokens, completion.output_tokens) == (1000, 600, 50)
    assert completion.dollars == pytest.approx((400 * 2.0 + 600 * 0.5 + 50 * 10.0) / 1e6)


async def test_no_temperature_is_sent_when_it_is_null() -> None:
    with ScriptedJudgeServer() as server:
        await LiteLLMClient(config(server.base, temperature=None))(ask())
    assert "temperature" not in server.requests[0]


@pytest.mark.parametrize(
    ("model", "changes", "sent"),
    [
        # GPT-5 reasons, and then takes no temperature; GPT-5.4 does not unless it is told to.
        ("openai/gpt-5", {}, {"max_completion_tokens": 16384}),
        ("openai/gpt-5", {"reasoning_effort": "low"}, {"max_completion_tokens": 16384, "reasoning_effort": "low"}),
        ("openai/gpt-5.4", {}, {"max_completion_tokens": 16384, "temperature": 0.1}),
        (
            "openai/gpt-5.4",
            {"reasoning_effort": "high"},
            {"max_completion_tokens": 16384, "reasoning_effort": "high"},
        ),
        ("openai/o3", {}, {"max_completion_tokens": 16384}),
        ("hosted_vllm/own", {}, {"max_tokens": 16384, "temperature": 0.1}),
    ],
)
async def test_what_litellm_knows_a_model_to_refuse_is_not_sent(
    model: str, changes: dict[str, object], sent: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedJudgeServer() as server:
        client = LiteLLMClient(config(server.base, model=model, **changes))
        await client(ask())
        await client(ask())
    for body in server.requests:
        named = {name: body[name] for name in body.keys() - {"model", "messages"}}
        assert named == sent
    left_out = "temperature" not in sent
    assert caplog.text.count("accepts no temperature: judge.temperature=0.1 is not sent") == int(left_out)


async def test_an_effort_that_a_model_does_not_know_is_told_with_its_key() -> None:
    with ScriptedJudgeServer() as server:
        client = LiteLLMClient(config(server.base, model="openai/gpt-4o", reasoning_effort="low"))
        with pytest.raises(JudgeUnavailable, match=r"judge\.reasoning_effort=low is refused: .*set it to null"):
            await client.check()
    assert server.requests == []


NO_TEMPERATURE = "Unsupported value: 'temperature' does not support 0.1 with this model. Only the default (1) value is"
NO_MAX_TOKENS = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
)


async def test_a_refused_temperature_names_the_key_that_mends_it() -> None:
    with (
        ScriptedJudgeServer(Reply(NO_TEMPERATURE, 400)) as server,
        pytest.raises(JudgeUnavailable, match=r"to leave it out set judge\.temperature=null"),
    ):
        await LiteLLMClient(config(server.base)).check()


async def test_an_endpoint_that_knows_max_tokens_by_its_newer_name_gets_it() -> None:
    with ScriptedJudgeServer(Reply(NO_MAX_TOKENS, 400), Reply("fine")) as server:
        client = LiteLLMClient(config(server.base))
        assert [(await client(ask())).text, (await client(ask())).text] == ["fine", "fine"]
    assert [body.get("max_tokens") for body in server.requests] == [16384, None, None]
    assert [body.get("max_completion_tokens") for body in server.requests] == [None, 16384, 16384]


async def test_reasoning_tokens_are_counted_and_paid() -> None:
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": 300,
        "total_tokens": 1300,
        "completion_tokens_details": {"reasoning_tokens": 250},
    }
    # Some endpoints count them in the total only.
    apart = usage | {"completion_tokens": 50}
    with ScriptedJudgeServer(Reply(usage=usage), Reply(usage=apart)) as server:
        client = LiteLLMClient(config(server.base, prices={"scripted": Price(input=1.0, output=10.0)}))
        for completion in (await client(ask()), await client(ask())):
            assert (completion.output_tokens, completion.reasoning_tokens) == (300, 250)
            assert completion.dollars == pytest.approx((1000 + 300 * 10) / 1e6)


async def test_what_is_written_to_a_prompt_cache_and_long_prompts_have_prices_of_their_own() -> None:
    price = Price.model_validate(
        {
            "input": 3.0,
            "cached_input": 0.3,
            "cache_write": 3.75,
            "output": 15.0,
            "tiers": [{"above": 2000, "input": 6.0, "cache_write": 7.5, "output": 22.5}],
        }
    )

    def usage(prompt: int, cached: int, written: int) -> dict[str, object]:
        return {
            "prompt_tokens": prompt,
            "completion_tokens": 10,
            "total_tokens": prompt + 10,
            "prompt_tokens_details": {"cached_tokens": cached},
            "cache_creation_input_tokens": written,
        }

    with ScriptedJudgeServer(Reply(usage=usage(2000, 500, 1000)), Reply(usage=usage(2001, 0, 0))) as server:
        client = LiteLLMClient(config(server.base, prices={"scripted": price}))
        short, long = await client(ask()), await client(ask())
    assert short.dollars == pytest.approx((500 * 3.0 + 500 * 0.3 + 1000 * 3.75 + 10 * 15.0) / 1e6)
    assert long.dollars == pytest.approx((2001 * 6.0 + 10 * 22.5) / 1e6)


async def test_a_model_without_configured_price_takes_litellms() -> None:
    with ScriptedJudgeServer(Reply(input_tokens=1000, output_tokens=100)) as server:
        completion = await LiteLLMClient(config(server.base, model="openai/gpt-4o", prices={}))(ask())
    assert completion.dollars > 0


async def test_a_configured_price_goes_before_litellms() -> None:
    with ScriptedJudgeServer(Reply(input_tokens=1000, output_tokens=100)) as server:
        client = LiteLLMClient(
            config(server.base, model="openai/gpt-4o", prices={"gpt-4o": Price(input=1.0, output=0.0)})
        )
        assert (await client(ask())).dollars == pytest.approx(0.001)


async def test_rate_limits_wait_as_long_as_retry_after_says() -> None:
    naps = Naps()
    with ScriptedJudgeServer(
        Reply("slow down", 429, {"Retry-After": "7"}),
        Reply("slow down", 429, {"Retry-After-Ms": "1500"}),
        Reply("fine"),
    ) as server:
        completion = await LiteLLMClient(config(server.base), sleep=naps)(ask())
    assert (completion.text, completion.requests) == ("fine", 3)
    assert 7 <= naps.seconds[0] <= 7.7
    assert 1.5 <= naps.seconds[1] <= 1.65


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_passing_trouble_is_asked_again_with_growing_waits(status: int) -> None:
    naps = Naps()
    with ScriptedJudgeServer(Reply("trouble", status), Reply("trouble", status), Reply("fine")) as server:
        completion = await LiteLLMClient(config(server.base), sleep=naps)(ask())
    assert (completion.text, completion.requests, len(server.requests)) == ("fine", 3, 3)
    assert 0.5 <= naps.seconds[0] <= 1.0 <= naps.seconds[1] <= 2.0


async def test_a_body_that_is_no_chat_completion_is_asked_again() -> None:
    with ScriptedJudgeServer(Reply(raw="<html>gateway</html>"), Reply("fine")) as server:
        completion = await LiteLLMClient(config(server.base), sleep=Naps())(ask())
    assert (completion.text, completion.requests) == ("fine", 2)


async def test_a_slow_answer_times_out_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = AheadClock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
    with ScriptedJudgeServer(Reply("late", delay=600.0), Reply("fine")) as server:
        call = asyncio.create_task(LiteLLMClient(config(server.base), sleep=Naps())(ask()))
        await clock.jump(600.0, when=server.asked.is_set)
        completion = await call
    assert (completion.text, completion.requests) == ("fine", 2)


async def test_the_pool_is_told_how_each_request_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "draco_ray.judging.client")
    script = (Reply("late", delay=600.0), Reply("slow down", 429, headers={"Retry-After": "0"}), Reply("fine"))
    told, clock = Told(), AheadClock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
    with ScriptedJudgeServer(*script) as server:
        prices = {"scripted": Price(input=2.0, output=10.0)}
        settings = config(server.base, prices=prices, max_outage_seconds=0)
        client = LiteLLMClient(settings, sleep=Naps(), leases=told)
        complete = client._endpoint.complete

        async def patient(request: Request, place: Server, max_tokens: int, timeout: float) -> Any:
            # The transport's own limit is not reached at the same moment.
            return await complete(request, place, max_tokens, 2 * timeout)

        monkeypatch.setattr(client._endpoint, "complete", patient)
        call = asyncio.create_task(client(ask()))
        await clock.jump(600.0, when=server.asked.is_set)
        await call
    asked = told.asked[0]
    assert asked.output_tokens == 16384
    assert asked.dollars > 16384 * 10e-6
    late, refused, fine = told.ended
    # It may be billed: the most that it can be, and a guess, from which nothing is learned.
    assert (late.tokens, late.output_tokens) == (asked.input_tokens + asked.output_tokens, asked.output_tokens)
    assert (late.dollars, late.estimated, late.trouble, late.hint) == (asked.dollars, True, FailureKind.TIMED_OUT, None)
    assert "no answer within 600 s" in late.reason
    assert (refused.tokens, refused.output_tokens, refused.dollars, refused.hint) == (0, 0, 0, 0)
    assert (refused.trouble, refused.estimated) == (FailureKind.RATE_LIMITED, True)
    assert "slow down" in refused.reason
    assert (fine.tokens, fine.output_tokens, fine.estimated, fine.trouble) == (110, 10, False, None)
    assert f"judge openai/scripted at {server.base}: request 1: no answer within 600 s; again in " in caplog.text
    assert "request 2: " in caplog.text
    assert "slow down; again in 0.0 s" in caplog.text


async def test_lasting_trouble_fails_the_call_and_not_the_run() -> None:
    with ScriptedJudgeServer(Reply("broken inside", 500)) as server:
        completion = await LiteLLMClient(config(server.base), sleep=Naps())(ask())
    assert (completion.requests, len(server.requests), completion.finish_reason) == (4, 4, "unavailable")
    assert completion.error is not None
    assert "broken inside" in completion.error


async def test_a_refused_prompt_fails_the_call_without_a_retry() -> None:
    with ScriptedJudgeServer(Reply("maximum context length exceeded", 400)) as server:
        completion = await LiteLLMClient(config(server.base), sleep=Naps())(ask())
    assert len(server.requests) == 1
    assert completion.error is not None
    assert "context length" in completion.error


@pytest.mark.parametrize("status", [401, 402, 403, 404])
async def test_a_refused_judge_stops_the_run_with_one_line_and_without_the_key(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRACO_TEST_KEY", KEY)
    with ScriptedJudgeServer(Reply(f"no entry for\n{KEY}", status)) as server:
        with pytest.raises(JudgeUnavailable) as caught:
            await LiteLLMClient(config(server.base), sleep=Naps())(ask())
        assert len(server.requests) == 1
    message = str(caught.value)
    assert "openai/scripted" in message
    assert server.base in message
    assert KEY not in message
    assert "\n" not in message


async def test_a_spent_quota_is_not_waited_for() -> None:
    with ScriptedJudgeServer(Reply("quota", 429, error_code="insufficient_quota")) as server:
        with pytest.raises(JudgeUnavailable, match="refused"):
            await LiteLLMClient(config(server.base), sleep=Naps())(ask())
        assert len(server.requests) == 1


@pytest.mark.parametrize("model", ["openai/scripted", "hosted_vllm/scripted"])
async def test_an_unreachable_judge_stops_the_run_after_all_attempts(model: str) -> None:
    with ScriptedJudgeServer() as server:
        pass
    naps = Naps()
    with pytest.raises(JudgeUnavailable, match="not reachable after 4 attempts"):
        await LiteLLMClient(config(server.base, model=model), sleep=naps)(ask())
    assert len(naps.seconds) == 3


async def test_an_unknown_provider_is_told_at_once() -> None:
    with pytest.raises(JudgeUnavailable, match="nobody/model"):
        await LiteLLMClient(config("http://127.0.0.1:9/v1", model="nobody/model"), sleep=Naps()).check()


async def test_a_hosted_judge_without_a_key_is_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRACO_TEST_KEY", raising=False)
    hosted = JudgeConfig(api_key_env="DRACO_TEST_KEY")
    with pytest.raises(JudgeUnavailable, match="no API key found; set environment variable DRACO_TEST_KEY"):
        await LiteLLMClient(hosted).check()


async def test_check_passes_on_any_answer_and_fails_on_refused_parameters() -> None:
    with ScriptedJudgeServer(Reply("whatever", finish_reason="length"), Reply("unknown parameter", 400)) as server:
        client = LiteLLMClient(config(server.base), sleep=Naps())
        await client.check()
        with pytest.raises(JudgeUnavailable, match="unknown parameter"):
            await client.check()
    assert server.requests[0]["max_tokens"] == 32


async def test_no_more_calls_are_in_flight_than_allowed() -> None:
    with ScriptedJudgeServer() as server:
        server.held.set()
        client = LiteLLMClient(config(server.base, concurrency_per_worker=3))
        calls = asyncio.gather(*(client(ask(str(number))) for number in range(9)))
        await server.answer_together(3)
        await calls
    assert server.most_in_flight == 3


async def test_paid_answers_are_kept_by_everything_that_shapes_them(tmp_path: Path) -> None:
    with ScriptedJudgeServer(*(Reply(str(number)) for number in range(9))) as server:
        client = LiteLLMClient(config(server.base), ReplyCache(tmp_path))
        first = await client(ask())
        again = await LiteLLMClient(config(server.base), ReplyCache(tmp_path))(ask())
        assert (first.text, first.requests) == ("0", 1)
        assert (again.text, again.requests, again.dollars) == ("0", 0, 0.0)
        assert (again.input_tokens, again.output_tokens) == (100, 10)
        assert (await client(ask(vote=1))).text == "1"
        assert (await client(ask("another"))).text == "2"
        warmer = LiteLLMClient(config(server.base, temperature=0.9), ReplyCache(tmp_path))
        assert (await warmer(ask())).text == "3"
        switched = LiteLLMClient(config(server.base, extra_body={"think": True}), ReplyCache(tmp_path))
        assert (await switched(ask())).text == "4"
        await client.forget(ask())
        assert (await client(ask())).text == "5"


async def test_a_judge_that_is_reached_elsewhere_is_asked_nothing_twice_by_its_run(tmp_path: Path) -> None:
    """An endpoint may change when a run is continued (`draco_ray.training.resume.CHANGEABLE_KEYS`)."""

    async def asked_of(base: str, *, own: bool = True, **changes: object) -> int:
        judge = build_judge(config(base, cache=str(tmp_path), **changes), own_replies=own)
        judged = await judge.ask(Stage1(PROMPT), CallContext(group="g", task_id="t", rollout=None))
        assert judged.value is not None, judged.error
        return sum(call.requests for call in judged.calls)

    with ScriptedJudgeServer(*[Reply(CRITERION)] * 9) as here, ScriptedJudgeServer(*[Reply(CRITERION)] * 9) as there:
        assert await asked_of(here.base, own=False) == 1
        # Where others keep theirs too, the same name at another endpoint may be another model.
        assert await asked_of(there.base, own=False) == 1
        assert await asked_of(here.base, extra_body={"think": True}) == 1
        assert await asked_of(there.base, extra_body={"think": True}) == 0


async def test_a_replayed_reply_says_what_it_was_paid_with(tmp_path: Path) -> None:
    with ScriptedJudgeServer(Reply("fine")) as server:
        client = LiteLLMClient(
            config(server.base, prices={"scripted": Price(input=2.0, output=10.0)}), ReplyCache(tmp_path)
        )
        paid, replayed = await client(ask()), await client(ask())
    assert paid.paid is None
    assert paid.dollars > 0
    assert replayed.paid == OriginalCost(
        call_id=paid.call_id,
        requests=1,
        dollars=paid.dollars,
        estimated_dollars=0.0,
        seconds=paid.seconds,
        started_at=paid.started_at,
        waited_seconds=paid.waited_seconds,
    )
    assert (replayed.requests, replayed.dollars, replayed.seconds) == (0, 0.0, 0.0)
    assert replayed.started_at >= paid.started_at + paid.seconds


async def test_what_a_call_waits_for_leave_is_told_from_what_the_judge_takes(tmp_path: Path) -> None:
    class Slow(Told):
        async def lease(self, asked: LeaseRequest) -> str:
            await asyncio.sleep(0.2)
            return await super().lease(asked)

    with ScriptedJudgeServer(Reply("once", status=500), Reply("fine")) as server:
        client = LiteLLMClient(config(server.base), ReplyCache(tmp_path), sleep=Naps(), leases=Slow())
        answered, replayed = await client(ask()), await client(ask())
    # A lease for each of its two requests.
    assert answered.requests == 2
    assert 0.38 < answered.waited_seconds < answered.seconds
    assert replayed.waited_seconds == 0.0
    assert replayed.paid is not None
    assert replayed.paid.waited_seconds == answered.waited_seconds


def test_paid_replies_are_found_by_later_versions() -> None:
    """A change of these is a change of every key: all that was paid for is asked again."""
    client = LiteLLMClient(config("http://127.0.0.1:1/v1", extra_body={"think": True}))
    scoped = Request(messages=ask().messages, vote=1, scope="step 1")
    assert [client._key(each)[:16] for each in (ask(), scoped)] == ["7b4850bdfdfdf9a0", "53c53d7eecfe1e3d"]


async def test_a_rule_judge_that_was_started_anew_finds_its_replies(tmp_path: Path) -> None:
    with ScriptedJudgeServer(Reply("fine")) as before, ScriptedJudgeServer(Reply("another")) as after:
        for server in (before, after):
            settings = config(server.base, rule_judge={"start": True})
            assert (await LiteLLMClient(settings, ReplyCache(tmp_path))(ask())).text == "fine"
        # Of another endpoint nothing is known.
        assert (await LiteLLMClient(config(after.base), ReplyCache(tmp_path))(ask())).text == "another"


async def test_failed_calls_are_not_kept(tmp_path: Path) -> None:
    with ScriptedJudgeServer(Reply("too long", 400), Reply("fine")) as server:
        client = LiteLLMClient(config(server.base), ReplyCache(tmp_path))
        assert (await client(ask())).error is not None
        assert (await client(ask())).text == "fine"


async def test_a_phase_over_http_is_asked_again_and_replayed_for_nothing(tmp_path: Path) -> None:
    where = CallContext(group="step1/t_1", task_id="t_1")
    with ScriptedJudgeServer(Reply("I would rather not."), Reply(CRITERION)) as server:
        settings = config(server.base, cache=tmp_path)
        paid = await build_judge(settings).ask(Stage1(PROMPT), where)
        replayed = await build_judge(settings).ask(Stage1(PROMPT), where)
        assert len(server.requests) == 2
    assert paid.value is not None
    assert replayed.value == paid.value
    assert [call.requests for call in paid.calls] == [1, 1]
    assert [call.requests for call in replayed.calls] == [0, 0]
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("kept", "asked"), [(True, 1), (False, 2)])
async def test_stage1_is_kept_across_epochs_or_asked_once_a_step(tmp_path: Path, kept: bool, asked: int) -> None:
    with ScriptedJudgeServer(Reply(CRITERION)) as server:
        settings = config(server.base, cache=tmp_path, stage1_across_epochs=kept)
        for group in ("step1/t_1", "step6/t_1", "step6/t_1"):
            judged = await build_judge(settings).ask(Stage1(PROMPT), CallContext(group=group, task_id="t_1"))
            assert judged.ok
    assert len(server.requests) == asked


async def test_a_failed_phase_is_forgotten_so_that_the_next_try_asks_anew(tmp_path: Path) -> None:
    where = CallContext(group="step1/t_1", task_id="t_1")
    with ScriptedJudgeServer(Reply("no"), Reply("still no"), Reply(CRITERION)) as server:
        settings = config(server.base, cache=tmp_path)
        assert (await build_judge(settings).ask(Stage1(PROMPT), where)).value is None
        assert (await build_judge(settings).ask(Stage1(PROMPT), where)).value is not None
    assert len(server.requests) == 3


async def test_equal_requests_at_the_same_time_are_asked_once_if_answers_are_kept(tmp_path: Path) -> None:
    with ScriptedJudgeServer(Reply("fine", delay=0.3)) as server:
        client = LiteLLMClient(config(server.base), ReplyCache(tmp_path / "replies"))
        first, second, other = await asyncio.gather(client(ask()), client(ask()), client(ask(vote=1)))
        assert len(server.requests) == 2
        assert [first.text, second.text, other.text] == ["fine"] * 3
        assert sorted([first.requests, second.requests]) == [0, 1]
        assert other.requests == 1
        independent = LiteLLMClient(config(server.base))
        await asyncio.gather(independent(ask()), independent(ask()))
        assert len(server.requests) == 4


WRAPPED = f'{{"entries": {CRITERION}}}'
WHERE = CallContext(group="step1/t_1", task_id="t_1")


@pytest.mark.parametrize("reply", [CRITERION, WRAPPED], ids=["ignored", "followed"])
async def test_a_local_server_is_asked_for_a_schema_and_may_ignore_it(reply: str) -> None:
    with ScriptedJudgeServer(Reply(reply)) as server:
        judged = await build_judge(config(server.base)).ask(Stage1(PROMPT), WHERE)
    assert judged.ok
    (body,) = server.requests
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["strict"] is True
    entry = body["response_format"]["json_schema"]["schema"]["properties"]["entries"]["items"]
    assert entry["required"] == ["grounding_references", "title", "description", "evaluator_instruction"]


@pytest.mark.parametrize("status", [400, 422, 501])
async def test_a_server_that_refuses_schemas_is_asked_without_from_then_on(status: int, tmp_path: Path) -> None:
    refusal = Reply("response_format: extra inputs are not permitted", status)
    with ScriptedJudgeServer(refusal, Reply(CRITERION)) as server:
        judge = build_judge(config(server.base, cache=tmp_path))
        assert (await judge.ask(Stage1(PROMPT), WHERE)).ok
        assert (await judge.ask(Stage1((*PROMPT, Message(role="user", content="again"))), WHERE)).ok
        assert ["response_format" in body for body in server.requests] == [True, False, False]
        # What was answered without a schema is found by whoever would ask with one.
        assert (await build_judge(config(server.base, cache=tmp_path)).ask(Stage1(PROMPT), WHERE)).ok
        assert len(server.requests) == 3


async def test_a_prompt_that_is_refused_either_way_does_not_speak_against_schemas() -> None:
    refusal = Reply("this prompt is no good", 400)
    with ScriptedJudgeServer(refusal, refusal, Reply(CRITERION)) as server:
        judge = build_judge(config(server.base))
        judged = await judge.ask(Stage1(PROMPT), WHERE)
        assert judged.error is not None
        assert "this prompt is no good" in judged.error
        assert (await judge.ask(Stage1(PROMPT), WHERE)).ok
    assert ["response_format" in body for body in server.requests] == [True, False, True]


async def test_schemas_can_be_turned_off_and_a_second_question_keeps_them() -> None:
    with ScriptedJudgeServer(Reply("{}"), Reply(CRITERION)) as server:
        assert (await build_judge(config(server.base)).ask(Stage1(PROMPT), WHERE)).ok
        assert (await build_judge(config(server.base, structured_output=False)).ask(Stage1(PROMPT), WHERE)).ok
    assert ["response_format" in body for body in server.requests] == [True, True, False]


CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
NAMELESS_CALL = {"id": "1", "type": "function", "function": {"arguments": "{}"}}


@pytest.mark.parametrize(
    ("reply", "reason", "message"),
    [
        (Reply(None, message={"refusal": "I cannot judge this."}), "refusal", "refused to answer: 'I cannot judge"),
        (Reply(None, finish_reason="tool_calls", message={"tool_calls": [CALL]}), "tool_calls", "search"),
        (Reply("", message={"tool_calls": [CALL]}), "tool_calls", "called a tool"),
        (Reply("", message={"tool_calls": [NAMELESS_CALL]}), "tool_calls", "a tool({})"),
        (Reply("", message={"reasoning_content": CRITERION}), "reasoning", "reasoning but no answer"),
        (Reply("", message={"reasoning": CRITERION}), "reasoning", "reasoning but no answer"),
        (Reply("", message={"thinking_blocks": [THOUGHT]}), "reasoning", "reasoning but no answer"),
        (Reply("", finish_reason="length", message={"reasoning_content": "hm"}), "length", "reasoning used all of"),
        (Reply(CRITERION, finish_reason="abort"), "abort", "the provider broke the reply off"),
        (Reply(CRITERION, finish_reason="error"), "error", "the provider broke the reply off"),
        (Reply(CRITERION, finish_reason="model_length"), "model_length", "the provider broke the reply off"),
    ],
)
async def test_an_answer_that_is_none_is_named_as_what_it_is(reply: Reply, reason: str, message: str) -> None:
    with ScriptedJudgeServer(reply) as server:
        judged = await build_judge(config(server.base)).ask(Stage1(PROMPT), WHERE)
    assert judged.error is not None
    assert message in judged.error
    assert judged.calls[0].finish_reason == reason


async def test_half_a_surrogate_pair_in_a_reply_is_kept_out_of_files_and_of_the_next_question() -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "no JSON \ud83d"}}
    body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
    with ScriptedJudgeServer(Reply(raw=body, headers={"content-type": "application/json"}), Reply(CRITERION)) as server:
        judged = await build_judge(config(server.base)).ask(Stage1(PROMPT), WHERE)
    assert judged.ok
    assert [call.reply for call in judged.calls] == ["no JSON ?", CRITERION]

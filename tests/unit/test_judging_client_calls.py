"""What the client makes of an endpoint's answers: completions, bills and what the pool is told, without HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging import client as client_module
from draco_ray.judging import pricing
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.endpoint import Borrowed, Server
from draco_ray.judging.limiter import LOST, UNSENT, LeaseRequest, Limiter, LimiterQueue, RequestResult
from draco_ray.judging.outage import FailureKind, NextAction
from draco_ray.judging.phases import phase_rank
from draco_ray.judging.pricing import bound_request_cost
from draco_ray.judging.reply_cache import CLAIM_SECONDS, REPLIES_FILE, ReplyCache, _row, read_cost_ledger, request_key
from draco_ray.records import Message, OriginalCost

PRICE = Price(input=2.0, output=10.0)
TEXT = "a question of forty characters, or nearly"
NOW = 1000.0
TOKENS = 300


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return NOW + self.now - 50.0


class Pool(LimiterQueue):
    """Leases without limits that take a second to get; remembers what it was asked and told."""

    def __init__(self, clock: Clock, verdict: NextAction | None = None) -> None:
        super().__init__(Limiter(JudgeLimits()))
        self.clock, self.verdict = clock, verdict
        self.asked: list[LeaseRequest] = []
        self.ended: list[RequestResult] = []
        self.numbers: list[str] = []

    async def lease(self, asked: LeaseRequest) -> str:
        self.asked.append(asked)
        assert len(self.asked) < 50, "asked for leases without end"
        self.clock.now += 1.0
        self.numbers.append(await super().lease(asked))
        return self.numbers[-1]

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        assert number in self.numbers
        self.ended.append(ended)
        found = await super().settle(number, ended)
        return found if self.verdict is None else self.verdict


def said(text: Any = "fine", **usage: int) -> Any:
    """A response of LiteLLM's."""
    counts = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110} | usage
    details = SimpleNamespace(cached_tokens=counts.pop("cached", 0), cache_creation_tokens=counts.pop("written", 0))
    thought = SimpleNamespace(reasoning_tokens=counts.pop("reasoning", 0))
    told = SimpleNamespace(**counts, prompt_tokens_details=details, completion_tokens_details=thought)
    choice = SimpleNamespace(message=SimpleNamespace(content=text), finish_reason="stop")
    return SimpleNamespace(choices=[choice], usage=told if usage != {"none": 1} else None)


def trouble(status: int, text: str = "trouble") -> openai.APIStatusError:
    import httpx

    response = httpx.Response(status, request=httpx.Request("POST", "http://judge"))
    return openai.APIStatusError(text, response=response, body=None)


def unreachable(text: str = "cannot connect") -> openai.APIStatusError:
    """As LiteLLM says it."""
    import httpx

    error = trouble(500, text)
    error.__cause__ = httpx.ConnectError("refused")
    return error


class Scripted:
    """A client whose endpoint answers by script; every request takes ten seconds."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *script: Any,
        folder: Path | None = None,
        pooled: bool = True,
        verdict: NextAction | None = None,
        **config: Any,
    ) -> None:
        self.clock = Clock()
        monkeypatch.setattr(client_module, "time", self.clock)
        monkeypatch.setattr(pricing, "_litellm_price", lambda *_: None)
        values = {
            "model": "openai/m", "api_base": "http://judge", "api_key_env": "NO_SUCH_KEY", "prices": {"m": PRICE},
            "max_attempts": 3, "max_tokens": TOKENS,
        }  # fmt: skip
        self.config = JudgeConfig.model_validate(values | config)
        self.pool = Pool(self.clock, verdict)
        self.cache = None if folder is None else ReplyCache(folder)
        self.naps: list[float] = []
        self.sent: list[tuple[Request, Server, int, float]] = []
        self.script = list(script)
        leases = self.pool if pooled else None
        self.client = LiteLLMClient(self.config, self.cache, self._sleep, leases)
        self.client._endpoint.complete = self._complete  # type: ignore[method-assign]

    async def _sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.clock.now += 100.0

    async def _complete(self, request: Request, server: Server, max_tokens: int, timeout: float) -> Any:
        self.sent.append((request, server, max_tokens, timeout))
        self.clock.now += 10.0
        answer = self.script.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def __call__(self, **changes: Any) -> Completion:
        return await self.client(a_request(**changes))


def a_request(text: str = TEXT, **changes: Any) -> Request:
    return Request(messages=(Message(role="user", content=text),), **changes)


def most(tokens: int = TOKENS, text: str = TEXT, **sent: Any) -> pricing.CostBound:
    return bound_request_cost(PRICE, a_request(text).messages, tokens, sent)


async def test_a_reply_is_told_with_all_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, said(cached=40, reasoning=4), request_timeout_seconds=7.0)
    request, lent_for = a_request(phase="score", group="g"), []
    borrow = scripted.client._servers.borrow

    def lend(request: Request) -> Any:
        lent_for.append(request)
        return borrow(request)

    monkeypatch.setattr(scripted.client._servers, "borrow", lend)
    completion = await scripted.client(request)
    assert lent_for == [request]
    assert completion == Completion(
        text="fine", finish_reason="stop", model="openai/m", input_tokens=100, cached_tokens=40, output_tokens=10,
        dollars=completion.dollars, started_at=NOW, seconds=11.0, requests=1, reasoning_tokens=4,
        call_id=scripted.pool.numbers[0], waited_seconds=1.0,
    )  # fmt: skip
    assert completion.dollars == pytest.approx(pricing.reply_cost(PRICE, 100, 40, 10))
    assert scripted.sent == [(request, Server("http://judge", "none"), TOKENS, 7.0)]
    (asked,) = scripted.pool.asked
    bound = most()
    assert (asked.input_tokens, asked.output_tokens, asked.dollars) == (bound.input_tokens, TOKENS, bound.dollars)
    assert asked.kind == "score"
    assert asked.rank == phase_rank("score")
    assert scripted.pool.ended == [RequestResult(tokens=110, output_tokens=10, dollars=completion.dollars)]
    assert scripted.naps == []


async def test_what_is_written_to_a_cache_is_paid_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    price = Price(input=2.0, output=10.0, cached_input=0.5, cache_write=4.0)
    scripted = Scripted(monkeypatch, said(cached=40, written=20), prices={"m": price})
    assert (await scripted()).dollars == pytest.approx((40 * 2 + 40 * 0.5 + 20 * 4 + 10 * 10) / 1e6)


async def test_a_request_without_a_phase_is_of_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, said())
    await scripted()
    assert scripted.pool.asked[0].kind == ""


async def test_a_schema_and_further_arguments_count_towards_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, said(), said(), extra_body={"a": "b" * 100})
    await scripted()
    await scripted(schema={"type": "x" * 100})
    plain, held = scripted.pool.asked
    assert plain.input_tokens == most(a="b" * 100).input_tokens
    assert held.input_tokens == most(a="b" * 100, schema={"type": "x" * 100}).input_tokens > plain.input_tokens


async def test_a_reply_without_any_choice_or_usage_is_empty_and_costs_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    completion = await Scripted(monkeypatch, SimpleNamespace(choices=[]))()
    assert (completion.text, completion.finish_reason, completion.dollars) == ("", "stop", most().dollars)


@pytest.mark.parametrize("usage", [{"none": 1}, {"prompt_tokens": 0}, {"prompt_tokens": 10**9}])
async def test_a_reply_that_does_not_say_its_usage_is_booked_at_the_most_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, usage: dict[str, int]
) -> None:
    scripted = Scripted(monkeypatch, said(**usage), said(**usage))
    bound = most()
    for _ in range(2):
        completion = await scripted()
        assert (completion.input_tokens, completion.output_tokens) == (bound.input_tokens, bound.output_tokens)
        assert (completion.cached_tokens, completion.reasoning_tokens, completion.usage_known) == (0, 0, False)
        assert completion.dollars == completion.estimated_dollars == bound.dollars > 0
    told = RequestResult(
        tokens=bound.input_tokens + bound.output_tokens, output_tokens=bound.output_tokens, dollars=bound.dollars,
        estimated=True,
    )  # fmt: skip
    assert scripted.pool.ended == [told, told]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("judge openai/m at http://judge: a reply reports no plausible usage (")
    assert line.endswith("); replies like it count with their maximum cost")
    assert ("None" if usage == {"none": 1} else "namespace(prompt_tokens=") in line


async def test_without_a_price_a_reply_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    completion = await Scripted(monkeypatch, said(), prices={})()
    assert (completion.dollars, completion.estimated_dollars) == (0.0, 0.0)


async def test_a_configured_price_goes_before_what_the_endpoint_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def reported(*about: object) -> float:
        asked.append(about)
        return 0.5

    monkeypatch.setattr(client_module, "reported_cost", reported)
    assert (await Scripted(monkeypatch, said())()).dollars == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    response, scripted = said(), Scripted(monkeypatch, prices={})
    monkeypatch.setattr(client_module, "known_price", lambda config, model: PRICE)
    scripted.script.append(response)
    assert (await scripted()).dollars == 0.5
    assert asked == [(response,)]


async def test_requests_that_may_be_billed_are_booked_with_the_call_that_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "draco_ray.judging.client")
    scripted = Scripted(
        monkeypatch, TimeoutError(), trouble(429, "slow down"), said(), folder=tmp_path, max_outage_seconds=0,
        request_timeout_seconds=20.0,
    )  # fmt: skip
    completion = await scripted()
    bound = most()
    paid = pricing.reply_cost(PRICE, 100, 0, 10)
    assert (completion.dollars, completion.estimated_dollars) == (pytest.approx(bound.dollars + paid), bound.dollars)
    assert (completion.requests, completion.waited_seconds, completion.seconds) == (3, 3.0, 233.0)
    late, refused, fine = scripted.pool.ended
    assert late == RequestResult(
        tokens=bound.input_tokens + bound.output_tokens, output_tokens=bound.output_tokens, dollars=bound.dollars,
        estimated=True, trouble=FailureKind.TIMED_OUT, reason="no answer within 20 s",
    )  # fmt: skip
    assert refused == RequestResult(estimated=True, trouble=FailureKind.RATE_LIMITED, reason="slow down", away=True)
    assert fine == RequestResult(tokens=110, output_tokens=10, dollars=paid)
    assert read_cost_ledger(tmp_path).settled == dict(
        zip(scripted.pool.numbers, [bound.dollars, 0.0, pytest.approx(paid)], strict=True)
    )
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("judge openai/m at http://judge: request 1: no answer within 20 s; again in ")
    assert second.startswith("judge openai/m at http://judge: request 2: slow down; again in ")
    assert [f"{nap:.1f} s" for nap in scripted.naps] == [line.rpartition("again in ")[2] for line in (first, second)]


async def test_a_call_that_failed_says_why_and_what_it_may_have_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (trouble(500, "broken"), trouble(500, "broken"), trouble(500, "broken inside"))
    scripted = Scripted(monkeypatch, *script, max_outage_seconds=0)
    completion = await scripted()
    assert completion == Completion(
        text="", finish_reason="unavailable", model="openai/m", input_tokens=0, cached_tokens=0, output_tokens=0,
        dollars=completion.dollars, started_at=NOW, seconds=233.0, requests=3, error="broken inside",
        estimated_dollars=completion.dollars, call_id=scripted.pool.numbers[2], waited_seconds=3.0,
    )  # fmt: skip
    assert completion.dollars == pytest.approx(sum(ended.dollars for ended in scripted.pool.ended))


async def test_what_may_be_done_about_a_failure_stands_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "error_hint", lambda error: f"; see {error}")
    completion = await Scripted(monkeypatch, trouble(400, "no"), verdict=NextAction.FAIL)()
    assert (completion.error, completion.finish_reason) == ("no; see no", "error")


async def test_the_wait_is_bounded_by_the_configuration_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, trouble(500), trouble(500), said(), max_outage_seconds=0, max_backoff_seconds=0.1)
    await scripted()
    assert all(0.05 <= nap <= 0.1 for nap in scripted.naps)
    scripted = Scripted(monkeypatch, trouble(429), said(), max_outage_seconds=0, max_backoff_seconds=0.1)
    monkeypatch.setattr(scripted.client._endpoint, "hint", lambda error: float(error.status_code - 424))
    await scripted()
    assert 5.0 <= scripted.naps[0] <= 5.5
    assert scripted.pool.ended[0].hint == 5.0


async def test_a_request_whose_end_nobody_saw_stays_in_the_book(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(monkeypatch, asyncio.CancelledError(), folder=tmp_path)
    with pytest.raises(asyncio.CancelledError):
        await scripted()
    assert scripted.pool.ended == [LOST]
    assert read_cost_ledger(tmp_path).under_way == {scripted.pool.numbers[0]: most().dollars}


async def test_a_reply_that_cannot_be_kept_is_abandoned_and_one_that_cannot_be_booked_not_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def full(*_: object) -> None:
        raise OSError("the disk is full")

    scripted = Scripted(monkeypatch, said(), folder=tmp_path)
    monkeypatch.setattr(scripted.cache, "settle", full)
    with pytest.raises(OSError, match="full"):
        await scripted()
    assert scripted.pool.ended == [LOST]
    scripted = Scripted(monkeypatch, said(), folder=tmp_path)
    monkeypatch.setattr(scripted.cache, "begin", full)
    with pytest.raises(OSError, match="full"):
        await scripted()
    assert (scripted.sent, scripted.pool.ended) == ([], [UNSENT])


async def test_an_answer_is_replayed_at_no_cost_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(monkeypatch, said(cached=40, reasoning=4), said("other"), folder=tmp_path)
    first = await scripted()
    scripted.clock.now = 550.0
    again = await scripted()
    paid = OriginalCost(
        call_id=first.call_id, requests=1, dollars=first.dollars, estimated_dollars=0.0, seconds=11.0, started_at=NOW,
        waited_seconds=1.0,
    )  # fmt: skip
    assert again == Completion(
        text="fine", finish_reason="stop", model="openai/m", input_tokens=100, cached_tokens=40, output_tokens=10,
        dollars=0.0, started_at=NOW + 500, seconds=0.0, requests=0, reasoning_tokens=4, paid=paid,
    )  # fmt: skip
    await scripted.client.forget(a_request())
    assert (await scripted()).text == "other"
    await Scripted(monkeypatch).client.forget(a_request())


async def test_the_same_question_at_the_same_time_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = Scripted(monkeypatch, said("one"), said("two"), said("three"), folder=tmp_path)
    answers = await asyncio.gather(scripted(), scripted(), scripted(vote=1), scripted(scope="mine"))
    assert sorted(answer.text for answer in answers) == ["one", "one", "three", "two"]
    assert len(scripted.sent) == 3


async def test_the_same_question_of_two_workers_at_the_same_time_is_paid_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = Scripted(monkeypatch, said("one"), folder=tmp_path), Scripted(monkeypatch, said("other"))
    other.client._cache = one.cache
    first, second = await asyncio.gather(one(), other())
    assert (first.text, second.text, other.sent) == ("one", "one", [])
    assert (second.dollars, second.paid is not None) == (0.0, True)


@pytest.mark.parametrize("end", ["an error", "cancelled"])
async def test_a_worker_that_got_no_answer_lets_the_next_one_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    one = Scripted(monkeypatch, trouble(400, "too long"), folder=tmp_path, verdict=NextAction.FAIL)
    other = Scripted(monkeypatch, said("other"))
    other.client._cache = one.cache
    asking = asyncio.Event()
    if end == "cancelled":

        async def never(*_: Any) -> Any:
            asking.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(one.client._endpoint, "complete", never)
        first = asyncio.create_task(one())
        await asking.wait()
        second = asyncio.create_task(other())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).text == "other"
    else:
        first_answer, second_answer = await asyncio.gather(one(), other())
        assert (first_answer.error, second_answer.text) == ("too long", "other")


async def test_whoever_has_the_same_question_waits_however_long_the_answer_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A claim is renewed as long as its call lives, long before it ends."""
    naps: set[float] = set()
    sleep = asyncio.sleep

    async def nap(seconds: float) -> None:
        naps.add(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", nap)
    scripted = Scripted(monkeypatch, folder=tmp_path)
    assert scripted.cache is not None
    claims: list[str] = []
    renewed = asyncio.Event()
    claim = scripted.cache.claim

    async def count(key: str, by: str) -> None:
        claims.append(by)
        if len(claims) > 3:
            renewed.set()
        await claim(key, by)

    async def slow(*_: Any) -> Any:
        async with asyncio.timeout(600):
            await renewed.wait()
        return said()

    monkeypatch.setattr(scripted.cache, "claim", count)
    monkeypatch.setattr(scripted.client._endpoint, "complete", slow)
    assert (await scripted()).text == "fine"
    assert len(set(claims)) == 1
    assert naps == {CLAIM_SECONDS / 3}


async def test_other_questions_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted = Scripted(monkeypatch, folder=tmp_path)
    both = asyncio.Barrier(2)

    async def complete(*_: Any) -> Any:
        async with asyncio.timeout(600):
            await both.wait()
        return said()

    monkeypatch.setattr(scripted.client._endpoint, "complete", complete)
    assert [each.error for each in await asyncio.gather(scripted(), scripted(vote=1))] == [None, None]


@pytest.mark.parametrize(
    "damage", [{}, {"text": None}, {"text": 5}, {"output_tokens": "many"}, {"finish_reason": None}, {"call_id": None}]
)
async def test_a_stored_reply_that_is_damaged_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: dict[str, object]
) -> None:
    scripted = Scripted(monkeypatch, said(), said("anew"), folder=tmp_path)
    await scripted()
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        (answer,) = file.execute("SELECT answer FROM replies").fetchone()
        stored = json.loads(answer.partition(" ")[2])
        file.execute("UPDATE replies SET answer = ?", (_row({**stored, **damage} if damage else {}),))
    assert (await scripted()).text == "anew"
    assert ((await scripted()).text, len(scripted.sent)) == ("anew", 2)


async def test_a_flipped_bit_in_a_stored_reply_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted = Scripted(monkeypatch, said("score 1"), said("anew"), folder=tmp_path)
    await scripted()
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        file.execute("UPDATE replies SET answer = replace(answer, 'score 1', 'score 0')")
    assert (await scripted()).text == "anew"


KEYS: dict[str, Callable[[pytest.MonkeyPatch], Scripted]] = {
    "plain": lambda patch: Scripted(patch),
    "warm": lambda patch: Scripted(patch, temperature=0.7),
    "thinking": lambda patch: Scripted(patch, reasoning_effort="low"),
    "cold": lambda patch: Scripted(patch, temperature=None),
    "elsewhere": lambda patch: Scripted(patch, api_base="http://other"),
    "longer": lambda patch: Scripted(patch, max_tokens=TOKENS + 1),
}


async def test_an_answer_is_kept_for_whoever_asks_the_same_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {name: make(monkeypatch).client._key(a_request()) for name, make in KEYS.items()}
    assert len(set(keys.values())) == len(KEYS)
    plain = Scripted(monkeypatch).client
    assert plain._key(a_request()) == keys["plain"]
    assert len({plain._key(a_request(**each)) for each in ({}, {"vote": 1}, {"scope": "s"}, {"text": "other"})}) == 4
    assert plain._key(a_request(phase="score", group="g", schema={"a": 1})) == keys["plain"]
    sent = {
        "model": "openai/m",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": TOKENS,
        "api_base": "http://judge",
        "temperature": 0.1,
    }
    assert keys["plain"] == request_key({**sent, "vote": 0})
    assert plain._key(a_request(vote=2, scope="s")) == request_key({**sent, "vote": 2, "scope": "s"})
    started = Scripted(monkeypatch, api_base=None, rule_judge={"start": True})
    del sent["api_base"]
    assert started.client._key(a_request()) == request_key({**sent, "vote": 0})
    servers = [Scripted(monkeypatch, api_base=base, rule_judge={"start": True}) for base in ("http://a", "http://b")]
    assert len({each.client._key(a_request()) for each in servers}) == 1


def test_where_the_endpoint_does_not_count_it_is_no_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**config: Any) -> str:
        return LiteLLMClient(Scripted(monkeypatch, **config).config, endpoint_counts=False)._key(a_request())

    without = Scripted(monkeypatch, api_base=None).client._key(a_request())
    assert key() == key(api_base=None) == key(rule_judge={"start": True}) == without


async def test_a_check_is_small_impatient_and_within_what_a_call_may_try(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, said('{"entries": ["OK"]}'), max_attempts=9)
    await scripted.client.check()
    ((request, _, tokens, _),) = scripted.sent
    assert (request, tokens) == (client_module.PROBE_REQUEST, client_module.PROBE_TOKENS)
    assert scripted.client._endpoint.constrained
    for attempts, requests in ((9, client_module.CHECK_ATTEMPTS), (2, 2)):
        scripted = Scripted(monkeypatch, *[trouble(500, "gone")] * 9, max_attempts=attempts)
        with pytest.raises(JudgeUnavailable, match="^judge openai/m at http://judge: gone"):
            await scripted.client.check()
        assert len(scripted.sent) == requests


@pytest.mark.parametrize("attempts", [1, 9])
async def test_a_check_waits_for_an_endpoint_that_is_busy(monkeypatch: pytest.MonkeyPatch, attempts: int) -> None:
    busy = [trouble(429, "slow down"), trouble(503, "overloaded")] * 4
    scripted = Scripted(monkeypatch, *busy, said('{"entries": ["OK"]}'), max_attempts=attempts)
    await scripted.client.check()
    assert len(scripted.sent) == 9


async def test_under_a_budget_a_check_wants_the_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    await Scripted(monkeypatch, said(none=1), structured_output=False).client.check()
    await Scripted(monkeypatch, said(), limits={"dollars": 2.5}, structured_output=False).client.check()
    unknown = Scripted(monkeypatch, said(none=1), limits={"dollars": 2.5}, structured_output=False)
    with pytest.raises(JudgeUnavailable) as problem:
        await unknown.client.check()
    assert str(problem.value) == (
        "judge openai/m at http://judge: replies do not report usage (prompt_tokens, completion_tokens), so "
        "judge.limits.dollars=2.5 cannot be enforced; make the endpoint report usage, or set judge.limits.dollars=null"
    )


@pytest.mark.parametrize(("verdict", "requests"), [(NextAction.FAIL, 1), (NextAction.AGAIN, 3)])
async def test_what_the_pool_says_becomes_of_an_error(
    monkeypatch: pytest.MonkeyPatch, verdict: NextAction, requests: int
) -> None:
    scripted = Scripted(monkeypatch, *[trouble(500, "gone")] * 3, verdict=verdict, max_outage_seconds=0)
    completion = await scripted()
    assert (completion.error, completion.requests) == ("gone", requests)


async def test_a_call_that_is_refused_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, trouble(401, "no such\nkey"))
    with pytest.raises(JudgeUnavailable) as problem:
        await scripted()
    assert str(problem.value) == (
        "judge openai/m at http://judge: the endpoint refused a request: no such key; check judge.model, "
        "judge.api_base and the key in environment variable NO_SUCH_KEY, which is not set"
    )
    assert len(scripted.sent) == 1


async def test_a_judge_that_cannot_be_reached_ends_the_run_unless_the_pool_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Scripted(monkeypatch, *[unreachable()] * 3, max_outage_seconds=0)
    with pytest.raises(JudgeUnavailable) as problem:
        await alone()
    assert (
        str(problem.value)
        == "judge openai/m at http://judge: not reachable after 3 attempts: cannot connect; check judge.api_base"
    )
    assert len(alone.naps) == 2
    # There it is the pool that knows whether anybody is answered.
    pooled = Scripted(monkeypatch, unreachable(), verdict=NextAction.FAIL)
    assert (await pooled()).error == "cannot connect"


async def test_a_call_that_fails_while_others_are_answered_may_fail_so_often_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (trouble(500, "once"), trouble(500, "twice"))
    scripted = Scripted(monkeypatch, *script, max_attempts=2, max_outage_seconds=0.5)
    completion = await scripted()
    assert len(scripted.sent) == 2
    _, second = scripted.pool.numbers
    assert (completion.error, completion.requests, completion.call_id) == ("twice", 2, second)
    assert (completion.waited_seconds, completion.seconds) == (2.0, 122.0)
    assert completion.dollars == pytest.approx(sum(ended.dollars for ended in scripted.pool.ended))


async def test_failures_of_an_outage_are_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, *[trouble(500)] * 20, said(), max_attempts=1, verdict=NextAction.WAIT)
    completion = await scripted()
    assert (completion.text, completion.requests) == ("fine", 21)


async def test_the_wait_that_an_endpoint_asks_of_a_call_is_a_minute_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    script = [trouble(429)] * 4
    scripted = Scripted(monkeypatch, *script, said(), max_attempts=9, max_outage_seconds=0)
    hints = [0.0, 2.0, 10.0, 100.0]
    given = iter([hint for hint in hints for _ in range(2)])
    monkeypatch.setattr(scripted.client._endpoint, "hint", lambda error: next(given))
    await scripted()
    # A tenth longer than asked for, and no more than a second.
    assert scripted.naps == [0.0, 2.2, 11.0, 61.0]


async def test_a_server_is_given_back_as_lost_only_if_its_own_connection_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lent: list[Borrowed] = []

    @asynccontextmanager
    async def borrow(request: Request) -> AsyncIterator[Borrowed]:
        lent.append(Borrowed(Server("http://judge", "none")))
        yield lent[-1]

    script = (unreachable(), trouble(500), unreachable(), said())
    scripted = Scripted(monkeypatch, *script, max_attempts=9, max_outage_seconds=0)
    monkeypatch.setattr(scripted.client._servers, "borrow", borrow)
    assert (await scripted()).text == "fine"
    assert [each.lost for each in lent] == [True, False, True, False]


async def test_a_request_takes_no_longer_than_it_may_whatever_the_transport_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(*_: Any) -> Any:
        await asyncio.sleep(1.0)
        return said()

    scripted = Scripted(monkeypatch, max_attempts=1, request_timeout_seconds=0.01, max_outage_seconds=0)
    monkeypatch.setattr(scripted.client._endpoint, "complete", slow)
    assert (await scripted()).error == "no answer within 0.01 s"


async def test_no_more_requests_are_under_way_than_a_worker_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, *[said()] * 4, concurrency_per_worker=2)
    under_way = peak = 0

    async def complete(*_: Any) -> Any:
        nonlocal under_way, peak
        under_way += 1
        peak = max(peak, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return said()

    monkeypatch.setattr(scripted.client._endpoint, "complete", complete)
    await asyncio.gather(*(scripted() for _ in range(4)))
    assert peak == 2


async def test_without_a_pool_nothing_is_limited_and_no_outage_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, *[trouble(500, "gone")] * 3, pooled=False)
    assert (await scripted()).error == "gone"
    assert math.isfinite(sum(scripted.naps))
    assert len(scripted.sent) == 3

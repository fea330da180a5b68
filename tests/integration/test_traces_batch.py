"""The batch APIs, against a stand-in of both behind a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from draco_ray.commands.judge import _settle_unanswered
from draco_ray.config.schema import DracoConfig, JudgeConfig, JudgeLimits, Price
from draco_ray.errors import ConfigError, JudgeUnavailable
from draco_ray.judging.completion import Request
from draco_ray.judging.limiter import Leases, Limiter, LimiterQueue
from draco_ray.judging.outage import JudgeHealth
from draco_ray.judging.reply_cache import ReplyCache, read_cost_ledger
from draco_ray.records import Message
from draco_ray.traces import batch, library
from draco_ray.traces.batch import BATCHES_FILE, BatchClient, BatchEndpoint
from draco_ray.traces.library import judge, open_judge
from draco_ray.traces.load import load_traces
from tests.support.batch_server import BatchServer
from tests.support.canned_judge import answer
from tests.unit.test_traces_load import FILES

pytestmark = [
    pytest.mark.slow,
    # A coroutine that nobody awaited is said when it is thrown away, wherever that is.
    pytest.mark.filterwarnings("error:coroutine:RuntimeWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

MODELS = {"openai": "openai/own", "anthropic": "anthropic/claude-own"}
SEPARATED = "two\u2028three\x85four"
"""Has ends of lines that JSON leaves as they are."""
PRICE = Price(input=10.0, output=100.0)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRACO_TEST_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "key-for-the-test")


def client(server: BatchServer, provider: str, cache: Path | None = None, leases: Leases | None = None) -> BatchClient:
    config = JudgeConfig(
        model=MODELS[provider],
        api_base=server.base if provider == "openai" else server.root,
        api_key_env="DRACO_TEST_KEY",
        prices={"own": PRICE, "claude-own": PRICE},
        cache=cache,
        max_backoff_seconds=0.05,
        max_attempts=2,
    )
    kept = None if cache is None else ReplyCache(cache)
    return BatchClient(config, kept, leases, quiet_seconds=0.1, poll_seconds=0.02)


async def killed(work: asyncio.Future[Any], when: Callable[[], bool]) -> None:
    while not when():  # noqa: ASYNC110 (another's task does it)
        await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


def submit_when_filled(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """Submit each batch when it has its number of requests: how far apart they come is up to the machine."""
    left = [*sizes]

    async def quiet(endpoint: BatchEndpoint, bodies: Mapping[str, object]) -> None:
        size = left.pop(0)
        while len(bodies) < size:  # noqa: ASYNC110 (added by others' tasks)
            await asyncio.sleep(0.01)

    monkeypatch.setattr(BatchEndpoint, "_quiet", quiet)


def asked(text: str) -> Request:
    return Request(messages=(Message(role="user", content=text),), phase="score")


@pytest.mark.parametrize("provider", sorted(MODELS))
async def test_requests_go_out_together_and_cost_half(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    submit_when_filled(monkeypatch, 3, 1)
    with BatchServer(lambda prompt: f"re: {prompt}", fails="bad") as server:
        complete = client(server, provider)
        await complete.check()
        found = await asyncio.gather(*(complete(asked(text)) for text in ("one", SEPARATED, "bad")))
    assert [each.text for each in found[:2]] == ["re: one", f"re: {SEPARATED}"]
    # Each file of replies was fetched once.
    assert len(server.fetched) == len(set(server.fetched)) == (2 if provider == "openai" else 0)
    assert "broken" in (found[2].error or "")
    # The third was asked again, alone.
    assert [len(batch["requests"]) for batch in server.batches.values()] == [3, 1]
    # 1000 tokens in and 100 out, at half of 10 and 100 dollars a million.
    assert [each.dollars for each in found[:2]] == [pytest.approx(0.01)] * 2
    assert [each.input_tokens for each in found[:2]] == [1000, 1000]


@pytest.mark.parametrize("provider", sorted(MODELS))
async def test_a_request_that_was_refused_is_not_put_into_another_batch(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_when_filled(monkeypatch, 2)
    with BatchServer(lambda prompt: f"re: {prompt}", refuses="bad") as server:
        complete = client(server, provider)
        good, bad = await asyncio.gather(complete(asked("one")), complete(asked("bad")))
    assert good.text == "re: one"
    assert (bad.finish_reason, bad.requests) == ("error", 1)
    assert "prompt was flagged" in (bad.error or "")
    assert len(server.batches) == 1


@pytest.mark.parametrize("provider", sorted(MODELS))
async def test_who_goes_on_waits_for_the_batch_that_is_under_way(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_when_filled(monkeypatch, 2, 1)
    with BatchServer(lambda prompt: f"re: {prompt}") as server:
        server.held.set()
        first = client(server, provider, tmp_path)
        waiting = asyncio.gather(*(first(asked(text)) for text in ("one", "two")))
        while not (tmp_path / BATCHES_FILE).is_file():  # noqa: ASYNC110 (written by another's task)
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.held.clear()
        again = client(server, provider, tmp_path)
        found = await asyncio.gather(*(again(asked(text)) for text in ("one", "two", "three")))
        assert [each.text for each in found] == ["re: one", "re: two", "re: three"]
        assert [len(batch["requests"]) for batch in server.batches.values()] == [2, 1]
        third = client(server, provider, tmp_path)
        assert [(await third(asked(text))).requests for text in ("one", "two", "three")] == [0, 0, 0]
    assert json.loads((tmp_path / BATCHES_FILE).read_text(encoding="utf-8")) == {}


@pytest.mark.parametrize("provider", sorted(MODELS))
async def test_requests_that_a_killed_process_left_are_booked_once(
    provider: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("one", "two")
    with BatchServer(lambda prompt: f"re: {prompt}") as server:
        server.held.set()
        first = client(server, provider, tmp_path)
        first._endpoint.quiet_seconds = 3600.0
        await killed(asyncio.gather(*map(first, map(asked, texts))), lambda: len(first._endpoint._next) == 2)
        assert read_cost_ledger(tmp_path).under_way == {}, "the provider has never received them"
        second = client(server, provider, tmp_path)
        await killed(asyncio.gather(*map(second, map(asked, texts))), (tmp_path / BATCHES_FILE).is_file)
        server.held.clear()
        book = read_cost_ledger(tmp_path)
        assert len(book.under_way) == 2
        for batch in (True, False):
            _settle_unanswered(tmp_path, SimpleNamespace(batch=batch, release=False))  # type: ignore[arg-type]
            assert ("2 requests of an earlier process had no answer" in capsys.readouterr().out) is not batch
        _settle_unanswered(tmp_path, SimpleNamespace(batch=True, release=True))  # type: ignore[arg-type]
        assert read_cost_ledger(tmp_path) == book
        # The budget does not suffice to pay for the requests a second time.
        limiter = Limiter(JudgeLimits(dollars=1.1 * book.dollars), spent=book.dollars, booked=book.under_way)
        third = client(server, provider, tmp_path, LimiterQueue(limiter))
        found = await asyncio.gather(*map(third, map(asked, texts)))
    assert [each.text for each in found] == ["re: one", "re: two"]
    settled = read_cost_ledger(tmp_path)
    assert (settled.under_way, settled.settled.keys()) == ({}, book.under_way.keys())
    assert [settled.dollars, limiter.spent] == pytest.approx([0.02, 0.02])


async def test_replies_that_were_read_and_not_stored_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*given: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    reached = asyncio.Event()
    with BatchServer(lambda prompt: f"re: {prompt}") as server:
        with monkeypatch.context() as patched:
            patched.setattr(ReplyCache, "settle", never)
            await killed(asyncio.ensure_future(client(server, "openai", tmp_path)(asked("one"))), reached.is_set)
        assert (await client(server, "openai", tmp_path)(asked("one"))).text == "re: one"
        assert len(server.batches) == 1
    assert json.loads((tmp_path / BATCHES_FILE).read_text(encoding="utf-8")) == {}


async def test_a_batch_that_could_not_be_asked_about_is_waited_for_again(tmp_path: Path) -> None:
    async def away(batch: str) -> None:
        raise httpx.ConnectError("away")

    with BatchServer(lambda prompt: f"re: {prompt}") as server:
        patience = JudgeHealth(max_seconds=0.5, max_backoff_seconds=0.05)
        first = client(server, "openai", tmp_path, LimiterQueue(Limiter(JudgeLimits(), outage=patience)))
        first._endpoint._api.results = away  # type: ignore[method-assign]
        with pytest.raises(JudgeUnavailable, match="judge.max_outage_seconds=0.5"):
            await first(asked("one"))
        second = client(server, "openai", tmp_path)
        assert (await second(asked("one"))).text == "re: one"
        assert len(server.batches) == 1
    assert read_cost_ledger(tmp_path).dollars == pytest.approx(0.01)
    assert json.loads((tmp_path / BATCHES_FILE).read_text(encoding="utf-8")) == {}


async def test_the_judges_of_a_panel_go_on_with_a_batch_each(tmp_path: Path) -> None:
    with BatchServer(lambda prompt: f"re: {prompt}") as server:
        server.held.set()
        config = client(server, "openai", tmp_path)._config
        configs = [config, config.model_copy(update={"model": "openai/second"})]

        def clients() -> list[BatchClient]:
            kept = ReplyCache(tmp_path)
            return [BatchClient(each, kept, quiet_seconds=0.1, poll_seconds=0.02) for each in configs]

        waiting = asyncio.gather(*(each(asked("one")) for each in clients()))
        kept = tmp_path / BATCHES_FILE
        while not kept.is_file() or len(json.loads(kept.read_text(encoding="utf-8"))) < 2:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.held.clear()
        found = await asyncio.gather(*(each(asked("one")) for each in clients()))
        assert [each.text for each in found] == ["re: one"] * 2
        assert len(server.batches) == 2
    assert json.loads((tmp_path / BATCHES_FILE).read_text(encoding="utf-8")) == {}


@pytest.mark.parametrize(("code", "requests"), [("invalid_json_line", 1), ("token_limit_exceeded", 2)])
async def test_a_batch_that_failed_costs_nothing_and_says_why(code: str, requests: int) -> None:
    with BatchServer(str, invalid=code) as server:
        found = await asyncio.gather(*(client(server, "openai")(asked(text)) for text in ("one", "two")))
    assert [(each.requests, each.dollars) for each in found] == [(requests, 0.0)] * 2
    assert f"batch: failed: about {code}" in (found[0].error or "")
    # Where others' batches are in the way, the judge refuses no rollout: a union is not asked without some of them.
    assert found[0].finish_reason == ("error" if requests == 1 else "unavailable")


async def test_a_batch_waits_until_there_is_room_for_its_tokens() -> None:
    with BatchServer(lambda prompt: f"re: {prompt}", invalid="token_limit_exceeded") as server:
        waiting = asyncio.ensure_future(client(server, "openai")(asked("one")))
        # The first batch is polled, and fails; the second comes after a pause.
        while not any(each["looks"] for each in server.batches.values()):  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.001)
        server.invalid = None
        assert (await waiting).text == "re: one"


@pytest.mark.parametrize("provider", sorted(MODELS))
async def test_a_provider_that_cannot_be_reached_is_an_error_of_the_judge(provider: str) -> None:
    with BatchServer(str) as server:
        pass
    with pytest.raises(JudgeUnavailable, match="not reachable after 2 attempts"):
        await client(server, provider)(asked("one"))


async def test_traces_are_judged_in_five_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(settled: library.Plan) -> library.MeteredJudge:
        meter = open_judge(settled)
        endpoint = meter.complete.complete._endpoint  # type: ignore[union-attr]
        endpoint.poll_seconds = 0.02
        return meter

    submit_when_filled(monkeypatch, 2, 4, 2, 4, 4)
    monkeypatch.setattr(library, "open_judge", quick)
    groups = load_traces([FILES / "openai_chat.jsonl", FILES / "tau2.json"])
    priced = DracoConfig(judge=JudgeConfig(prices={"own": PRICE}))
    with BatchServer(answer) as server:
        judged = await judge(
            groups, "openai/own", api_base=server.base, config=priced, batch=True, out=tmp_path / "out", budget=50.0
        )
    assert [[trace.reward for trace in group.rollouts] for group in judged] == [[1.0, -1.0]] * 2
    assert [len(batch["requests"]) for batch in server.batches.values()] == [2, 4, 2, 4, 4]


async def test_a_batch_is_submitted_when_a_pause_has_brought_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    bodies: dict[str, dict[str, object]] = {"first": {}}

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) < 3:
            bodies[f"after {len(pauses)}"] = {}

    with BatchServer(str) as server:
        endpoint = client(server, "openai")._endpoint
        assert isinstance(endpoint, BatchEndpoint)
        monkeypatch.setattr(batch, "asyncio", SimpleNamespace(sleep=pause))
        await endpoint._quiet(bodies)
    assert pauses == [0.1] * 3
    assert len(bodies) == 3


def test_providers_without_batches_are_named() -> None:
    with pytest.raises(ConfigError, match="batches are supported for OpenAI and Anthropic, not for gemini"):
        BatchClient(JudgeConfig(model="gemini/gemini-2.5-pro"))

"""The judge client under the pool's limits and health, against a real HTTP server; the limiter's actor without Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price
from draco_ray.errors import BudgetSpent, JudgeUnavailable
from draco_ray.judging.actors import JudgeLimiterActor, request_number_prefix
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.limiter import LeaseRequest, RequestResult
from draco_ray.judging.outage import NextAction
from draco_ray.judging.phases import Score
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.reply_cache import ReplyCache, read_cost_ledger
from draco_ray.records import Judged, Message, ScoredCriterion
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.runs.store_actor import RunStoreActor
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.small_run import TASKS, a_call, a_trajectory, rubric
from tests.support.turns import AheadClock

pytestmark = pytest.mark.slow

PRICE = Price(input=0.0, output=1000.0)
"""A dollar per thousand tokens of reply."""


class DirectLeases:
    """What `LimiterClient` is in a run, for a limiter in this process."""

    def __init__(self, limiter: JudgeLimiterActor) -> None:
        self.actor = limiter

    async def lease(self, asked: LeaseRequest) -> str:
        return await self.actor.lease(asked)

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        return await self.actor.settle(number, ended)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "setting: draco\n")


def ask(number: int, text: str = "question") -> Request:
    return Request(messages=(Message(role="user", content=f"{text} {number}"),), phase="score")


def settings(base: str, limits: JudgeLimits | None = None, **changes: Any) -> JudgeConfig:
    values: dict[str, Any] = {
        "model": "openai/scripted",
        "api_base": base,
        "api_key_env": "DRACO_TEST_KEY",
        "max_tokens": 1000,
        "max_attempts": 4,
        "max_backoff_seconds": 0.05,
        "limits": limits or JudgeLimits(),
        "prices": {"scripted": PRICE},
    }
    return JudgeConfig.model_validate(values | changes)


def client(
    base: str, limits: JudgeLimits | None, run: RunDirectory, **changes: Any
) -> tuple[LiteLLMClient, JudgeLimiterActor]:
    config = settings(base, limits, **changes)

    async def no_sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    leases = DirectLeases(JudgeLimiterActor(config, run.path))
    return LiteLLMClient(config, ReplyCache(run.judge_cache), no_sleep, leases), leases.actor


async def test_the_budget_ends_the_calls_before_it_is_exceeded_and_counts_on_after_a_restart(run: RunDirectory) -> None:
    # A call may cost a dollar and costs 40 cents.
    with ScriptedJudgeServer(Reply("fine", output_tokens=400)) as server:
        judge, _ = client(server.base, JudgeLimits(dollars=2.0), run)
        answers = await asyncio.gather(*(judge(ask(number)) for number in range(6)), return_exceptions=True)
        paid = [answer for answer in answers if not isinstance(answer, BaseException)]
        refused = [answer for answer in answers if isinstance(answer, BudgetSpent)]
        # After three, 80 cents are left, which might not be enough for a fourth.
        assert (len(paid), len(refused)) == (3, 3)
        assert len(server.requests) == 3
        assert "judge.limits.dollars" in str(refused[0])
        assert "\n" not in str(refused[0])

        # What was answered is replayed without a lease, even with the budget spent.
        again = [await judge(ask(number)) for number, answer in enumerate(answers) if answer in paid]
        assert [answer.requests for answer in again] == [0, 0, 0]


async def test_what_the_archive_says_was_paid_counts_against_the_budget(run: RunDirectory) -> None:
    # Two cents each.
    calls = [a_call("score", 1, TASKS[0], rollout) for rollout in (0, 1)]
    RunStore(run).write("judge_calls", 1, "calls", rows.call_rows(1, calls))
    with ScriptedJudgeServer(Reply("fine", output_tokens=1)) as server:
        with pytest.raises(BudgetSpent, match=r"\$0\.0400 of"):
            await client(server.base, JudgeLimits(dollars=1.03), run)[0](ask(0))
        assert server.requests == []
        assert (await client(server.base, JudgeLimits(dollars=1.04), run)[0](ask(0))).text == "fine"


async def test_every_attempt_is_a_request(run: RunDirectory) -> None:
    limits = JudgeLimits(requests_per_minute=3)
    with ScriptedJudgeServer(Reply("busy", status=503), Reply("busy", status=503), Reply("fine")) as server:
        judge, actor = client(server.base, limits, run)
        # Every look at the clock takes a tenth of a second, so the minute does not pass, however long they take.
        looks = itertools.count()
        actor.limiter._clock = lambda: 0.1 * next(looks)
        assert (await judge(ask(0))).requests == 3
        # A fourth within the minute is not sent.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(judge(ask(1)), timeout=0.5)
        assert len(server.requests) == 3


UNPRICED = {"model": "openai/gpt-4o-mini", "prices": {}}
"""Known to LiteLLM only: 0.15 and 0.60 dollars per million tokens."""


async def test_a_model_that_only_litellm_has_a_price_of_stays_within_its_budget(run: RunDirectory) -> None:
    # 40 calls of $0.0006 each, and at most $0.0007: a cent's worth of them at a time, all at once.
    with ScriptedJudgeServer(Reply("fine", input_tokens=100, output_tokens=1000, delay=0.01)) as server:
        judge, actor = client(server.base, JudgeLimits(dollars=0.01), run, **UNPRICED)
        answers = await asyncio.gather(*(judge(ask(number)) for number in range(40)), return_exceptions=True)
        paid = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert all(isinstance(answer, BudgetSpent) for answer in answers if isinstance(answer, BaseException))
        billed = len(server.requests) * (100 * 0.15 + 1000 * 0.60) / 1e6
    assert 0.009 < billed <= 0.01
    assert sum(answer.dollars for answer in paid) == pytest.approx(billed)
    assert actor.limiter.spent == pytest.approx(billed)


@pytest.mark.parametrize("prices", [{}, {"another": PRICE}])
async def test_a_budget_without_any_known_price_is_refused(run: RunDirectory, prices: dict[str, Price]) -> None:
    with ScriptedJudgeServer() as server:
        judge, _ = client(server.base, JudgeLimits(dollars=1.0), run, prices=prices)
        with pytest.raises(ValueError, match="the price of openai/scripted is unknown; set it"):
            await judge.check()
    assert server.requests == []


ABSURD = [
    {},
    {"prompt_tokens": -100, "completion_tokens": -10, "total_tokens": -110},
    {"prompt_tokens": 100, "completion_tokens": -10, "total_tokens": 90},
    {"prompt_tokens": -100, "completion_tokens": 10, "total_tokens": -90},
    {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    {"prompt_tokens": 100, "completion_tokens": 0, "total_tokens": 100},
    {"prompt_tokens": 100, "completion_tokens": 10**9, "total_tokens": 10**9},
    {"prompt_tokens": 10**9, "completion_tokens": 10, "total_tokens": 10**9},
    {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": -5}},
]


@pytest.mark.parametrize("usage", ABSURD)
async def test_a_reply_without_a_usage_that_can_be_true_is_booked_at_the_most_it_may_cost(
    run: RunDirectory, usage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedJudgeServer(Reply("fine", usage=usage)) as server:
        judge, actor = client(server.base, JudgeLimits(dollars=2.5), run)
        first = await judge(ask(0))
        assert (first.text, first.dollars, first.estimated_dollars, first.usage_known) == ("fine", 1.0, 1.0, False)
        await judge(ask(1))
        with pytest.raises(BudgetSpent, match=r"\$2\.0000"):
            await judge(ask(2))
    assert actor.limiter.spent == 2.0
    # Said once.
    assert caplog.text.count("no plausible usage") == 1


async def test_a_judge_that_does_not_say_its_usage_is_found_out_before_a_budget_depends_on_it(
    run: RunDirectory,
) -> None:
    with ScriptedJudgeServer(Reply("OK", usage={})) as server:
        judge, _ = client(server.base, JudgeLimits(dollars=10.0), run)
        with pytest.raises(
            JudgeUnavailable, match=r"do not report usage .*judge\.limits\.dollars=10 cannot be enforced"
        ):
            await judge.check()
        unlimited, _ = client(server.base, None, run)
        await unlimited.check()


async def test_chinese_does_not_overrun_what_a_lease_holds(run: RunDirectory) -> None:
    # Two tokens a character, as some tokenizers make of rare ones.
    text = "评分" * 2000
    price = {"scripted": Price(input=100.0, output=0.0)}
    with ScriptedJudgeServer(Reply("fine", input_tokens=2 * len(text))) as server:
        judge, actor = client(server.base, JudgeLimits(dollars=1.2), run, prices=price)
        with pytest.raises(BudgetSpent):
            await judge(ask(0, text))
        judge, actor = client(server.base, JudgeLimits(dollars=2.0), run, prices=price)
        results = await asyncio.gather(*(judge(ask(number, text)) for number in range(5)), return_exceptions=True)
    assert sum(isinstance(result, BudgetSpent) for result in results) == 4
    assert actor.limiter.spent == pytest.approx(0.8, rel=0.01)


async def test_requests_that_timed_out_may_be_billed_and_are_booked(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, clock = Reply("late", delay=600.0), AheadClock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
    with ScriptedJudgeServer(late, late, Reply("fine", output_tokens=100)) as server:
        judge, actor = client(server.base, JudgeLimits(dollars=10.0), run, max_outage_seconds=0)
        call = asyncio.create_task(judge(ask(0)))
        await clock.jump(600.0, when=lambda: len(server.requests) == 1)
        await clock.jump(600.0, when=lambda: len(server.requests) == 2)
        completion = await call
    assert completion.requests == 3
    assert completion.dollars == pytest.approx(2.1)
    assert completion.estimated_dollars == pytest.approx(2.0)
    assert actor.limiter.spent == pytest.approx(2.1)


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
async def test_requests_that_the_endpoint_answered_with_an_error_cost_nothing(run: RunDirectory, status: int) -> None:
    with ScriptedJudgeServer(Reply("fine", output_tokens=100), Reply("no", status), Reply("fine")) as server:
        judge, actor = client(server.base, JudgeLimits(dollars=10.0), run)
        await judge(ask(0))
        await judge(ask(1))
    assert actor.limiter.spent == pytest.approx(0.1 if status < 429 else 0.11)


async def test_a_call_that_is_cancelled_under_way_is_booked(run: RunDirectory) -> None:
    with ScriptedJudgeServer(Reply("fine", delay=600.0)) as server:
        judge, actor = client(server.base, JudgeLimits(dollars=10.0), run)
        call = asyncio.create_task(judge(ask(0)))
        await asyncio.to_thread(server.asked.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)
    assert actor.limiter.spent == 1.0


def outage(*during: Reply, before: int = 0, times: int = 1) -> list[Reply]:
    return [Reply("fine")] * before + list(during) * times + [Reply("fine")]


@pytest.mark.parametrize(
    "trouble",
    [
        Reply("overloaded", 503),
        Reply("boom", 500),
        Reply("slow down", 429),
        Reply("overloaded", 529),
        Reply(raw="<html>bad gateway</html>", status=502),
    ],
)
async def test_an_outage_pauses_everybody_and_drops_nothing(
    run: RunDirectory, trouble: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    # The first eight are answered together and ask for a pause: all eight are in flight when the outage begins and
    # have failed before one is sent again. A call that fails alone twice is its own failure.
    during = [replace(trouble, headers={"retry-after": "5"})] * 8 + [trouble] * 26
    with ScriptedJudgeServer(*outage(*during, before=5)) as server:
        # The whole outage counts as one failure of a call.
        judge, _ = client(server.base, None, run, max_attempts=2)
        await asyncio.gather(*(judge(ask(number)) for number in range(5)))
        server.held.set()
        calls = asyncio.gather(*(judge(ask(number)) for number in range(100, 108)))
        await server.answer_together(8)
        answers = await calls
        assert [answer.error for answer in answers] == [None] * 8
    assert len(server.requests) <= 5 + 35 + 8
    lines = [record.getMessage() for record in caplog.records]
    *paused, ended = [line for line in lines if " answer" in line and "judging" in line]
    assert paused
    assert all("does not answer" in line for line in paused)
    assert "answers again" in ended


async def test_an_outage_beyond_the_limit_stops_the_run_resumable(run: RunDirectory) -> None:
    with ScriptedJudgeServer(Reply("overloaded", 503)) as server:
        judge, _ = client(server.base, None, run, max_outage_seconds=0.5)
        results = await asyncio.gather(*(judge(ask(number)) for number in range(10)), return_exceptions=True)
    assert all(isinstance(result, JudgeUnavailable) for result in results)
    assert "judge.max_outage_seconds=0.5" in str(results[0])
    assert "overloaded" in str(results[0])
    assert "\n" not in str(results[0])


async def test_a_prompt_that_breaks_the_judge_fails_its_call_and_no_other(run: RunDirectory) -> None:
    """No other call fails: it is not the judge."""
    with ScriptedJudgeServer(Reply("fine")) as server:
        server.fails_on = "poison"
        judge, _ = client(server.base, None, run)
        poisoned = await judge(ask(0, "poison"))
        assert poisoned.error is not None
        assert poisoned.requests == 4
        assert (await judge(ask(1))).error is None


FLAGGED = Reply("Your chosen model requires moderation and your input was flagged for violence", 403)


@pytest.mark.parametrize(
    ("trouble", "says"),
    [(FLAGGED, "flagged"), (Reply("who are you?", 401), "who"), (Reply("no such model", 404), "no")],
)
async def test_a_single_refusal_amid_successes_fails_its_call_only(
    run: RunDirectory, trouble: Reply, says: str
) -> None:
    script = ([Reply("fine")] * 4 + [trouble]) * 4 + [Reply("fine")]
    with ScriptedJudgeServer(*script) as server:
        judge, _ = client(server.base, None, run)
        answers = [await judge(ask(number)) for number in range(21)]
    failed = [answer for answer in answers if answer.error is not None]
    assert len(failed) == 4
    assert all(says in (answer.error or "") for answer in failed)


async def test_flagged_prompts_one_after_the_other_stop_nothing(run: RunDirectory) -> None:
    with ScriptedJudgeServer(*[FLAGGED] * 10, Reply("fine")) as server:
        judge, _ = client(server.base, None, run)
        assert [(await judge(ask(number))).error is None for number in range(11)] == [False] * 10 + [True]


@pytest.mark.parametrize("status", [401, 402, 403, 404])
async def test_a_refusal_that_repeats_stops_the_run(run: RunDirectory, status: int) -> None:
    with ScriptedJudgeServer(*[Reply("fine")] * 50, Reply("no longer", status)) as server:
        judge, _ = client(server.base, None, run)
        for number in range(50):
            await judge(ask(number))
        assert (await judge(ask(50))).error is not None
        assert (await judge(ask(51))).error is not None
        with pytest.raises(JudgeUnavailable, match="refused"):
            await judge(ask(52))
    assert len(server.requests) == 53


KILLED = """
import asyncio, sys
from pathlib import Path
from draco_ray.runs.directory import RunDirectory
from tests.integration.test_judge_limits import ask, client
from draco_ray.config.schema import JudgeLimits

async def main(base, run):
    judge, _ = client(base, JudgeLimits(dollars=10.0), RunDirectory(Path(run)))
    for number in range(3):
        await judge(ask(number))
        print(number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def archived(run: RunDirectory) -> list[tuple[float, int]]:
    """Dollars and requests of every call in the archive."""
    table = run.table("judge_calls", columns=["dollars", "requests"])
    return sorted((row["dollars"], row["requests"]) for row in table.to_pylist())


async def phase_of(completion: Completion) -> Judged[tuple[ScoredCriterion, ...]]:
    """What `Judge` makes of a reply."""

    class Answered:
        async def __call__(self, request: Request) -> Completion:
            return completion

        async def forget(self, request: Request) -> None:
            return None

        async def check(self) -> None:
            return None

    judge = Judge(Answered(), load_prompts(Path("prompts/judge")), JudgeConfig(reasks=0))
    where = CallContext(group=f"step1/{TASKS[0]}", task_id=TASKS[0], rollout=0)
    return await judge.ask(Score(a_trajectory(1, TASKS[0], 0), rubric(TASKS[0])), where)


async def test_a_kill_between_a_reply_and_the_archive_loses_no_dollar(run: RunDirectory) -> None:
    paid, late = Reply("fine", output_tokens=400), Reply("late", delay=600.0)
    with ScriptedJudgeServer(paid, paid, late, paid) as server:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, server.base, str(run.path), env=environment, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert [await process.stdout.readline() for _ in range(2)] == [b"0\n", b"1\n"]
        while len(server.requests) < 3:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        assert archived(run) == []

        # Two replies were paid for; the third request was under way and may be billed.
        book = read_cost_ledger(run.judge_cache)
        assert sorted(book.settled.values()) == pytest.approx([0.4, 0.4])
        assert list(book.under_way.values()) == [1.0]
        judge, actor = client(server.base, JudgeLimits(dollars=2.9), run)
        assert actor.limiter.spent == pytest.approx(0.8)
        assert actor.limiter.reserved == pytest.approx(1.0)
        completions = [await judge(ask(number)) for number in range(3)]
        assert [completion.requests for completion in completions] == [0, 0, 1]
        # 1.2 are spent and 1.0 may be: a fourth, which may cost 1.0, has to wait for what it is.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(judge(ask(3)), 0.5)

        # The archive books each once, and what is replayed again costs nothing.
        store = RunStoreActor(run.path)
        for rollout, completion in enumerate(completions):
            store.judged(1, TASKS[0], rollout, Score.name, await phase_of(completion))
        assert archived(run) == [(0.4, 1)] * 3
        again = RunStoreActor(run.path)
        for rollout in range(3):
            again.judged(2, TASKS[0], rollout, Score.name, await phase_of(await judge(ask(rollout))))
        assert archived(run) == [(0.0, 0)] * 3 + [(0.4, 1)] * 3
        # Done again, a step keeps its records.
        for rollout in range(3):
            again.judged(1, TASKS[0], rollout, Score.name, await phase_of(await judge(ask(rollout))))
        assert archived(run) == [(0.0, 0)] * 3 + [(0.4, 1)] * 3
    _, resumed = client(server.base, JudgeLimits(dollars=3.0), run)
    assert resumed.limiter.spent == pytest.approx(1.2)


async def test_forgotten_and_failed_replies_stay_on_the_books(run: RunDirectory) -> None:
    with ScriptedJudgeServer(Reply("unusable", output_tokens=400), Reply("again", output_tokens=300)) as server:
        judge, _ = client(server.base, JudgeLimits(dollars=10.0), run)
        await judge(ask(0))
        await judge.forget(ask(0))
        assert (await judge(ask(0))).text == "again"
        _, resumed = client(server.base, JudgeLimits(dollars=10.0), run)
    assert resumed.limiter.spent == pytest.approx(0.7)


async def test_runs_that_share_a_folder_of_replies_have_books_of_their_own(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory.create(tmp_path / "other", "setting: draco\n")
    shared = tmp_path / "shared"
    with ScriptedJudgeServer(Reply("fine", output_tokens=400)) as server:
        config = settings(server.base, JudgeLimits(dollars=10.0), cache=shared)

        def of(directory: RunDirectory) -> tuple[LiteLLMClient, JudgeLimiterActor]:
            actor = JudgeLimiterActor(config, directory.path)
            return LiteLLMClient(config, ReplyCache(shared), leases=DirectLeases(actor)), actor

        await of(run)[0](ask(0))
        judge, actor = of(other)
        assert actor.limiter.spent == 0.0
        replayed = await judge(ask(0))
        assert replayed.requests == 0
        # Paid for by the first run: not on the second one's bill.
        store = RunStoreActor(other.path, request_number_prefix(config, other.path))
        store.judged(1, TASKS[0], 0, Score.name, await phase_of(replayed))
        assert archived(other) == [(0.0, 0)]
        assert of(run)[1].limiter.spent == pytest.approx(0.4)


async def test_a_limiter_that_is_restarted_knows_what_is_under_way(run: RunDirectory) -> None:
    with ScriptedJudgeServer(Reply("fine", output_tokens=400)) as server:
        server.held.set()
        judge, _ = client(server.base, JudgeLimits(dollars=10.0), run)
        leases = judge._leases
        assert isinstance(leases, DirectLeases)
        call = asyncio.create_task(judge(ask(0)))
        await asyncio.to_thread(server.asked.wait)
        # Ray starts the actor anew, under the same name.
        leases.actor = JudgeLimiterActor(judge._config, run.path)
        assert (leases.actor.limiter.spent, leases.actor.limiter.reserved) == (0.0, 1.0)
        server.held.clear()
        await call
        assert (leases.actor.limiter.spent, leases.actor.limiter.reserved) == (pytest.approx(0.4), 0.0)

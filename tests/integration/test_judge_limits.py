"""The judge client under the pool's limits, against a real HTTP server; the limiter's actor without Ray around it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price
from draco_ray.errors import BudgetSpent
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.complete import Request
from draco_ray.judging.limiter_actor import JudgeLimiterActor
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.records import Message, Phase
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.small_run import TASKS, a_call

pytestmark = pytest.mark.slow

PRICE = Price(input=0.0, output=1000.0)
"""A dollar per thousand tokens of reply."""


class DirectLeases:
    """What `LimiterClient` is in a run, for a limiter in this process."""

    def __init__(self, limiter: JudgeLimiterActor) -> None:
        self._limiter = limiter
        self.tasks: list[asyncio.Task[None]] = []

    async def lease(self, tokens: float, dollars: float) -> int:
        return await self._limiter.lease(tokens, dollars)

    def settle(self, number: int, tokens: float, dollars: float) -> None:
        self.tasks.append(asyncio.create_task(self._limiter.settle(number, tokens, dollars)))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "setting: draco\n")


def ask(number: int) -> Request:
    return Request(messages=(Message(role="user", content=f"question {number}"),))


def client(base: str, limits: JudgeLimits, run: RunDirectory) -> LiteLLMClient:
    config = JudgeConfig(
        model="openai/scripted",
        api_base=base,
        api_key_env="DRACO_TEST_KEY",
        max_tokens=1000,
        max_attempts=4,
        limits=limits,
        prices={"scripted": PRICE},
    )

    async def no_sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    leases = DirectLeases(JudgeLimiterActor(limits, run.path, 600.0))
    return LiteLLMClient(config, ReplyCache(run.judge_cache), no_sleep, leases)


async def test_the_budget_ends_the_calls_before_it_is_exceeded_and_counts_on_after_a_restart(run: RunDirectory) -> None:
    # A call may cost a dollar and costs 40 cents.
    with ScriptedJudgeServer(Reply("fine", output_tokens=400)) as server:
        judge = client(server.base, JudgeLimits(dollars=2.0), run)
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
    calls = [a_call(Phase.SCORE, 1, TASKS[0], rollout) for rollout in (0, 1)]
    RunStore(run).write("judge_calls", 1, "calls", rows.call_rows(1, calls))
    with ScriptedJudgeServer(Reply("fine", output_tokens=1)) as server:
        with pytest.raises(BudgetSpent, match=r"\$0\.0400 of"):
            await client(server.base, JudgeLimits(dollars=1.03), run)(ask(0))
        assert server.requests == []
        assert (await client(server.base, JudgeLimits(dollars=1.04), run)(ask(0))).text == "fine"


async def test_every_attempt_is_a_request(run: RunDirectory) -> None:
    limits = JudgeLimits(requests_per_minute=3)
    with ScriptedJudgeServer(Reply("busy", status=503), Reply("busy", status=503), Reply("fine")) as server:
        judge = client(server.base, limits, run)
        assert (await judge(ask(0))).requests == 3
        # A fourth within the minute is not sent.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(judge(ask(1)), timeout=0.5)
        assert len(server.requests) == 3

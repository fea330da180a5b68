"""The limiter's actor in a real Ray: callers of several processes, one that gives up, and a process that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from draco_ray.config.schema import JudgeConfig, JudgeLimits
from draco_ray.errors import BudgetSpent, JudgeUnavailable
from draco_ray.judging.actors import LimiterClient, start_judge_limiter
from draco_ray.judging.limiter import LOST, UNSENT, LeaseRequest, RequestResult
from draco_ray.judging.outage import FailureKind, NextAction
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.cluster import start_ray

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    start_ray(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


def asked(dollars: float) -> LeaseRequest:
    return LeaseRequest(input_tokens=10, output_tokens=10, dollars=dollars)


async def test_leases_are_given_waited_for_given_up_and_refused(own_ray: None, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "limits", "setting: draco\n")
    config = JudgeConfig(limits=JudgeLimits(dollars=1.0))
    started = start_judge_limiter(config, run.path, "limits")
    assert started is not None
    handle, client = started
    first = await client.lease(asked(0.6))
    giving_up = asyncio.create_task(client.lease(asked(0.6)))
    waiting = asyncio.create_task(LimiterClient("JudgeLimiter@limits").lease(asked(0.5)))
    # The one who gives up stands before the other; the actor has both once it answers.
    await asyncio.sleep(0)
    assert await handle.pause.remote() is None
    giving_up.cancel()
    assert await client.settle(first, RequestResult(tokens=20, dollars=0.3)) is NextAction.AGAIN
    await client.settle(await waiting, UNSENT)
    await client.settle(await client.lease(asked(0.7)), LOST)
    with pytest.raises(BudgetSpent, match=r"\$1\.0000 of judge\.limits\.dollars=1"):
        await client.lease(asked(0.1))


async def test_a_limiter_that_was_killed_goes_on_with_the_book(own_ray: None, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "killed", "setting: draco\n")
    config = JudgeConfig(limits=JudgeLimits(dollars=1.0), max_outage_seconds=0.2, max_backoff_seconds=0.01)
    started = start_judge_limiter(config, run.path, "killed")
    assert started is not None
    handle, client = started
    book = ReplyCache(run.judge_cache)
    done, under_way = await client.lease(asked(0.5)), await client.lease(asked(0.4))
    for number, most in ((done, 0.5), (under_way, 0.4)):
        await book.begin(number, most)
    await book.settle(done, 0.45, ("key", {"text": "paid for"}))
    # What the limiter had to know of it is lost with its process.
    pid = await handle.__ray_call__.remote(lambda self: os.getpid())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BudgetSpent, match=r"\$0\.4500"):
        await client.lease(asked(0.6))
    assert await client.settle(under_way, RequestResult(dollars=0.05)) is NextAction.AGAIN
    number = await client.lease(asked(0.5))

    # An outage reaches every caller as one line.
    verdict = await client.settle(number, RequestResult(trouble=FailureKind.UNAVAILABLE, reason="503"))
    assert verdict is NextAction.AGAIN
    await asyncio.sleep(0.3)
    with pytest.raises(JudgeUnavailable, match=r"judge\.max_outage_seconds=0\.2"):
        await client.lease(asked(0.1))

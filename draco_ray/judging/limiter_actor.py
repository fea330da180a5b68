"""The Ray shell of `draco_ray.judging.limiter`: one actor that all judge workers ask before they send."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.limiter import Asked, Ended, Grant, Limiter, WaitingLine
from draco_ray.judging.outage import Next, Outage
from draco_ray.judging.reply_cache import read_book
from draco_ray.observability.logs import start_run_log
from draco_ray.placement import beside_the_driver
from draco_ray.runs.directory import RunDirectory

LEASE_GRACE_SECONDS = 60.0


class LimiterActor(WaitingLine):
    """A `WaitingLine` for callers in other processes."""

    def __init__(
        self, config: JudgeConfig, spent: float, under_way: Mapping[str, float] | None = None, name: str = ""
    ) -> None:
        start_run_log()
        outage = Outage(
            max_seconds=config.max_outage_seconds,
            max_backoff_seconds=config.max_backoff_seconds,
            who=f"judge {config.model} at {config.api_base or 'its provider'}",
        )
        lease_seconds = config.request_timeout_seconds + LEASE_GRACE_SECONDS
        super().__init__(
            Limiter(
                config.limits, spent=spent, under_way=under_way, lease_seconds=lease_seconds, outage=outage, name=name
            )
        )


class JudgeLimiterActor(LimiterActor):
    """The limiter of a run.

    It starts from what the run has paid for, which is in the book of its requests, so that neither a resumed run nor a
    new process starts from zero. Archived calls that are not in the book were booked under another ``judge.cache``.
    """

    def __init__(self, config: JudgeConfig, run: Path) -> None:
        directory = RunDirectory(run)
        name = requests_name(config, run)
        book = read_book(config.cache or directory.judge_cache, name)
        archive = directory.table("judge_calls", columns=["call_id", "dollars"]).to_pylist()
        booked = book.settled.keys() | book.under_way.keys()
        earlier = math.fsum(call["dollars"] for call in archive if call["call_id"] not in booked)
        spent = earlier + math.fsum(book.settled.values())
        super().__init__(config, spent, book.under_way, name)


def requests_name(config: JudgeConfig, run: Path) -> str:
    """What the numbers of a run's requests begin with in the book; nothing where the book is the run's own."""
    own = config.cache is None or config.cache.resolve().is_relative_to(run.resolve())
    return "" if own else f"{run.name}/"


class LimiterClient:
    """A `draco_ray.judging.limiter.Leases` that reaches the actor by its name, so that its holder can be restarted."""

    def __init__(self, run_name: str) -> None:
        self._actor_name = _actor_name(run_name)
        self._returning: set[asyncio.Task[None]] = set()

    @cached_property
    def _handle(self) -> Any:
        return ray.get_actor(self._actor_name)

    async def lease(self, asked: Asked) -> Grant:
        """See `draco_ray.judging.limiter.Leases.lease`."""
        granted = self._handle.lease.remote(asked)
        try:
            grant: Grant = await granted
        except RayTaskError as error:
            if isinstance(error.cause, JudgeUnavailable):
                raise error.cause from None
            raise
        except asyncio.CancelledError:
            task = asyncio.get_running_loop().create_task(self._return(granted))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            raise
        return grant

    async def settle(self, number: str, ended: Ended) -> Next:
        """See `draco_ray.judging.limiter.Leases.settle`."""
        verdict: Next = await self._handle.settle.remote(number, ended)
        return verdict

    async def give_back(self, number: str) -> None:
        """See `draco_ray.judging.limiter.Leases.give_back`."""
        await self._handle.give_back.remote(number)

    def abandon(self, number: str) -> None:
        """See `draco_ray.judging.limiter.Leases.abandon`."""
        self._handle.abandon.remote(number)

    async def _return(self, granted: ray.ObjectRef[Grant]) -> None:
        """Give a lease back that nobody waits for any longer."""
        try:
            grant = await granted
        except ray.exceptions.RayError:
            return
        await self.give_back(grant.number)


def start_judge_limiter(config: JudgeConfig, run: Path, run_name: str) -> tuple[Any, LimiterClient] | None:
    """The limiter of a run and what its workers reach it by; None where the policy is its own judge.

    Returns: the handle, to be kept for as long as the actor is to live, and the client.
    """
    return None if config.self_judge.enabled else start_limiter(JudgeLimiterActor, config, run, run_name)


def start_limiter(
    actor: type[LimiterActor], config: JudgeConfig, book: Path, run_name: str
) -> tuple[Any, LimiterClient]:
    """An ``actor`` of this kind, which finds in ``book`` what has been spent; returns as `start_judge_limiter`."""
    options = {
        "name": _actor_name(run_name),
        "num_cpus": 0,
        "scheduling_strategy": beside_the_driver(),
        # Each call that waits for a lease occupies one of these.
        "max_concurrency": 10_000,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    handle = ray.remote(actor).options(**options).remote(config, book)
    return handle, LimiterClient(run_name)


def _actor_name(run_name: str) -> str:
    return f"JudgeLimiter@{run_name}"

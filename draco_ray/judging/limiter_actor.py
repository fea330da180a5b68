"""The Ray shell of `draco_ray.judging.limiter.Limiter`: one actor that all judge workers ask before they send."""

from __future__ import annotations

import asyncio
import contextlib
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from draco_ray.config.schema import JudgeConfig, JudgeLimits
from draco_ray.errors import BudgetSpent
from draco_ray.judging.limiter import Limiter
from draco_ray.placement import beside_the_driver
from draco_ray.runs.directory import RunDirectory

LOOK_AGAIN_SECONDS = 5.0
LEASE_GRACE_SECONDS = 60.0


class LimiterActor:
    """Serves those who wait in the order of their asking, so that large requests are not overtaken for ever."""

    def __init__(self, limits: JudgeLimits, spent: float, lease_seconds: float) -> None:
        self._limiter = Limiter(limits, spent=spent, lease_seconds=lease_seconds)
        self._turn = asyncio.Lock()
        self._settled = asyncio.Event()

    async def lease(self, tokens: float, dollars: float) -> int:
        """See `draco_ray.judging.limiter.Leases.lease`."""
        async with self._turn:
            while True:
                number, wait = self._limiter.lease(tokens, dollars)
                if number:
                    return number
                self._settled.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait, LOOK_AGAIN_SECONDS)):
                        await self._settled.wait()

    async def settle(self, number: int, tokens: float, dollars: float) -> None:
        """See `draco_ray.judging.limiter.Leases.settle`."""
        self._limiter.settle(number, tokens, dollars)
        self._settled.set()


class JudgeLimiterActor(LimiterActor):
    """A run's. What it has paid for is in its archive: neither a resumed run nor a new process starts from nothing."""

    def __init__(self, limits: JudgeLimits, run: Path, lease_seconds: float) -> None:
        dollars = RunDirectory(run).table("judge_calls", columns=["dollars"]).column("dollars").to_pylist()
        super().__init__(limits, float(sum(dollars)), lease_seconds)


class LimiterClient:
    """A `draco_ray.judging.limiter.Leases` that reaches the actor by its name, so that its holder can be restarted."""

    def __init__(self, run_name: str) -> None:
        self._actor_name = _actor_name(run_name)

    @cached_property
    def _handle(self) -> Any:
        return ray.get_actor(self._actor_name)

    async def lease(self, tokens: float, dollars: float) -> int:
        """See `draco_ray.judging.limiter.Leases.lease`."""
        try:
            number: int = await self._handle.lease.remote(tokens, dollars)
        except RayTaskError as error:
            if isinstance(error.cause, BudgetSpent):
                raise error.cause from None
            raise
        return number

    def settle(self, number: int, tokens: float, dollars: float) -> None:
        """See `draco_ray.judging.limiter.Leases.settle`."""
        self._handle.settle.remote(number, tokens, dollars)


def start_judge_limiter(config: JudgeConfig, run: Path, run_name: str) -> tuple[Any, LimiterClient] | None:
    """The limiter of a run and what its workers reach it by; None where nothing is limited.

    Returns: the handle, to be kept for as long as the actor is to live, and the client.
    """
    if config.self_judge.enabled or config.limits == JudgeLimits():
        return None
    return start_limiter(JudgeLimiterActor, config, run, run_name)


def start_limiter(
    actor: type[LimiterActor], config: JudgeConfig, book: Path, run_name: str
) -> tuple[Any, LimiterClient]:
    """An ``actor`` of this kind, which finds in ``book`` what has been spent; returns as `start_judge_limiter`."""
    options = {
        "name": _actor_name(run_name),
        "num_cpus": 0,
        "scheduling_strategy": beside_the_driver(),
        # Everybody who waits holds a place.
        "max_concurrency": 10_000,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    lease_seconds = config.request_timeout_seconds + LEASE_GRACE_SECONDS
    handle = ray.remote(actor).options(**options).remote(config.limits, book, lease_seconds)
    return handle, LimiterClient(run_name)


def _actor_name(run_name: str) -> str:
    return f"JudgeLimiter@{run_name}"

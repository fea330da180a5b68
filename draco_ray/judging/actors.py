"""The limiter and the reply store of a run, as Ray actors beside the driver that all judge workers share.

Judge workers may run on hosts that share no folder with the driver, and SQLite does not work on network file systems.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import DracoError
from draco_ray.judging.limiter import UNSENT, LeaseRequest, Limiter, LimiterQueue, RequestResult
from draco_ray.judging.outage import JudgeHealth, NextAction
from draco_ray.judging.reply_cache import ReplyCache, read_cost_ledger
from draco_ray.observability.logs import start_run_log
from draco_ray.placement import driver_node_affinity
from draco_ray.runs.directory import RunDirectory

ValueT = TypeVar("ValueT")

LEASE_GRACE_SECONDS = 60.0
OPTIONS = {
    "num_cpus": 0,
    # Each call that waits for a lease occupies one of these slots.
    "max_concurrency": 10_000,
    "max_restarts": -1,
    "max_task_retries": -1,
}


class NamedActor:
    """Calls the methods of an actor that is found by its name: unlike a handle, a name survives restarts.

    Every public attribute is a method of the actor, as a coroutine function. Raises: the actor's own errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._returning: set[asyncio.Task[None]] = set()

    @cached_property
    def _handle(self) -> Any:
        return ray.get_actor(self._name)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*given: Any) -> Any:
            try:
                return await getattr(self._handle, method).remote(*given)
            except RayTaskError as error:
                if isinstance(error.cause, DracoError):
                    raise error.cause from None
                raise

        return call

    async def borrowed(self, waiting: Awaitable[ValueT], give_back: Callable[[ValueT], Awaitable[object]]) -> ValueT:
        """Await ``waiting``; if the caller is cancelled meanwhile, give the result back."""
        task = asyncio.ensure_future(waiting)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            returning = asyncio.create_task(_give_back(task, give_back))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)
            raise


async def _give_back(waiting: Awaitable[ValueT], give_back: Callable[[ValueT], Awaitable[object]]) -> None:
    with contextlib.suppress(DracoError, RayError):
        await give_back(await waiting)


class LimiterActor(LimiterQueue):
    """A `LimiterQueue` for callers in other processes."""

    def __init__(
        self, config: JudgeConfig, spent: float, under_way: Mapping[str, float] | None = None, name: str = ""
    ) -> None:
        start_run_log()
        outage = JudgeHealth(
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

    It starts with the dollars that the run has already spent, because the run may have been resumed, or this actor
    restarted. These are the dollars in the cost ledger, and those of archived calls that the ledger does not contain
    because they were made with another ``judge.cache``.
    """

    def __init__(self, config: JudgeConfig, run: Path) -> None:
        directory = RunDirectory(run)
        name = request_number_prefix(config, run)
        book = read_cost_ledger(config.cache or directory.judge_cache, name)
        archive = directory.table("judge_calls", columns=["call_id", "dollars"]).to_pylist()
        booked = book.settled.keys() | book.under_way.keys()
        earlier = math.fsum(call["dollars"] for call in archive if call["call_id"] not in booked)
        spent = earlier + math.fsum(book.settled.values())
        super().__init__(config, spent, book.under_way, name)


def request_number_prefix(config: JudgeConfig, run: Path) -> str:
    """Prefix of a run's request numbers in the cost ledger; empty if the ledger belongs to this run alone."""
    own = config.cache is None or config.cache.resolve().is_relative_to(run.resolve())
    return "" if own else f"{run.name}/"


class LimiterClient(NamedActor):
    """A `draco_ray.judging.limiter.Leases` that calls the actor."""

    # A method of the actor, provided by `__getattr__`.
    settle: Callable[[str, RequestResult], Coroutine[Any, Any, NextAction]]

    async def lease(self, asked: LeaseRequest) -> str:
        """See `draco_ray.judging.limiter.Leases.lease`."""
        return await self.borrowed(self.__getattr__("lease")(asked), lambda number: self.settle(number, UNSENT))


class RepliesActor(ReplyCache):
    """A `ReplyCache` for callers in other processes. Every call is safe to repeat."""

    def __init__(self, folder: Path) -> None:
        start_run_log()
        super().__init__(folder)


def is_self_judge_only(config: JudgeConfig) -> bool:
    """Whether the policy is its own judge and no other model is asked."""
    return config.self_judge.enabled and not (config.held_out and config.held_out.model)


def start_judge_limiter(config: JudgeConfig, run: Path, run_name: str) -> tuple[Any, LimiterClient] | None:
    """Start the limiter of a run; None if the policy is its own judge and no other model is asked.

    Returns: the handle, which keeps the actor alive, and the client for judge workers.
    """
    return None if is_self_judge_only(config) else start_limiter(JudgeLimiterActor, config, run, run_name)


def start_limiter(
    actor: type[LimiterActor], config: JudgeConfig, book: Path, run_name: str
) -> tuple[Any, LimiterClient]:
    """Start an actor of class ``actor``, to which ``book`` is passed: the path from which it reads the dollars spent.

    Returns: as `start_judge_limiter`.
    """
    name = f"JudgeLimiter@{run_name}"
    handle = ray.remote(actor).options(name=name, scheduling_strategy=driver_node_affinity(), **OPTIONS)
    return handle.remote(config, book), LimiterClient(name)


def start_replies(config: JudgeConfig, run_name: str) -> tuple[Any, Any] | None:
    """Start the reply store in ``judge.cache``; None if replies are not stored.

    Returns: the handle, which keeps the actor alive, and the client for judge workers, which has the methods of
        `ReplyCache`.
    Raises: StoreError: the store cannot be opened.
    """
    if config.cache is None or is_self_judge_only(config):
        return None
    # Open it here first: an error in an actor's constructor would look like the loss of the actor.
    ReplyCache(config.cache)
    name = f"JudgeReplies@{run_name}"
    handle: Any = ray.remote(RepliesActor).options(name=name, scheduling_strategy=driver_node_affinity(), **OPTIONS)
    return handle.remote(config.cache), NamedActor(name)

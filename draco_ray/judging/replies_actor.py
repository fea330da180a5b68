"""The Ray shell of `draco_ray.judging.reply_cache`: one actor beside the driver keeps the replies of all judge workers.

So judge workers may run on hosts that share no folder with the driver, and SQLite never works on a network's file
system.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import StoreError
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.observability.logs import start_run_log
from draco_ray.placement import beside_the_driver

ResultT = TypeVar("ResultT")


class RepliesActor:
    """A `ReplyCache` for callers in other processes. Every call may be repeated: none adds to what is there."""

    def __init__(self, folder: Path) -> None:
        start_run_log()
        self._folder = folder

    @cached_property
    def _cache(self) -> ReplyCache:
        # With the first call, whose caller is then told that it cannot be opened.
        return ReplyCache(self._folder)

    async def get(self, key: str) -> dict[str, object] | None:
        """See `ReplyCache.get`."""
        return await self._cache.get(key)

    async def put(self, key: str, answer: dict[str, object]) -> None:
        """See `ReplyCache.put`."""
        await self._cache.put(key, answer)

    async def begin(self, number: str, most: float) -> None:
        """See `ReplyCache.begin`."""
        await self._cache.begin(number, most)

    async def settle(self, number: str, dollars: float, reply: tuple[str, dict[str, object]] | None) -> None:
        """See `ReplyCache.settle`."""
        await self._cache.settle(number, dollars, reply)

    async def forget(self, key: str) -> None:
        """See `ReplyCache.forget`."""
        await self._cache.forget(key)

    async def claim(self, key: str, by: str) -> None:
        """See `ReplyCache.claim`."""
        await self._cache.claim(key, by)

    async def release(self, key: str, by: str) -> None:
        """See `ReplyCache.release`."""
        await self._cache.release(key, by)


class RepliesClient:
    """A `draco_ray.judging.reply_cache.Replies` that reaches the actor by its name, which outlives its process."""

    def __init__(self, run_name: str) -> None:
        self._actor_name = _actor_name(run_name)

    @cached_property
    def _handle(self) -> Any:
        return ray.get_actor(self._actor_name)

    async def get(self, key: str) -> dict[str, object] | None:
        """See `ReplyCache.get`."""
        found: dict[str, object] | None = await _plain(self._handle.get.remote(key))
        return found

    async def put(self, key: str, answer: dict[str, object]) -> None:
        """See `ReplyCache.put`."""
        await _plain(self._handle.put.remote(key, answer))

    async def begin(self, number: str, most: float) -> None:
        """See `ReplyCache.begin`."""
        await _plain(self._handle.begin.remote(number, most))

    async def settle(self, number: str, dollars: float, reply: tuple[str, dict[str, object]] | None = None) -> None:
        """See `ReplyCache.settle`."""
        await _plain(self._handle.settle.remote(number, dollars, reply))

    async def forget(self, key: str) -> None:
        """See `ReplyCache.forget`."""
        await _plain(self._handle.forget.remote(key))

    async def claim(self, key: str, by: str) -> None:
        """See `ReplyCache.claim`."""
        await _plain(self._handle.claim.remote(key, by))

    async def release(self, key: str, by: str) -> None:
        """See `ReplyCache.release`."""
        await _plain(self._handle.release.remote(key, by))


def start_replies(config: JudgeConfig, run_name: str) -> tuple[Any, RepliesClient] | None:
    """The replies of a run in ``judge.cache``; None where none are kept.

    Returns: the handle, to be kept for as long as the actor is to live, and what judge workers reach it by.
    """
    if config.cache is None or config.self_judge.enabled:
        return None
    handle: Any = (
        ray.remote(RepliesActor)
        .options(
            name=_actor_name(run_name),
            num_cpus=0,
            scheduling_strategy=beside_the_driver(),
            max_concurrency=10_000,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(config.cache)
    )
    return handle, RepliesClient(run_name)


async def _plain(answer: Awaitable[ResultT]) -> ResultT:
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, StoreError):
            raise error.cause from None
        raise


def _actor_name(run_name: str) -> str:
    return f"JudgeReplies@{run_name}"

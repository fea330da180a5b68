"""Actors in this process: a reference is then the value itself or a future."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from draco_ray.errors import StoreError

Reference = Any
"""A value, or something to await for it, such as a Ray object reference."""


async def resolve(reference: Reference) -> Any:
    """The value of a reference; a plain value is returned as it is."""
    return await reference if isinstance(reference, Awaitable) else reference


class LocalActor:
    """Runs an actor's class in this process: ``remote`` accepts futures as arguments and returns futures."""

    def __init__(self, target: Any, results: Mapping[str, int] | None = None) -> None:
        """``results``: method name -> number of results, for methods that return several."""
        self._target, self._results = target, results or {}
        self._calls: list[asyncio.Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._remote, getattr(self._target, name), self._results.get(name, 1)))

    async def done(self) -> None:
        """Wait for all calls. Raises: StoreError: a write failed; other errors are raised where results are awaited."""
        for each in await asyncio.gather(*self._calls, return_exceptions=True):
            if isinstance(each, StoreError):
                raise each

    def _remote(self, method: Any, results: int, *given: Any) -> Any:
        call = asyncio.ensure_future(_called(method, given))
        self._calls.append(call)
        if results == 1:
            return call
        found = [asyncio.ensure_future(_nth(call, index)) for index in range(results)]
        for each in found:
            # If the call fails, every result holds its error. Retrieve the error here; otherwise asyncio logs it for
            # results that nobody awaits.
            each.add_done_callback(lambda done: done.cancelled() or done.exception())
        return found


async def _called(method: Any, given: Sequence[Any]) -> Any:
    return await resolve(method(*[await resolve(each) for each in given]))


async def _nth(call: Awaitable[Sequence[Any]], index: int) -> Any:
    return (await call)[index]

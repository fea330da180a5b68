"""Waiting by turns of the event loop, for events that need no time: a test fails at once if one does not happen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

AnswerT = TypeVar("AnswerT")

TURNS = 2000


async def yield_turns(number: int) -> None:
    """Yield to other tasks for this number of turns."""
    for _ in range(number):
        await asyncio.sleep(0)


async def yield_until(true: Callable[..., object]) -> None:
    """Yield to other tasks until a condition holds."""
    for _ in range(TURNS):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"still not so after {TURNS} turns of the event loop")


async def outcome(call: Awaitable[AnswerT]) -> AnswerT:
    """The result or exception of a call that needs at most `TURNS`."""
    task = asyncio.ensure_future(call)
    try:
        await yield_until(task.done)
        return task.result()
    finally:
        task.cancel()


class AheadClock:
    """Real time, which the test sets forward: what comes before a time limit may take as long as the machine needs."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    async def jump(self, seconds: float, when: Callable[[], object]) -> None:
        """Set it forward once a condition holds."""
        while not when():  # noqa: ASYNC110 (what other threads and processes do)
            await asyncio.sleep(0.01)
        self._ahead += seconds


class LoopClock:
    """A clock for the running event loop, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    async def pass_(self, seconds: float) -> None:
        """Advance the clock by this many seconds, and run what follows."""
        self.now += seconds
        await yield_turns(50)

"""Waiting by turns of the event loop: a test of what needs no time fails at once where it does not come about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

AnswerT = TypeVar("AnswerT")

TURNS = 2000


async def turns(number: int) -> None:
    """Let the others run for so many."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(true: Callable[..., object]) -> None:
    """Let the others run until something is so."""
    for _ in range(TURNS):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"still not so after {TURNS} turns of the event loop")


async def outcome(call: Awaitable[AnswerT]) -> AnswerT:
    """What a call returns or raises, which is to need no more than `TURNS`."""
    task = asyncio.ensure_future(call)
    try:
        await until(task.done)
        return task.result()
    finally:
        task.cancel()


class LoopClock:
    """The time of the running event loop, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    async def pass_(self, seconds: float) -> None:
        """So long, and what follows."""
        self.now += seconds
        await turns(50)

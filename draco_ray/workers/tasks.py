"""Concurrent work that succeeds or fails together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Like `asyncio.gather`, but the first error cancels the rest and is raised when they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]

"""An event loop whose clock jumps from one event to the next: asyncio code that waits for hours runs in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from draco_ray.extras import uncollected

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Where the loop would sleep until the next timer, it is that time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            # Nothing but the loop's own events exists, so that nothing could ever wake it.
            raise RuntimeError("everything waits and nothing is to come")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that begins at second 0. It knows timers and no files, sockets or threads."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds that have passed for what runs in it."""
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a clock of its own.

    Raises: RuntimeError: everything waits and nothing is to come.
    """
    loop = VirtualTimeLoop()
    try:
        # What a simulation makes stays until its end: looking for garbage in it takes longer than the rest.
        with uncollected():
            return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()

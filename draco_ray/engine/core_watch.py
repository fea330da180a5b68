"""Noticing that an engine core stands still while something is asked of it: stopped, or hung in a kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager


class CoreWatch:
    """Looks again and again whether calls that are under way come any further.

    Looks are counted and not the time between them, which also passes while this process is stopped itself.
    """

    def __init__(self, stall_seconds: float, look_seconds: float) -> None:
        """
        Args:
            stall_seconds: without progress, after which the core counts as standing still.
            look_seconds: between two looks.
        """
        self._most = math.ceil(stall_seconds / look_seconds)
        self._calls = self._answered = self._still = 0
        self._seen = (0, 0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Something is asked of the core inside the block."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._answered += 1

    def stands_still(self, iterations: int) -> bool:
        """Take a look, and say whether it was one too many with calls under way and nothing new.

        Args:
            iterations: that the core has done so far.
        """
        now = (iterations, self._answered)
        self._still = self._still + 1 if self._calls and now == self._seen else 0
        self._seen = now
        return self._still >= self._most

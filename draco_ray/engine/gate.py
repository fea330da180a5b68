"""Letting requests into an engine, or holding them back while it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestGate:
    """Counts the requests under way; while it is shut, new ones wait in the order they came."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Count a request as under way inside the block; entering waits while the gate is shut."""
        # Whoever was let out may find it shut again.
        while not self._open.is_set():
            await self._open.wait()
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()

    async def shut(self) -> None:
        """Hold new requests, and return once those under way have ended; open again if this is cancelled."""
        self._open.clear()
        try:
            await self._idle.wait()
        except BaseException:
            self._open.set()
            raise

    def open(self) -> None:
        """Let in what waits, and what comes."""
        self._open.set()

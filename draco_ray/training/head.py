"""Noticing that the cluster's head is gone, and waiting for nothing that it took with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import ray

from draco_ray.errors import ClusterError

LOOK_SECONDS = 5.0
GONE_SECONDS = 30.0
"""Half of the minute after which Ray's own processes end, where the head does not come back."""


async def head_failure(address: str | None = None, *, look: float = LOOK_SECONDS, gone: float = GONE_SECONDS) -> None:
    """Wait until the head of the cluster has not answered for long.

    Looks are counted and not the time between them, which also passes while this process is stopped.

    Args:
        address: HOST:PORT of the head; None is that of the cluster that was joined.
        look: seconds between two looks, and for an answer.
        gone: seconds.

    Raises:
        ClusterError: then.
    """
    address = address or head_address()
    missed = 0
    while missed * look < gone:
        await asyncio.sleep(look)
        missed = 0 if await head_answers(address, look) else missed + 1
    raise ClusterError(
        f"the Ray cluster's head at {address} has not answered for {gone:g} s; start a cluster again, or run where one "
        "is, and continue with draco train --resume"
    )


async def unless_gone(stop: Callable[[], Awaitable[object]], look: float = LOOK_SECONDS) -> None:
    """Do ``stop``, which waits for actors of this run; where the head is gone they may never answer."""
    if await head_answers(head_address(), look):
        await stop()


def head_address() -> str:
    """HOST:PORT of the head of the cluster that was joined."""
    return str(ray.get_runtime_context().gcs_address)


async def head_answers(address: str, within: float = LOOK_SECONDS) -> bool:
    """Whether the head takes a connection within so many seconds; what asks it through Ray waits for it instead."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(within):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True

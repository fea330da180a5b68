"""Peak memory of a run: this process and everything below it, and what Ray runs on other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from draco_ray.training.cluster import head_address, head_answers

LOOK_SECONDS = 30.0
"""Between two looks at which nodes there are, and what they have used."""

GROWTH = 1.02
"""Factor of resident memory at which the exact figure is read anew."""
SHARE = 30
"""A run that starts grows at every look, and a reading of it took 3 % of all that short runs did."""
AGAIN_SECONDS = 60.0
"""After which it is read anew at any size: what forked processes share becomes each one's own as they write to it, and
none of them grows by that."""


def tree_memory_bytes(pid: int | None = None) -> int:
    """Proportional set size of a process and its descendants: a page shared by n of them counts once.

    Processes that end while being read count as nothing.
    """
    return _sum(pid, lambda process: process.memory_full_info().pss)


def _sum(pid: int | None, size: Callable[[psutil.Process], int]) -> int:
    total = 0
    root = psutil.Process(pid or os.getpid())
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            total += size(process)
    return total


class PeakMemory:
    """Samples `tree_memory_bytes` in a thread while a ``with`` block runs.

    The kernel walks every page for that, a second of CPU for a run's processes; so it is read only where the sum of
    resident memory, which counts shared pages often but costs nothing, is larger than at the last reading, and once
    a minute; and for no more than one part in `SHARE` of the time.
    """

    def __init__(self, every_seconds: float = 5.0, pid: int | None = None) -> None:
        """``pid``: of the topmost process; None is this one."""
        self._every, self._pid = every_seconds, pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        highest, read, took = 0.0, time.monotonic(), 0.0
        while not self._done.is_set():
            resident, since = _sum(self._pid, lambda process: process.memory_info().rss), time.monotonic() - read
            if (resident > GROWTH * highest and since >= SHARE * took) or since > AGAIN_SECONDS:
                highest, read = max(highest, resident), time.monotonic()
                self.peak_bytes = max(self.peak_bytes, tree_memory_bytes(self._pid))
                took = time.monotonic() - read
            self._done.wait(self._every)


class NodeMemoryActor:
    """Samples what Ray runs on its node: the process that starts the node's workers, and all below it."""

    def __init__(self) -> None:
        self._memory = PeakMemory(pid=os.getppid()).__enter__()

    def peak(self) -> int:
        """Bytes."""
        return self._memory.peak_bytes


class NodeMemory:
    """The peak of every node of a cluster that was joined; of one that has left, what was last heard."""

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        self._look = look_seconds
        self._actors: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._peaks: dict[str, int] = {}

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._look)

    async def look(self) -> None:
        """Ask every node that is there, also those that have come since the last look."""
        if not await head_answers(head_address()):
            # Ray would wait for it, until it ended this process.
            return
        for node in await asyncio.to_thread(ray.nodes):
            number = node["NodeID"]
            if not node["Alive"] or number in self._actors:
                continue
            self._addresses[number] = node["NodeManagerAddress"]
            there = NodeAffinitySchedulingStrategy(number, soft=False)
            self._actors[number] = ray.remote(NodeMemoryActor).options(num_cpus=0, scheduling_strategy=there).remote()
        await asyncio.gather(*(self._ask(number) for number in self._actors))

    async def _ask(self, number: str) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(self._look):
                self._peaks[number] = await self._actors[number].peak.remote()

    def __str__(self) -> str:
        """Each node with its peak, e.g. ``10.0.0.1 12.3 GiB, 10.0.0.2 70.1 GiB``; empty where nothing was heard."""
        return described(self._addresses, self._peaks)


@contextlib.asynccontextmanager
async def node_memory(nodes: NodeMemory, *, joined: bool) -> AsyncIterator[None]:
    """Watch the nodes of a cluster while the block runs; of a Ray that this process started itself there is nothing to
    ask, since all of it is below this process.
    """
    if not joined:
        yield
        return
    watching = asyncio.create_task(nodes.watch())
    try:
        yield
        await nodes.look()
    finally:
        watching.cancel()


def described(addresses: Mapping[str, str], peaks: Mapping[str, int]) -> str:
    """Nodes that have an address and a peak, the largest first."""
    largest = sorted(peaks, key=lambda number: -peaks[number])
    return ", ".join(f"{addresses[number]} {peaks[number] / 2**30:.1f} GiB" for number in largest)

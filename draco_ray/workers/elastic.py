"""A pool of workers that scales with the number of waiting calls. Independent of Ray."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

WorkerT = TypeVar("WorkerT")
MAX_GROUPS = 10_000
"""Maximum number of groups whose last worker is remembered; the least recently used are forgotten."""
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 30.0, 600.0
"""Pause of a worker after a failed call, and its maximum: the pause doubles with each failure in a row."""


class PooledWorker(Generic[WorkerT]):
    """One worker of the pool, from the moment it is requested."""

    def __init__(self, worker: WorkerT, number: int, now: float) -> None:
        self.worker = worker
        self.number = number
        """Index in order of request; never reused."""
        self.up = False
        """Whether the worker answers; False while it waits for a node or restarts."""
        self.calls = 0
        """Number of unanswered calls."""
        self.idle_since = now
        self.abandoned = asyncio.Event()
        """Set when this worker stops answering while another one answers; its calls are retried there."""
        self.failures = 0
        """Number of failed calls in a row."""
        self.backoff_until = -float("inf")


class ElasticWorkers(Generic[WorkerT]):
    """A pool with a minimum and a maximum number of workers; a call gets a slot of one that is up, or waits.

    The oldest ``min_workers`` workers share the calls evenly. A younger one gets a call only while all older ones are
    full, so the youngest become idle first. A call that names a group prefers the worker that had the group's last
    call: its prefix cache holds the prefix of the group's prompts.
    """

    def __init__(
        self,
        start: Callable[[int], WorkerT],
        *,
        slots: int,
        min_workers: int,
        max_workers: int,
        idle_seconds: float,
        max_calls: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the pool. The first call of `adjust` requests the first workers.

        Args:
            start: function that requests a worker; its argument is the worker's number in the order of requests.
            slots: maximum number of concurrent calls of one worker.
            min_workers: minimum number of workers.
            max_workers: maximum number of workers; ``min_workers``, if that is larger.
            idle_seconds: time without calls after which an unneeded worker is removed.
            max_calls: maximum number of concurrent calls of all workers together; None: the slots are the only limit.
            clock: returns monotonic time in seconds; replaced by tests.
        """
        self._start = start
        self._slots = slots
        self._min_workers = min_workers
        self._max_workers = max(min_workers, max_workers)
        self._idle_seconds = idle_seconds
        self._max_calls = max_calls
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, str, asyncio.Future[PooledWorker[WorkerT]]]] = []
        self._last: OrderedDict[str, PooledWorker[WorkerT]] = OrderedDict()
        """Group -> the worker that had its last call."""
        self._arrivals = itertools.count()
        self._full_use_at = -float("inf")
        """Last time at which every worker was needed."""
        self._grow_after = -float("inf")
        self._unresponsive: set[PooledWorker[WorkerT]] = set()
        self.pooled: list[PooledWorker[WorkerT]] = []
        """All workers, the oldest first."""

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return sum(not future.done() for *_, future in self._waiting)

    @property
    def in_flight(self) -> int:
        """Number of calls that hold a slot."""
        return sum(pooled.calls for pooled in self.pooled)

    @property
    def up(self) -> int:
        """Number of workers that answer."""
        return sum(pooled.up for pooled in self.pooled)

    @property
    def wanted(self) -> int:
        """Number of workers needed for all calls, in flight and waiting, within the bounds."""
        needed = -(-(self.in_flight + self.waiting) // self._slots)
        return min(max(needed, self._min_workers), self._max_workers)

    def adjust(self) -> tuple[list[PooledWorker[WorkerT]], list[PooledWorker[WorkerT]]]:
        """Request missing workers, and remove workers that have been idle for ``idle_seconds``.

        Returns: the new workers, and the removed ones, which the caller ends.
        """
        now = self._clock()
        wanted = self.wanted
        if wanted >= len(self.pooled):
            self._full_use_at = now
        missing = wanted - len(self.pooled) if now >= self._grow_after else 0
        come = [self._ask() for _ in range(missing)]
        # Workers that are not up are removed first, then the youngest.
        unneeded = sorted(self.pooled, key=lambda pooled: (pooled.up, -pooled.number))
        gone = [
            pooled
            for pooled in unneeded[: max(0, len(self.pooled) - wanted)]
            if not pooled.calls and now - max(pooled.idle_since, self._full_use_at) >= self._idle_seconds
        ]
        for pooled in gone:
            self.pooled.remove(pooled)
            self._unresponsive.discard(pooled)
        # Workers whose backoff has ended can take waiting calls.
        self._serve()
        return come, gone

    async def acquire(self, rank: int = 0, group: str = "") -> PooledWorker[WorkerT]:
        """Take a slot of a worker that is up; wait for one, lowest rank first, then in order of arrival.

        Raises: the error given to `mark_lost` or `fail_waiting`.
        """
        future: asyncio.Future[PooledWorker[WorkerT]] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), group, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                # The slot was assigned just before the wait was cancelled: release it.
                self.release(future.result())
            raise

    def acquire_nowait(self) -> PooledWorker[WorkerT]:
        """Take a slot without waiting: of a worker that is up if possible, else of the one with the fewest calls."""
        pooled = self._free("") or min(self.pooled, key=lambda pooled: (pooled.calls, pooled.number))
        return self._given(pooled, "")

    def release(self, pooled: PooledWorker[WorkerT]) -> None:
        """Release a slot."""
        pooled.calls -= 1
        if not pooled.calls:
            pooled.idle_since = self._clock()
        self._serve()

    def mark_up(self, pooled: PooledWorker[WorkerT]) -> None:
        """Mark a worker as answering: it gets calls from now on."""
        if not pooled.up:
            pooled.up, pooled.abandoned = True, asyncio.Event()
            pooled.idle_since = self._clock()
        self._unresponsive.discard(pooled)
        self._abandon_unresponsive()
        self._serve()

    def mark_down(self, pooled: PooledWorker[WorkerT]) -> None:
        """Mark a worker as not answering: it gets no new calls, and its calls are retried at workers that are up."""
        pooled.up = False
        self._unresponsive.add(pooled)
        self._abandon_unresponsive()

    def record(self, pooled: PooledWorker[WorkerT], *, ok: bool) -> None:
        """Record whether a worker succeeded at a call. After a failure it backs off while other workers are available.

        A worker that fails at everything is free sooner than the others: without a backoff it would get every waiting
        call.
        """
        pooled.failures = 0 if ok else pooled.failures + 1
        backoff = 0.0 if ok else min(BACKOFF_SECONDS * 2.0 ** (pooled.failures - 1), MAX_BACKOFF_SECONDS)
        pooled.backoff_until = self._clock() + backoff

    def mark_lost(self, pooled: PooledWorker[WorkerT], error: BaseException) -> None:
        """Remove a worker that is lost for good. If it was the last one, waiting calls raise ``error``."""
        pooled.up = False
        self._unresponsive.discard(pooled)
        if pooled in self.pooled:
            self.pooled.remove(pooled)
        # A new worker would probably be lost in the same way: do not request one at once.
        self._grow_after = self._clock() + self._idle_seconds
        if not self.pooled:
            self.fail_waiting(error)

    def fail_waiting(self, error: BaseException) -> None:
        """Raise ``error`` in every waiting call."""
        while self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_exception(error)

    def _ask(self) -> PooledWorker[WorkerT]:
        number = next(self._numbers)
        pooled = PooledWorker(self._start(number), number, self._clock())
        self.pooled.append(pooled)
        return pooled

    def _given(self, pooled: PooledWorker[WorkerT], group: str) -> PooledWorker[WorkerT]:
        pooled.calls += 1
        if group:
            self._last[group] = pooled
            self._last.move_to_end(group)
            if len(self._last) > MAX_GROUPS:
                self._last.popitem(last=False)
        return pooled

    def _free(self, group: str) -> PooledWorker[WorkerT] | None:
        if self._max_calls is not None and self.in_flight >= self._max_calls:
            return None
        now = self._clock()
        none_fit = all(pooled.backoff_until > now for pooled in self.pooled if pooled.up)

        def has_room(pooled: PooledWorker[WorkerT]) -> bool:
            return pooled.up and pooled.calls < self._slots and (none_fit or pooled.backoff_until <= now)

        last = self._last.get(group)
        if last is not None and last in self.pooled and has_room(last):
            return last
        ranked = [
            (max(0, age - self._min_workers + 1), pooled.calls, age)
            for age, pooled in enumerate(self.pooled)
            if has_room(pooled)
        ]
        return self.pooled[min(ranked)[-1]] if ranked else None

    def _serve(self) -> None:
        while self._waiting and (pooled := self._free(self._waiting[0][2])) is not None:
            _, _, group, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(self._given(pooled, group))

    def _abandon_unresponsive(self) -> None:
        if self.up:
            for pooled in self._unresponsive:
                pooled.abandoned.set()


def fixed_workers(workers: int, slots: int) -> ElasticWorkers[int]:
    """A pool of constant size whose workers are always up; each worker is its number."""
    pool: ElasticWorkers[int] = ElasticWorkers(
        lambda number: number, slots=slots, min_workers=workers, max_workers=workers, idle_seconds=0.0
    )
    for pooled in pool.adjust()[0]:
        pool.mark_up(pooled)
    return pool

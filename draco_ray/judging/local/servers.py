"""The pool of judge servers: scaling, routing of calls, and lost servers. Independent of Ray.

A call goes to the server that had its group's last call while that has a free slot. A server that stops answering gets
no calls until it answers again; `draco_ray.judging.client` retries its calls elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draco_ray.config.schema import LocalJudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.endpoint import Server
from draco_ray.judging.local.server import ServerStatus
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker

log = logging.getLogger(__name__)

ADJUST_SECONDS = 1.0
"""Interval of scaling, and of health checks of a loading server."""
LOOK_SECONDS = 5.0
"""Interval of health checks of a serving server."""
SILENT_SECONDS = 20.0
"""Timeout of a health check, in addition to `LocalJudgeConfig.stall_seconds`."""
WAITS_FOR_A_NODE = "waits for a node with enough resources"


class Replica(Protocol):
    """A process that runs a `draco_ray.judging.local.server.VllmJudgeServer`."""

    async def look(self) -> ServerStatus:
        """See `VllmJudgeServer.look`; raises an error if the server is lost."""
        ...

    def end(self) -> None:
        """End the server, without waiting."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The server of a call."""

    number: int
    server: Server


class JudgeServers:
    """An autoscaled pool of servers."""

    def __init__(
        self,
        start: Callable[[int], Replica],
        config: LocalJudgeConfig,
        *,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the pool; nothing is started before `open`.

        Args:
            start: requests the server with that number and returns at once.
            config: bounds and timeouts.
            lease_seconds: time after which a lease expires, because its caller has died.
            clock: monotonic time in seconds; replaced by tests.
        """
        self._config, self._clock, self._lease_seconds = config, clock, lease_seconds
        self._workers: ElasticWorkers[Replica] = ElasticWorkers(
            start,
            slots=config.calls_per_replica,
            min_workers=config.replicas,
            max_workers=config.max_replicas,
            idle_seconds=config.idle_seconds,
            clock=clock,
        )
        self._servers: dict[PooledWorker[Replica], Server] = {}
        self._doing: dict[PooledWorker[Replica], tuple[str, float]] = {}
        self._leases: dict[int, tuple[PooledWorker[Replica], float]] = {}
        self._numbers = itertools.count()
        self._watching: dict[PooledWorker[Replica], asyncio.Task[None]] = {}
        self._none_since = clock()
        self._adjusting: asyncio.Task[None] | None = None

    @property
    def up(self) -> int:
        """Number of servers that answer."""
        return self._workers.up

    @property
    def numbers(self) -> list[int]:
        """Numbers of all servers, the oldest first."""
        return [place.number for place in self._workers.pooled]

    def pending(self) -> list[str]:
        """A line for each server that does not answer yet."""
        now = self._clock()
        return [
            f"judge server {place.number} {doing} (for {now - since:.0f} s)"
            for place, (doing, since) in self._doing.items()
            if not place.up
        ]

    def open(self) -> None:
        """Request the minimum number of servers, once; needs a running event loop, and returns at once."""
        if self._adjusting is not None:
            return
        self._none_since = self._clock()
        self.adjust()
        self._adjusting = asyncio.create_task(self._keep_adjusting())

    def close(self) -> None:
        """End all servers, without waiting."""
        for task in (*self._watching.values(), *filter(None, [self._adjusting])):
            task.cancel()
        for place in self._workers.pooled:
            place.worker.end()

    async def acquire(self, group: str = "", rank: int = 0) -> Lease:
        """Wait for a server with a free slot, the lowest rank first; the first call opens the pool.

        Raises:
            JudgeUnavailable: no server comes up.
        """
        self.open()
        place = await self._workers.acquire(rank, group)
        number = next(self._numbers)
        self._leases[number] = (place, self._clock() + self._lease_seconds)
        return Lease(number=number, server=self._servers[place])

    def release(self, number: int, lost: bool = False) -> None:
        """End a lease; ``lost``: its server could not be reached, so it gets no further calls for now."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        place, _ = lease
        if lost and place.up:
            self._workers.mark_down(place)
            self._doing[place] = ("could not be reached for a call", self._clock())
        self._workers.release(place)

    def adjust(self) -> None:
        """Scale the pool, and end expired leases."""
        now = self._clock()
        for number in [number for number, (_, until) in self._leases.items() if until < now]:
            self.release(number)
        come, gone = self._workers.adjust()
        for place in come:
            self._doing[place] = (WAITS_FOR_A_NODE, now)
            self._watching[place] = asyncio.create_task(self._watch(place))
        for place in gone:
            self._forget(place)
            place.worker.end()
        if come or gone:
            log.info("judge servers: %d of %d are up", self.up, len(self._workers.pooled))
        if self.up:
            self._none_since = now
        elif now - self._none_since >= self._config.start_timeout_seconds:
            pending = "; ".join(self.pending()) or "no server could be started"
            seconds = self._config.start_timeout_seconds
            self._workers.fail_waiting(
                JudgeUnavailable(
                    f"no judge server is up after judge.local.start_timeout_seconds={seconds:g}: {pending}; check the "
                    "cluster's resources with `ray status`"
                )
            )

    async def _keep_adjusting(self) -> None:
        while True:
            await asyncio.sleep(ADJUST_SECONDS)
            try:
                self.adjust()
            except Exception:
                # The servers that are up keep serving.
                log.exception("the number of judge servers could not be adjusted")

    def _forget(self, place: PooledWorker[Replica]) -> None:
        self._servers.pop(place, None)
        del self._doing[place]
        if (task := self._watching.pop(place)) is not asyncio.current_task():
            task.cancel()

    async def _watch(self, place: PooledWorker[Replica]) -> None:
        while True:
            looking = asyncio.ensure_future(place.worker.look())
            try:
                seconds = None if place not in self._servers else self._config.stall_seconds + SILENT_SECONDS
                done, _ = await asyncio.wait({looking}, timeout=seconds)
                if not done:
                    self._down(place, "does not answer")
                look = await looking
            except asyncio.CancelledError:
                looking.cancel()
                raise
            except Exception as error:
                reason = " ".join(str(error).split())[:500]
                log.warning("judge server %d is lost: %s", place.number, reason)
                place.worker.end()
                told = error if isinstance(error, JudgeUnavailable) else JudgeUnavailable(f"judge server: {reason}")
                self._forget(place)
                self._workers.mark_lost(place, told)
                return
            if look.server is None:
                self._down(place, look.doing)
            else:
                self._servers[place] = look.server
                self._doing[place] = (look.doing, self._clock())
                self._workers.mark_up(place)
            await asyncio.sleep(ADJUST_SECONDS if look.server is None else LOOK_SECONDS)

    def _down(self, place: PooledWorker[Replica], doing: str) -> None:
        before, since = self._doing[place]
        self._doing[place] = (doing, since if before == doing else self._clock())
        if place.up:
            log.warning("judge server %d: %s", place.number, doing)
        self._workers.mark_down(place)

"""The pool of judge servers: scaling, routing of calls, and lost servers.

A call goes to the server that had its group's last call if that has a free slot. A server that stops answering gets
no calls until it answers again; `draco_ray.judging.client` retries its calls elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from draco_ray.config.schema import LocalJudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.endpoint import Borrowed, Server
from draco_ray.workers import monitor
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MonitoredWorkers, WorkerLost, WorkerUnavailable

STOP_SECONDS = 30.0
SILENT_SECONDS = 20.0
"""Timeout of a health check, in addition to `LocalJudgeConfig.stall_seconds`."""


@dataclass(slots=True, eq=False)
class ServerReplica:
    """An actor with a `draco_ray.judging.local.server.VllmJudgeServer`, and what is known of it."""

    handle: Any
    since: float
    """Time at which the state in ``doing`` began."""
    doing: str = "waits for a node with enough resources"
    """State of the server, shown in messages while it does not answer."""
    server: Server | None = None
    """Last known address of the server; None until it has answered."""


class JudgeServers(MonitoredWorkers[ServerReplica]):
    """An autoscaled pool of servers."""

    def __init__(
        self,
        start: Callable[[int], Any],
        config: LocalJudgeConfig,
        *,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the pool; nothing is started before `open`.

        Args:
            start: requests the actor of the server with that number from Ray and returns its handle at once.
            config: bounds and timeouts.
            lease_seconds: time after which a lease expires, because its caller has died.
            clock: monotonic time in seconds; replaced by tests.
        """
        self._config, self._clock, self._lease_seconds = config, clock, lease_seconds
        workers: ElasticWorkers[ServerReplica] = ElasticWorkers(
            lambda number: ServerReplica(start(number), clock()),
            slots=config.calls_per_replica,
            min_workers=config.replicas,
            max_workers=config.max_replicas,
            idle_seconds=config.idle_seconds,
            clock=clock,
        )
        super().__init__(
            workers,
            up=self._look,
            end=self._end_server,
            restart=lambda place: monitor.restart(place.handle),
            timeout_seconds=config.stall_seconds + SILENT_SECONDS,
            kind="judge server",
        )
        self._ending: list[Any] = []
        self._leases: dict[int, tuple[PooledWorker[ServerReplica], float]] = {}
        self._numbers = itertools.count()
        self._none_since = clock()

    def pending(self) -> list[str]:
        """A line for each server that does not answer yet."""
        now = self._clock()
        return [
            f"judge server {each.number} {each.worker.doing} (for {now - each.worker.since:.0f} s)"
            for each in self.workers.pooled
            if not each.up
        ]

    def open(self) -> None:
        """Request the minimum number of servers, once; needs a running event loop, and returns at once."""
        if self._adjusting is None:
            self._none_since = self._clock()
            super().open()

    def close(self) -> None:
        """End all servers, without waiting."""
        super().close()
        for pooled in self.workers.pooled:
            self._end_server(pooled.worker)

    async def acquire(self, group: str = "", rank: int = 0) -> Borrowed:
        """Wait for a server with a free slot, the lowest rank first; the first call opens the pool.

        Raises:
            JudgeUnavailable: no server comes up.
        """
        self.open()
        pooled = await self.workers.acquire(rank, group)
        assert pooled.worker.server is not None
        number = next(self._numbers)
        self._leases[number] = (pooled, self._clock() + self._lease_seconds)
        return Borrowed(pooled.worker.server, number)

    def release(self, number: int, lost: bool = False) -> None:
        """End a lease; ``lost``: its server could not be reached, so it gets no further calls for now."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        pooled, _ = lease
        if lost and pooled.up:
            self.workers.mark_down(pooled)
        self.workers.release(pooled)

    def adjust(self) -> None:
        """Scale the pool, and end expired leases."""
        now = self._clock()
        for number in [number for number, (_, until) in self._leases.items() if until < now]:
            self.release(number)
        super().adjust()
        if self.workers.up:
            self._none_since = now
        elif now - self._none_since >= self._config.start_timeout_seconds:
            pending = "; ".join(self.pending()) or "no server could be started"
            seconds = self._config.start_timeout_seconds
            self.workers.fail_waiting(
                JudgeUnavailable(
                    f"no judge server is up after judge.local.start_timeout_seconds={seconds:g}: {pending}; check the "
                    "cluster's resources with `ray status`"
                )
            )

    async def stop(self) -> None:
        """End all servers, and return when they have ended."""
        self.close()
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(asyncio.gather(*self._ending, return_exceptions=True), STOP_SECONDS)

    def _end_server(self, place: ServerReplica) -> None:
        # End the server first, then the actor.
        self._ending.append(place.handle.end.remote())
        # No retries: Ray would report a failed retry, since the actor is gone.
        place.handle.__ray_terminate__.options(max_task_retries=0).remote()

    async def _look(self, place: ServerReplica) -> None:
        """The health check (`MonitoredWorkers`)."""
        try:
            found: Server | str = await place.handle.look.remote()
        except Exception as error:
            self._end_server(place)
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, JudgeUnavailable):
                cause = JudgeUnavailable(f"judge server: {' '.join(str(error).split())[:500]}")
            raise WorkerLost from cause
        if isinstance(found, str):
            if place.doing != found:
                place.doing, place.since = found, self._clock()
            raise WorkerUnavailable(found)
        place.server, place.doing, place.since = found, "does not answer", self._clock()

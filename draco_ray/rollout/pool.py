"""Playing rollouts: who waits for a slot, from which policy they sample, and what is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.records import EpisodeEnd, Usage
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.summaries import RolloutSummary
from draco_ray.workers import monitor
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MonitoredWorkers, PendingCall

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800.0
"""After which a rollout worker that does not answer is taken for stopped: environments and agents of other authors may
keep its event loop for as long as they compute."""

STOP_SECONDS = 15.0
"""In which a worker ends its worlds. One that is stopped itself never would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A finished rollout of a group: references to what is large, the summary itself."""

    rollout: int
    trajectory: ray.ObjectRef[Any]
    evaluation: ray.ObjectRef[Any]
    summary: RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What came of a rollout, all its attempts together."""

    member: FinishedRollout | None
    """None when every attempt was lost."""
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    """Of the attempts that were lost, too, as far as they could tell."""
    error: str | None = None
    """Why the last attempt was lost, if it was."""


class RolloutWorkers:
    """Rollout workers that come and go with the rollouts that wait; which of them takes one is in `MonitoredWorkers`.

    A worker that is out of reach gets no rollout until it answers, and its rollouts are retried elsewhere. One that
    loses its worlds backs off while others do not (`draco_ray.workers.elastic.ElasticWorkers.record`).
    """

    def __init__(self, start: Callable[[int], Any], config: EnvironmentConfig) -> None:
        """Prepare them; nothing is started yet.

        Args:
            start: asks Ray for the worker of that number and returns its handle at once.
            config: bounds and times.
        """
        self.elastic: ElasticWorkers[Any] = ElasticWorkers(
            start,
            slots=config.slots_of_worker,
            min_workers=config.min_workers,
            max_workers=config.workers,
            idle_seconds=config.idle_seconds,
            max_calls=config.slots,
        )
        self.watched = MonitoredWorkers(
            self.elastic, up=monitor.up, end=self._end, restart=monitor.restart, timeout_seconds=TIMEOUT_SECONDS
        )
        self._ending: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Ask for the fewest workers; needs a running event loop, and returns at once."""
        self.watched.open()

    async def stop(self) -> None:
        """Start and watch no worker any more, and end those there are; their names are free then."""
        self.watched.close()
        for place in self.elastic.pooled:
            if place.up:
                self._end(place.worker)
            else:
                # It begins, and would answer late, or has no place.
                ray.kill(place.worker)
        await asyncio.gather(*self._ending)

    def _end(self, worker: Any) -> None:
        ending = asyncio.create_task(_ended(worker))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _ended(worker: Any) -> None:
    with contextlib.suppress(RayError, TimeoutError):
        await asyncio.wait_for(worker.stop.remote(), STOP_SECONDS)
    # A process that exits by itself would keep its name for as long as anybody has its handle.
    ray.kill(worker)


class RolloutPool:
    """Rollout workers and the policies they sample from: the one path of training, evaluation and authoring.

    A rollout that ends in ``server_error``, or whose worker dies, is tried again in a fresh environment; when its
    retries are spent the group goes on without it.
    """

    def __init__(self, workers: RolloutWorkers, policies: ElasticWorkers[int], retries: int, seed: int) -> None:
        """
        Args:
            workers: opened.
            policies: those that a worker samples from, by their numbers; a rollout gets one that is up, if any is.
            retries: fresh environments that a rollout may use after a server error.
            seed: of the run; every rollout's own is drawn from it.
        """
        self._workers = workers
        self._policies = policies
        self._retries = retries
        self._seed = seed
        self._recorded: dict[tuple[str, int], FinishedRollout] = {}
        self.lost = 0

    def take_over(self, group: str, member: FinishedRollout) -> None:
        """Take a rollout of ``group`` that an earlier process of this run has finished; it is not played again."""
        self._recorded[group, member.rollout] = member

    async def run(self, task_id: str, group: str, rollout: int, *, step: int, priority: int) -> RolloutResult:
        """Play one rollout of ``group``, with the policy of ``step``."""
        if (recorded := self._recorded.pop((group, rollout), None)) is not None:
            return RolloutResult(member=recorded, usage=recorded.summary.usage)
        usage, error = Usage(), ""
        for attempt in range(self._retries + 1):
            # Drawn from the identity of the rollout, not from the order of events: a rerun draws the same.
            entropy = (self._seed, step, rollout, attempt, *task_id.encode())
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
            request = RolloutRequest(task_id=task_id, group=group, rollout=rollout, attempt=attempt, seed=seed)
            member = await self._try(request, priority)
            usage += Usage() if member is None else member.summary.usage
            if member is not None and member.summary.ended is not EpisodeEnd.SERVER_ERROR:
                return RolloutResult(member=member, attempts=attempt + 1, usage=usage)
            error = "its worker died" if member is None else member.summary.error or "the world was lost"
            log.warning("%s rollout %d attempt %d: server_error: %s", task_id, rollout, attempt, error)
        self.lost += 1
        return RolloutResult(member=None, attempts=self._retries + 1, usage=usage, error=error)

    @property
    def waiting(self) -> int:
        """Rollouts that wait for a slot."""
        return self._workers.elastic.waiting

    @property
    def in_flight(self) -> int:
        """Rollouts that hold a slot."""
        return self._workers.elastic.in_flight

    async def _try(self, request: RolloutRequest, priority: int) -> FinishedRollout | None:
        """Play it once, whatever becomes of it; None where its worker was lost."""
        asked: list[ray.ObjectRef[Any]] = []
        given: list[PooledWorker[int]] = []

        def send(worker: Any) -> PendingCall[tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]], RolloutSummary]:
            given.append(policy := self._policies.acquire_nowait())
            # Under no name of its own: see `draco_ray.judging.pool.JudgePool.ask`.
            trajectory, summary, evaluation = worker.rollout.remote(request, policy.worker)
            asked.append(summary)
            return PendingCall((trajectory, evaluation), monitor.answer(summary), partial(ray.cancel, summary))

        try:
            found = await self._workers.watched.call(send, rank=priority, attempts=1, ok=_has_played)
        except asyncio.CancelledError:
            for call in asked:
                ray.cancel(call)
            raise
        finally:
            for policy in given:
                self._policies.release(policy)
        if found is None:
            # Ray has repeated the rollout as often as it may: in seconds where a node is out of reach.
            return None
        (trajectory, evaluation), summary = found
        return FinishedRollout(rollout=request.rollout, trajectory=trajectory, evaluation=evaluation, summary=summary)


def _has_played(summary: RolloutSummary) -> bool:
    return summary.ended is not EpisodeEnd.SERVER_ERROR

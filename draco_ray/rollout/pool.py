"""Plays rollouts: assigns slots and policies, and retries lost rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.records import EpisodeEnd, Usage
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.finished import FinishedRollout, RolloutResult
from draco_ray.summaries import RolloutSummary
from draco_ray.workers import monitor
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MonitoredWorkers, PendingCall

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1800.0
"""Time after which a rollout worker that does not answer counts as stopped. The limit is long, because users'
environments and agents may block the worker's event loop while they compute."""

STOP_SECONDS = 15.0
"""Time limit for a worker to close its worlds, because a suspended process never answers."""


class RolloutWorkers:
    """Rollout workers, whose number grows and shrinks with the number of waiting rollouts.

    `MonitoredWorkers` selects a worker for each rollout. An unreachable worker gets no rollouts until it answers, and
    its rollouts are retried elsewhere. A worker that loses worlds while others do not is paused
    (`draco_ray.workers.elastic.ElasticWorkers.record`).
    """

    def __init__(self, start: Callable[[int], Any], config: EnvironmentConfig) -> None:
        """Create the pool without workers; `open` starts them.

        Args:
            start: requests the worker with a given number from Ray and returns its handle at once.
            config: numbers of slots and time limits.
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
            self.elastic,
            up=monitor.wait_until_up,
            end=self._end,
            restart=monitor.restart,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        self._ending: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Request the minimum number of workers and return at once; needs a running event loop."""
        self.watched.open()

    async def stop(self) -> None:
        """Stop all workers and wait until their names are free."""
        self.watched.close()
        for place in self.elastic.pooled:
            if place.up:
                self._end(place.worker)
            else:
                # The worker is still starting, or no node has room for it.
                ray.kill(place.worker)
        await asyncio.gather(*self._ending)

    def _end(self, worker: Any) -> None:
        ending = asyncio.create_task(_ended(worker))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _ended(worker: Any) -> None:
    with contextlib.suppress(RayError, TimeoutError):
        await asyncio.wait_for(worker.stop.remote(), STOP_SECONDS)
    # An actor that exits by itself keeps its name while a handle exists; a killed one does not.
    ray.kill(worker)


class RolloutPool:
    """Plays rollouts of training, evaluation and rubric authoring on workers and policies.

    A rollout that ends in ``server_error``, or whose worker dies, is retried in a new environment; after the last retry
    the group continues without it.
    """

    def __init__(self, workers: RolloutWorkers, policies: ElasticWorkers[int], retries: int, seed: int) -> None:
        """
        Args:
            workers: already opened.
            policies: indices of the policies; a rollout gets one that answers, if there is any.
            retries: additional attempts after a server error.
            seed: of the run; seeds of rollouts are derived from it.
        """
        self.workers = workers
        self._policies = policies
        self._retries = retries
        self._seed = seed
        self._recorded: dict[tuple[str, int], FinishedRollout] = {}
        self.lost = 0

    def take_over(self, group: str, member: FinishedRollout) -> None:
        """Use this rollout of ``group``, finished by an earlier process of this run, instead of playing it."""
        self._recorded[group, member.rollout] = member

    async def run(self, task_id: str, group: str, rollout: int, *, step: int, priority: int) -> RolloutResult:
        """Play one rollout of ``group`` with the policy of ``step``."""
        if (recorded := self._recorded.pop((group, rollout), None)) is not None:
            return RolloutResult(member=recorded, usage=recorded.summary.usage)
        usage, error = Usage(), ""
        for attempt in range(self._retries + 1):
            # The seed depends on the rollout's identity and not on the order of events, so a rerun gets the same seed.
            entropy = (self._seed, step, rollout, attempt, *task_id.encode())
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
            request = RolloutRequest(task_id=task_id, group=group, rollout=rollout, attempt=attempt, seed=seed)
            member = await self._try(request, priority)
            usage += Usage() if member is None else member.summary.usage
            if member is not None and member.summary.ended is not EpisodeEnd.SERVER_ERROR:
                return RolloutResult(member=member, attempts=attempt + 1, usage=usage)
            error = "the worker died" if member is None else member.summary.error or "the world was lost"
            log.warning("%s rollout %d attempt %d: server_error: %s", task_id, rollout, attempt, error)
        self.lost += 1
        return RolloutResult(member=None, attempts=self._retries + 1, usage=usage, error=error)

    async def _try(self, request: RolloutRequest, priority: int) -> FinishedRollout | None:
        """Play one attempt; None if its worker was lost."""
        asked: list[ray.ObjectRef[Any]] = []
        given: list[PooledWorker[int]] = []

        def send(worker: Any) -> PendingCall[tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]], RolloutSummary]:
            given.append(policy := self._policies.acquire_nowait())
            # The Ray task gets no name; see `draco_ray.judging.pool.JudgePool.ask`.
            trajectory, summary, evaluation = worker.rollout.remote(request, policy.worker)
            asked.append(summary)
            return PendingCall((trajectory, evaluation), monitor.answer(summary), partial(ray.cancel, summary))

        try:
            found = await self.workers.watched.call(send, rank=priority, attempts=1, ok=_has_played)
        except asyncio.CancelledError:
            for call in asked:
                ray.cancel(call)
            raise
        finally:
            for policy in given:
                self._policies.release(policy)
        if found is None:
            # Ray has used up its own retries, which takes seconds if a node is unreachable.
            return None
        (trajectory, evaluation), summary = found
        return FinishedRollout(rollout=request.rollout, trajectory=trajectory, evaluation=evaluation, summary=summary)


def _has_played(summary: RolloutSummary) -> bool:
    return summary.ended is not EpisodeEnd.SERVER_ERROR

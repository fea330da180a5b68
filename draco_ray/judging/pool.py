"""Judge workers that come and go with the calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ClusterError
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import urgency
from draco_ray.judging.phases.base import Phase
from draco_ray.judging.phases.union import Union
from draco_ray.judging.worker import phase_summary
from draco_ray.records import Judged
from draco_ray.summaries import PhaseSummary
from draco_ray.workers import monitor
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MAX_ATTEMPTS, MonitoredWorkers, PendingCall

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A finished judge phase: references to its `Judged`, the summary itself."""

    judged: ray.ObjectRef[Any]
    """Without the calls."""
    archived: ray.ObjectRef[Any]
    """With them: prompts and replies, for the run store."""
    summary: PhaseSummary

    @property
    def ok(self) -> bool:
        """Whether the phase produced a value."""
        return self.summary.error is None


class JudgePool:
    """Judge workers that come and go with the calls, and the union actor; what it decides is in `MonitoredWorkers`.

    A phase that is made elsewhere asks nothing twice: replies that had come are in the durable cache. The union actor's
    calls go to a worker while it is not up.
    """

    def __init__(self, start: Callable[[str], Any], config: JudgeConfig) -> None:
        """Prepare the pool; nothing is started yet.

        Args:
            start: asks Ray for a judge actor of that name and returns its handle at once.
            config: bounds and times.
        """
        self._start = start
        self._config = config
        self._workers: ElasticWorkers[Any] = ElasticWorkers(
            lambda number: start(f"JudgeWorker-{number}"),
            slots=config.concurrency_per_worker,
            min_workers=config.workers,
            max_workers=config.max_workers,
            idle_seconds=config.idle_seconds,
        )
        self._watched = MonitoredWorkers(self._workers, up=monitor.up, end=ray.kill, restart=monitor.restart)
        self._union: PooledWorker[Any] | None = None

    @property
    def in_flight(self) -> int:
        """Phases handed to a judge."""
        return self._workers.in_flight + (self._union.calls if self._union is not None else 0)

    @property
    def waiting(self) -> int:
        """Phases that wait for a worker with room."""
        return self._workers.waiting

    @property
    def up(self) -> int:
        """Judge workers that answer."""
        return self._workers.up

    @property
    def wanted(self) -> int:
        """Judge workers that would hold every phase there is, within the bounds."""
        return self._workers.wanted

    def open(self) -> None:
        """Ask for the fewest workers and the union; needs a running event loop, and returns at once."""
        # Workers before the union: where slots are short, the union's calls can go to a worker, but not the reverse.
        self._watched.open()
        self._union = PooledWorker(self._start("RubricUnion"), -1, 0.0)
        self._watched.monitor(self._union)

    async def ready(self) -> None:
        """Return once a worker is up and the judge answers it.

        Raises:
            JudgeUnavailable: the judge cannot be reached from where the worker runs.
            ClusterError: no worker came up.
        """
        seconds = self._config.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                place = await self._workers.acquire()
        except TimeoutError:
            raise ClusterError(
                f"no judge worker came up within judge.start_timeout_seconds={seconds:g}: each needs one of the custom "
                "resource 'judge', see `ray status` for what the cluster and its autoscaler offer"
            ) from None
        try:
            await place.worker.check.remote()
        finally:
            self._workers.release(place)

    def close(self) -> None:
        """Watch and adjust no longer; the actors end with the run."""
        self._watched.close()

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """Ask a question of ``phase``; see `draco_ray.judging.worker.JudgeWorkerActor.ask`."""
        label = context.task_id if context.rollout is None else f"{context.task_id}/{context.rollout}"
        started = time.time()

        def send(worker: Any) -> PendingCall[tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]], PhaseSummary]:
            # Without the task: each process of Ray's keeps a metric of every name there ever was, and its export grows.
            judged, archived, summary = worker.ask.options(name=phase.name).remote(phase, context, **given)
            return PendingCall((judged, archived), monitor.answer(summary), partial(ray.cancel, summary))

        preferred = self._union if issubclass(phase, Union) else None
        found = await self._watched.call(send, rank=urgency(phase.name), preferred=preferred)
        if found is not None:
            (judged, archived), summary = found
            return Judgement(judged=judged, archived=archived, summary=summary)
        error = f"{phase.name} of {label}: {MAX_ATTEMPTS} judge workers hung or were lost during it, one after another"
        log.error("%s; it has no value", error)
        failed: Judged[Any] = Judged(value=None, error=error)
        nothing = ray.put(failed)
        summary = phase_summary(phase.name, context, failed, started)
        return Judgement(judged=nothing, archived=nothing, summary=summary)

    async def drain(self, seconds: float) -> None:
        """Wait for phases whose caller was cancelled: replies on their way are paid for, and kept if they arrive."""
        await self._watched.drain(seconds)

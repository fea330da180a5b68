"""Judge workers that come and go with the calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ClusterError
from draco_ray.judging.elastic import ElasticWorkers, Place
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import urgency
from draco_ray.judging.phases.base import Phase
from draco_ray.judging.phases.union import Union
from draco_ray.judging.worker import phase_summary
from draco_ray.records import Judged
from draco_ray.summaries import PhaseSummary

log = logging.getLogger(__name__)

ADJUST_SECONDS = 1.0
"""Between two looks at how many judge workers are needed."""
LOOK_SECONDS = 5.0
"""Between a judge worker's answer and the next question whether it is there."""
SILENT_SECONDS = 60.0
"""After which a judge worker that does not answer gets no more calls, and those it has are made elsewhere."""
MOST_SENDS = 4
"""Times a judge's phase is handed to a worker. A phase under which so many workers fall silent is
probably the cause: it fails, instead of silencing the rest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A finished judge phase: a reference to its `Judged`, the summary itself."""

    judged: ray.ObjectRef[Any]
    summary: PhaseSummary

    @property
    def ok(self) -> bool:
        """Whether the phase produced a value."""
        return self.summary.error is None


class JudgePool:
    """Judge workers that come and go with the calls, and the union actor.

    A call goes to a worker that is up: one that waits for a node, or for its restart, gets none, and where it stopped
    answering under calls they are made elsewhere, `MOST_SENDS` times in all (replies that had come are in the durable
    cache). The union actor's calls go to a worker while it is not up.
    """

    def __init__(self, start: Callable[[str], Any], config: JudgeConfig) -> None:
        """Nothing is started yet.

        Args:
            start: asks Ray for a judge actor of that name and returns its handle at once.
            config: bounds and times.
        """
        self._start = start
        self._config = config
        self._workers: ElasticWorkers[Any] = ElasticWorkers(
            lambda number: start(f"JudgeWorker-{number}"),
            slots=config.concurrency_per_worker,
            fewest=config.workers,
            most=config.max_workers,
            idle_seconds=config.idle_seconds,
        )
        self._union: Place[Any] | None = None
        self._first = asyncio.Event()
        self._failure: BaseException | None = None
        self._watching: dict[Place[Any], asyncio.Task[None]] = {}
        self._adjusting: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

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
        self._adjust()
        self._union = Place(self._start("RubricUnion"), -1, 0.0)
        self._watching[self._union] = asyncio.create_task(self._watch(self._union))
        self._adjusting = asyncio.create_task(self._keep_adjusting())

    async def ready(self) -> None:
        """Return once a worker is up and the judge answers it.

        Raises:
            JudgeUnavailable: the judge cannot be reached from where the worker runs.
            ClusterError: no worker came up.
        """
        seconds = self._config.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._first.wait()
        except TimeoutError:
            raise ClusterError(
                f"no judge worker came up within judge.start_timeout_seconds={seconds:g}: each needs one of the custom "
                "resource 'judge', see `ray status` for what the cluster and its autoscaler offer"
            ) from None
        if self._failure is not None:
            raise self._failure
        place = await self._workers.acquire()
        try:
            await place.worker.check.remote()
        finally:
            self._workers.release(place)

    def close(self) -> None:
        """Watch and adjust no longer; the actors end with the run."""
        for task in (*self._watching.values(), *filter(None, [self._adjusting])):
            task.cancel()

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """Ask a question of ``phase``; see `draco_ray.judging.worker.JudgeWorkerActor.ask`."""
        label = context.task_id if context.rollout is None else f"{context.task_id}/{context.rollout}"
        started = time.time()
        for _ in range(MOST_SENDS):
            place = await self._acquire(phase)
            asking = place.worker.ask.options(name=f"{phase.name} {label}")
            judged, summary = asking.remote(phase, context, **given)
            if (finished := await self._finish(place, summary)) is not None:
                return Judgement(judged=judged, summary=finished)
            log.warning("%s %s: its judge worker does not answer; asked of another", phase.name, label)
        error = f"{phase.name} of {label}: {MOST_SENDS} judge workers fell silent under it, one after the other"
        log.error("%s; it has no value", error)
        failed: Judged[Any] = Judged(value=None, error=error)
        return Judgement(judged=ray.put(failed), summary=phase_summary(phase.name, context, failed, started))

    async def drain(self, seconds: float) -> None:
        """Wait for phases whose caller was cancelled: replies on their way are paid for, and kept if they arrive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*self._abandoned, return_exceptions=True)

    async def _acquire(self, phase: Phase) -> Place[Any]:
        if issubclass(phase, Union) and self._union is not None and self._union.up:
            self._union.calls += 1
            return self._union
        return await self._workers.acquire(urgency(phase.name))

    def _release(self, place: Place[Any]) -> None:
        if place is self._union:
            place.calls -= 1
        else:
            self._workers.release(place)

    async def _finish(self, place: Place[Any], summary: ray.ObjectRef[PhaseSummary]) -> PhaseSummary | None:
        """Wait for the phase's summary; None if its worker was given up on."""
        answer = asyncio.ensure_future(_answer(summary))
        given_up = asyncio.ensure_future(place.given_up.wait())
        try:
            await asyncio.wait({answer, given_up}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The actor goes on with the phase, and its slot stays taken until it ends.
            task = asyncio.create_task(self._release_after(place, answer))
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            raise
        finally:
            given_up.cancel()
        self._release(place)
        if answer.done():
            return answer.result()
        answer.cancel()
        ray.cancel(summary)
        return None

    async def _release_after(self, place: Place[Any], answer: asyncio.Future[PhaseSummary]) -> None:
        await asyncio.wait({answer})
        # Read, so that asyncio does not report an error that nobody awaits.
        _ = answer.cancelled() or answer.exception()
        self._release(place)

    async def _keep_adjusting(self) -> None:
        while True:
            await asyncio.sleep(ADJUST_SECONDS)
            try:
                self._adjust()
            except Exception:
                # The workers that are up go on; if Ray itself has failed, their calls raise that.
                log.exception("the number of judge workers could not be adjusted")

    def _adjust(self) -> None:
        come, gone = self._workers.adjust()
        for place in come:
            self._watching[place] = asyncio.create_task(self._watch(place))
        for place in gone:
            self._watching.pop(place).cancel()
            # It holds no call, and its replies are on disk.
            ray.kill(place.worker)
        if come or gone:
            log.info(
                "judge workers: %d up, %d asked for, %d phases in flight, %d waiting",
                *(self.up, len(self._workers.places), self.in_flight, self.waiting),
            )

    async def _watch(self, place: Place[Any]) -> None:
        """Ask a worker again and again whether it is there."""
        while True:
            answer = place.worker.up.remote()
            try:
                try:
                    async with asyncio.timeout(SILENT_SECONDS):
                        await answer
                except TimeoutError:
                    self._workers.went_down(place)
                    await answer
            except ActorUnavailableError:
                self._workers.went_down(place)
            except RayActorError as error:
                log.warning("judge worker %d is lost: %s", place.number, " ".join(str(error).split())[:300])
                self._workers.lost(place, error)
                if not self._workers.places:
                    self._failure = error
                    self._first.set()
                return
            except RayError as error:
                log.warning("judge worker %d cannot be asked: %s", place.number, " ".join(str(error).split())[:300])
                self._workers.went_down(place)
            else:
                self._workers.came_up(place)
                if place is not self._union:
                    self._first.set()
            await asyncio.sleep(LOOK_SECONDS)


async def _answer(summary: ray.ObjectRef[PhaseSummary]) -> PhaseSummary:
    return await summary

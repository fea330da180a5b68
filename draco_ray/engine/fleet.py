"""The driver's view of the engines: which of them serve, with which weights, and how lost ones are replaced.

All configured engines are requested at all times. An engine that serves is up. It is down if its process died, its
node is lost, or no node has room for it. Rollouts use the engines that are up, and a weight sync does not wait for the
others if the minimum number is up. Ray restarts the actor of a lost engine wherever there is room. The engine serves
again once it has loaded the model and the current weights and has passed the canary, if the last sync had one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from draco_ray.config.schema import EngineConfig
from draco_ray.engine.actor import MAX_CALLS, EngineProcess
from draco_ray.engine.canary import Scorer
from draco_ray.engine.sampler import EngineStatistics
from draco_ray.errors import EngineError, EngineNotReady, first_line
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MonitoredWorkers, WorkerLost, WorkerUnavailable, is_temporary

log = logging.getLogger(__name__)

ProofT = TypeVar("ProofT")
Proof = Callable[[Scorer], Awaitable[Any]]

LOOK_SECONDS = 0.05
"""Interval at which a caller looks whether enough engines are up, or one is lost for good."""
STATISTICS_SECONDS = 2.0
"""Timeout for the statistics of an engine."""
LOST_ENGINE_ERRORS = (RayActorError, EngineNotReady)
"""Errors of calls to an engine that is lost, or whose new process has not loaded the model yet."""


class EngineFleet:
    """Starts the engines, sends them adapters, and sets up those that start later or restart."""

    def __init__(self, engines: Sequence[Any], config: EngineConfig) -> None:
        """Prepare the fleet; the engines begin to load with `start`.

        Args:
            engines: actor handles, one for each configured engine.
            config: the minimum number of engines, and how often an engine's process may die.
        """
        self.engines = list(engines)
        self.replaced = 0
        """Number of engine processes that were replaced after they died or their node was lost."""
        self.workers: ElasticWorkers[int] = ElasticWorkers(
            lambda number: number,
            slots=MAX_CALLS,
            min_workers=len(self.engines),
            max_workers=len(self.engines),
            idle_seconds=0.0,
        )
        """Engines by number; those that serve are up. Each rollout acquires one engine."""
        self._fewest = min(config.fewest, len(self.engines))
        self._max_failures = config.max_failures
        self._watched = MonitoredWorkers(self.workers, up=self._bring_up, end=self._renew, restart=self._renew)
        self._processes: dict[int, EngineProcess] = {}
        """The last known process of each engine."""
        self._failures = [0] * len(self.engines)
        self._weights: ray.ObjectRef[Any] | None = None
        self._holds: dict[int, ray.ObjectRef[Any]] = {}
        """The weights that each engine's process has loaded."""
        self._updating = [asyncio.Lock() for _ in self.engines]
        self._proof: Proof | None = None
        self._proven: dict[int, Any] = {}
        """Results of the current proof (see `prove`), by engine number."""
        self._loading: set[int] = set()
        self._asleep = False
        self._failure: Exception | None = None
        """Why an engine is lost for good."""

    async def start(self) -> None:
        """Return once the minimum number of engines serve and no engine is still loading.

        Engines that start or restart later are set up in the background.

        Raises:
            EngineError: the model cannot be loaded.
        """
        self._watched.open()
        await self._until(lambda: self.workers.up >= self._fewest and not self._loading)

    async def load(self, update: ray.ObjectRef[Any]) -> None:
        """Load a weight update into every engine that is up. Returns once at least the minimum number has loaded it.

        The driver must own the object behind ``update``, so that engines that start later can still load it.

        Raises:
            EngineError: an engine cannot load the update, or an engine's process has died too often.
            CanaryFailed: as `failure`.
        """
        # Set this first, so that engines that are being set up load the update, too.
        self._weights, self._proof, self._proven = update, None, {}
        await self._each_up(self._update)

    async def prove(self, proof: Callable[[Scorer], Awaitable[ProofT]]) -> list[ProofT]:
        """Run a check on every engine that is up. Until the next `load`, engines that start must pass it, too.

        Returns: the results, of at least the minimum number of engines.
        Raises: what the proof raises; EngineError if an engine is lost for good.
        """
        self._proof, self._proven = proof, {}
        await self._each_up(self._prove)
        return list(self._proven.values())

    async def sleep(self) -> None:
        """Return once every engine has freed its GPU (`engine.colocate`); new requests wait for `wake`.

        Raises:
            EngineError: an engine is lost for good, or cannot sleep.
        """
        # Set this first, so that a replaced engine is put to sleep as well.
        self._asleep = True
        await self._each("sleep")

    async def wake(self) -> None:
        """Return once every engine serves again. Raises: EngineError if one is lost for good."""
        self._asleep = False
        await self._each("wake")

    async def failure(self) -> None:
        """Wait until an engine fails for good.

        Raises:
            EngineError: an engine is lost for good.
            CanaryFailed: an engine that started later does not serve the learner's weights.
        """
        await self._until(lambda: False)

    async def statistics(self) -> Mapping[int, EngineStatistics]:
        """Statistics of the engines that are up and answer in time, by number."""

        async def ask(index: int) -> tuple[int, EngineStatistics | None]:
            try:
                asked = self.engines[index].statistics.remote()
                found: EngineStatistics = await asyncio.wait_for(asked, STATISTICS_SECONDS)
            except (RayError, TimeoutError):
                return index, None
            return index, found

        every = await asyncio.gather(*(ask(place.worker) for place in self._places_up()))
        return {index: found for index, found in every if found is not None}

    async def stop(self) -> None:
        """End all engines."""
        self._watched.close()
        there = {place.worker for place in self._places_up()}
        for index, engine in enumerate(self.engines):
            if index not in there:
                # The engine is loading or has no node, so it would answer late. Killing it ends its child processes.
                ray.kill(engine)
        await asyncio.gather(*(self.engines[index].stop.remote() for index in there))

    def _places_up(self) -> list[PooledWorker[int]]:
        return [place for place in self.workers.pooled if place.up]

    async def _each(self, method: str) -> None:
        try:
            await asyncio.gather(*(getattr(engine, method).remote() for engine in self.engines))
        except RayActorError as error:
            raise _lost(error) from None

    async def _each_up(self, work: Callable[[int], Awaitable[None]]) -> None:
        """Do ``work`` for every engine that is up; if one is lost meanwhile, `_bring_up` does the work later."""

        async def unless_away(place: PooledWorker[int]) -> None:
            try:
                await work(place.worker)
            except LOST_ENGINE_ERRORS as error:
                log.warning("engine %d is unavailable: %s", place.worker, first_line(error))
                self.workers.mark_down(place)

        await asyncio.gather(*(unless_away(place) for place in self._places_up()))
        await self._until(lambda: self.workers.up >= self._fewest)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raises: as `failure`."""
        while not true():
            await asyncio.sleep(LOOK_SECONDS)
            if self._failure is not None:
                raise self._failure

    async def _update(self, index: int) -> None:
        """Load the current weights into an engine."""
        async with self._updating[index]:
            while (weights := self._weights) is not None and self._holds.get(index) is not weights:
                await self.engines[index].load.remote(weights)
                self._holds[index] = weights

    async def _prove(self, index: int) -> None:
        if (proof := self._proof) is not None:
            proven = await proof(_EngineScorer(index, self.engines[index]))
            if proof is self._proof:
                self._proven[index] = proven

    async def _bring_up(self, index: int) -> None:
        """Return once an engine serves with the current weights.

        Raises:
            WorkerUnavailable: the engine does not answer now.
            WorkerLost: the engine is lost for good, which fails the run.
        """
        try:
            await self._bring_up_unless_away(index)
        except Exception as error:
            if isinstance(error, EngineNotReady) or (isinstance(error, RayActorError) and is_temporary(error)):
                raise WorkerUnavailable(first_line(error)) from error
            self._fail(self._plain(error))
            raise WorkerLost from error

    async def _bring_up_unless_away(self, index: int) -> None:
        engine = self.engines[index]
        (place,) = (place for place in self.workers.pooled if place.worker == index)
        process: EngineProcess = await engine.look.remote()
        before = self._processes.get(index)
        same = before is not None and before.identity == process.identity
        current = self._holds.get(index) is self._weights or self._updating[index].locked()
        if place.up and same and process.serves and current:
            return
        if place.up:
            self.workers.mark_down(place)
        if not same:
            self._holds.pop(index, None)
            self._processes[index] = process
            if before is not None:
                await self._count(index, before)
        self._loading.add(index)
        try:
            await engine.start.remote()
            done, asleep = None, False
            while done != (wanted := (self._weights, self._proof, self._asleep)):
                done = wanted
                await self._update(index)
                await self._prove(index)
                if self._asleep != asleep:
                    asleep = self._asleep
                    await (engine.sleep if asleep else engine.wake).remote()
        finally:
            self._loading.discard(index)
        # No need to await: Ray sends this call before any later update.
        engine.serve.remote()

    async def _count(self, index: int, before: EngineProcess) -> None:
        """Count the replacement of an engine's process, which is a failure if the node is still alive."""
        self.replaced += 1
        gone = await asyncio.to_thread(_is_gone, before.node)
        log.warning("engine %d has a new process: %s", index, "its node was lost" if gone else "the old one died")
        if gone:
            return
        self._failures[index] += 1
        if self._failures[index] > self._max_failures:
            raise EngineError(_too_often(f"engine {index}, {self._failures[index]} times"))

    def _renew(self, index: int) -> None:
        ray.kill(self.engines[index], no_restart=False)

    def _plain(self, error: Exception) -> Exception:
        if isinstance(error, RayActorError):
            return _lost(error)
        if isinstance(error, RayTaskError) and isinstance(error.cause, EngineError) and self.replaced:
            return EngineError(f"an engine cannot be restarted: {first_line(error)}")
        return error

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._watched.close()


class _EngineScorer:
    """A `draco_ray.engine.canary.Scorer` that sends its calls to an engine's actor."""

    def __init__(self, index: int, engine: Any) -> None:
        self.name = f"engine-{index}"
        self._engine = engine

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        logprobs: list[float] = await self._engine.logprobs.remote(token_ids, adapter)
        return logprobs


def _lost(error: RayActorError) -> EngineError:
    return EngineError(_too_often(first_line(error)))


def _too_often(said: str) -> str:
    return (
        f"an engine's process has died more than engine.max_failures times ({said}); check for lack of memory, lower "
        "engine.kv_cache_gib or engine.max_num_seqs"
    )


def _is_gone(node: str) -> bool:
    return not any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())

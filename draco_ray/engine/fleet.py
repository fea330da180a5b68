"""The driver's hold on the engines: which of them serve, with which weights, and what becomes of one that is gone.

Every engine of the configuration is asked for at all times. One that serves is up; one whose process ended, or whose
node is gone, or that never found room, is not: rollouts are given to those that are up, and no sync waits for the rest
once the fewest are up. Ray starts its actor anew wherever there is room; it serves again when it has its model and the
current weights and, where the last sync had one, has passed the canary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from draco_ray.config.schema import EngineConfig
from draco_ray.engine.actor import MAX_CALLS, EngineProcess, first_line
from draco_ray.engine.canary import Scorer
from draco_ray.engine.sampler import EngineStatistics
from draco_ray.errors import EngineAway, EngineError
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MonitoredWorkers, WorkerLost, WorkerUnavailable, is_temporary

log = logging.getLogger(__name__)

ProofT = TypeVar("ProofT")
Proof = Callable[[Scorer], Awaitable[Any]]

STATISTICS_SECONDS = 2.0
"""In which an engine says what it does, or is passed over."""
AWAY = (RayActorError, EngineAway)
"""What a call raises whose engine is not there, or is a new process that has not been started."""


class EngineFleet:
    """Starts the engines, brings them adapters, and sets up those that come later or anew."""

    def __init__(self, engines: Sequence[Any], config: EngineConfig) -> None:
        """Prepare the fleet; the engines begin to load with `start`.

        Args:
            engines: actor handles, one for each engine of the configuration.
            config: how many must be up, and how often the process of one may die.
        """
        self.engines = list(engines)
        self.replaced = 0
        """Engine processes that died, or went with their node, and were replaced."""
        self.workers: ElasticWorkers[int] = ElasticWorkers(
            lambda number: number,
            slots=MAX_CALLS,
            min_workers=len(self.engines),
            max_workers=len(self.engines),
            idle_seconds=0.0,
        )
        """By their numbers; those that serve are up. Whoever samples takes one."""
        self._fewest = min(config.fewest, len(self.engines))
        self._max_failures = config.max_failures
        self._watched = MonitoredWorkers(self.workers, up=self._bring_up, end=self._renew, restart=self._renew)
        self._processes: dict[int, EngineProcess] = {}
        """The last process of each engine that was started."""
        self._failures = [0] * len(self.engines)
        self._weights: ray.ObjectRef[Any] | None = None
        self._holds: dict[int, ray.ObjectRef[Any]] = {}
        """The weights that each engine's process has."""
        self._updating = [asyncio.Lock() for _ in self.engines]
        self._proof: Proof | None = None
        self._proven: dict[int, Any] = {}
        """What the proof gave, by engine."""
        self._loading: set[int] = set()
        self._asleep = False
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Return once the fewest engines serve and no other that has a place is still loading.

        From then on engines that come, or come anew, are set up as they do.

        Raises:
            EngineError: the model cannot be loaded.
        """
        self._failed = asyncio.get_running_loop().create_future()
        # Its error counts as read even if nobody waits for it: calls to a lost engine raise one of their own.
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        self._watched.open()
        await self._until(lambda: self.workers.up >= self._fewest and not self._loading)

    async def load(self, update: ray.ObjectRef[Any]) -> None:
        """Switch the engines that are up to a weight update, and return once the fewest have it.

        The reference must outlive its maker, for engines that come later.

        Raises:
            EngineError: an engine refuses it, or is lost for good.
        """
        # Remembered first: an engine that is set up meanwhile ends with it.
        self._weights, self._proof, self._proven = update, None, {}
        await self._each_up(self._update)

    async def prove(self, proof: Callable[[Scorer], Awaitable[ProofT]]) -> list[ProofT]:
        """Ask a proof of every engine that is up, and until the next `load` of each that comes, before it serves.

        Returns: what it gave; of the fewest engines at least.
        Raises: what the proof raises; EngineError when an engine is lost for good.
        """
        self._proof, self._proven = proof, {}
        await self._each_up(self._prove)
        return list(self._proven.values())

    async def sleep(self) -> None:
        """Return once every engine has given its GPU away (`engine.colocate`); requests that come wait for `wake`.

        Raises:
            EngineError: an engine is lost for good, or cannot sleep.
        """
        # Remembered first: an engine that is replaced meanwhile is put to sleep as well.
        self._asleep = True
        await self._each("sleep")

    async def wake(self) -> None:
        """Return once every engine serves again; raises EngineError when one is lost for good."""
        self._asleep = False
        await self._each("wake")

    async def failure(self) -> None:
        """Wait until an engine is lost for good, or cannot be used.

        Raises:
            EngineError: then.
            CanaryFailed: it came with other weights.
        """
        assert self._failed is not None
        await asyncio.shield(self._failed)

    async def statistics(self) -> Mapping[int, EngineStatistics]:
        """What each engine that is up does at this moment, but for those that cannot be asked now."""

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
        """Set up no engine any more, and end them."""
        self._watched.close()
        there = {place.worker for place in self._places_up()}
        for index, engine in enumerate(self.engines):
            if index not in there:
                # It loads, and would answer late, or has no place; its processes end with it.
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
        """Do ``work`` with every engine that is up; one that is lost meanwhile does it when it is set up again."""

        async def unless_away(place: PooledWorker[int]) -> None:
            try:
                await work(place.worker)
            except AWAY as error:
                log.warning("engine %d is away: %s", place.worker, first_line(error))
                self.workers.mark_down(place)

        await asyncio.gather(*(unless_away(place) for place in self._places_up()))
        await self._until(lambda: self.workers.up >= self._fewest)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so. Raises: EngineError: an engine is lost for good."""
        assert self._failed is not None
        while not true():
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            either: list[asyncio.Future[Any]] = [changed, self._failed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if self._failed.done():
                self._failed.result()

    async def _update(self, index: int) -> None:
        """Bring an engine the current weights."""
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
        """Return at once if an engine serves with the current weights, else once it does.

        Raises:
            WorkerUnavailable: it cannot be asked now.
            WorkerLost: it is lost for good, and with it the run.
        """
        try:
            await self._bring_up_unless_away(index)
        except Exception as error:
            if isinstance(error, EngineAway) or (isinstance(error, RayActorError) and is_temporary(error)):
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
            self._tell()
        # Sent before any later update, which is sent to an engine that is up and waited for.
        engine.serve.remote()

    async def _count(self, index: int, before: EngineProcess) -> None:
        """Take note of an engine's new process; its old one has failed if its node is still there."""
        self.replaced += 1
        gone = await asyncio.to_thread(_is_gone, before.node)
        log.warning("engine %d has a new process: %s", index, "its node is gone" if gone else "the old one died")
        if gone:
            return
        self._failures[index] += 1
        if self._failures[index] > self._max_failures:
            raise EngineError(_too_often(f"engine {index}, {self._failures[index]} times"))

    def _tell(self) -> None:
        # In the next turn of the loop: the engine is noted as up in this one.
        asyncio.get_running_loop().call_soon(self._changed.set)

    def _renew(self, index: int) -> None:
        ray.kill(self.engines[index], no_restart=False)

    def _plain(self, error: Exception) -> Exception:
        if isinstance(error, RayActorError):
            return _lost(error)
        if isinstance(error, RayTaskError) and isinstance(error.cause, EngineError) and self.replaced:
            return EngineError(f"engine: cannot be started again: {first_line(error)}")
        return error

    def _fail(self, error: Exception) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._watched.close()


class _EngineScorer:
    """A `draco_ray.engine.canary.Scorer`."""

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
        f"engine: its process has died more than engine.max_failures times ({said}); look for lack of memory, lower "
        "engine.kv_cache_gib or engine.max_num_seqs"
    )


def _is_gone(node: str) -> bool:
    return not any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())

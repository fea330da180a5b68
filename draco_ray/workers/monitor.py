"""Health checks for a pool of workers, and retries of the calls of unresponsive or lost ones. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from draco_ray.workers.elastic import ElasticWorkers, PooledWorker


def is_temporary(error: RayActorError) -> bool:
    """Whether an actor that Ray restarts without limit is only temporarily unavailable.

    If the actor's node is being drained, Ray reports that the actor died instead of that it is unavailable. This
    happens when a spot node is reclaimed, and when the autoscaler tried to drain a node that was no longer idle.
    """
    return isinstance(error, ActorUnavailableError) or error.preempted


async def wait_until_up(worker: Any) -> None:
    """Return once an actor answers. Raises: `WorkerUnavailable`, `WorkerLost`."""
    try:
        await worker.up.remote()
    except RayError as error:
        if isinstance(error, RayActorError) and not is_temporary(error):
            raise WorkerLost from error
        raise WorkerUnavailable(str(error)) from error


async def answer(call: Awaitable[AnswerT]) -> AnswerT:
    """Return the answer to a call. Raises: `WorkerUnavailable`, and what the call raises."""
    try:
        return await call
    except RayActorError as error:
        raise WorkerUnavailable(str(error)) from error


def restart(worker: Any) -> None:
    """Kill an actor's process; Ray starts another."""
    ray.kill(worker, no_restart=False)


def pin_argument(value: Any) -> Any:
    """``value`` as an argument of an actor that Ray restarts; keep the result for as long as the actor may restart.

    Ray moves a large argument, such as a tokenizer, to the object store and frees it after the first start.
    """
    return ray.put(value) if len(ray.cloudpickle.dumps(value)) > INLINE_BYTES else value


log = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT")
AnswerT = TypeVar("AnswerT")
HandleT = TypeVar("HandleT")

INLINE_BYTES = 50 << 10
"""Arguments up to this size travel with a call; Ray's own limit is twice as large."""
ADJUST_SECONDS = 1.0
"""Interval at which the number of workers is adjusted."""
PING_SECONDS = 5.0
"""Pause between a worker's answer to a health check and the next check."""
TIMEOUT_SECONDS = 60.0
"""A worker that does not answer a health check for so long is unresponsive: its calls are retried elsewhere."""
TIMEOUT_PARTS = 6
"""The timeout is split into this many waits, so that a pause of this process itself uses up at most one of them."""
MAX_ATTEMPTS = 4
"""Maximum number of attempts per call. A call that failed at so many workers probably caused the failures, so it is
given up before it takes down the rest."""


class WorkerUnavailable(Exception):
    """A worker cannot be reached now; it may come back."""


class WorkerLost(Exception):
    """A worker is lost for good; if it was the last one, waiting calls raise the cause."""


@dataclass(frozen=True, slots=True)
class PendingCall(Generic[HandleT, AnswerT]):
    """A call that was sent to a worker."""

    handle: HandleT
    """Returned to the caller beside the answer."""
    answer: Awaitable[AnswerT]
    """Raises `WorkerUnavailable` if the worker died or is out of reach."""
    cancel: Callable[[], object]
    """Cancels the call at the worker."""


class MonitoredWorkers(Generic[WorkerT]):
    """`ElasticWorkers` with health checks and retries.

    A call goes to a worker that is up. If that worker stops answering while another one answers, dies, or is out of
    reach, the call is retried at another worker that is up, `MAX_ATTEMPTS` times in all. A worker that failed counts as
    up only after it has answered a health check, so no attempt is wasted on a dead node.
    """

    def __init__(
        self,
        workers: ElasticWorkers[WorkerT],
        *,
        up: Callable[[WorkerT], Awaitable[object]],
        end: Callable[[WorkerT], object],
        restart: Callable[[WorkerT], object],
        ping_seconds: float = PING_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
        kind: str = "worker",
    ) -> None:
        """Prepare the pool; nothing is started yet.

        Args:
            workers: the workers.
            up: the health check: returns once a worker answers. Raises `WorkerUnavailable` or `WorkerLost`.
            end: ends an unneeded worker, which holds no call.
            restart: restarts the process of an unresponsive worker whose calls were moved: that process may hold a lock
                that other workers wait for.
            ping_seconds: see `PING_SECONDS`.
            timeout_seconds: see `TIMEOUT_SECONDS`; longer where a worker may be too busy to answer.
            kind: what the workers are, for messages.
        """
        self.workers, self._up, self._end, self._restart = workers, up, end, restart
        self.ping_seconds, self.timeout_seconds, self._kind = ping_seconds, timeout_seconds, kind
        self._monitors: dict[PooledWorker[WorkerT], asyncio.Task[None]] = {}
        self._adjusting: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Request the minimum number of workers and return at once; needs a running event loop."""
        self.adjust()
        self._adjusting = asyncio.create_task(self._keep_adjusting())

    def monitor(self, pooled: PooledWorker[WorkerT]) -> None:
        """Check a worker's health until it is lost; it need not belong to the pool."""
        self._monitors[pooled] = asyncio.create_task(self._monitor(pooled))

    def close(self) -> None:
        """Stop checking and adjusting; the workers stay."""
        for task in (*self._monitors.values(), *filter(None, [self._adjusting])):
            task.cancel()

    async def call(
        self,
        send: Callable[[WorkerT], PendingCall[HandleT, AnswerT]],
        *,
        rank: int = 0,
        preferred: PooledWorker[WorkerT] | None = None,
        attempts: int = MAX_ATTEMPTS,
        ok: Callable[[AnswerT], bool] = lambda answer: True,
    ) -> tuple[HandleT, AnswerT] | None:
        """Make a call; retry it at another worker if one becomes unresponsive or is lost.

        Args:
            send: sends the call to a worker.
            rank: see `ElasticWorkers.acquire`.
            preferred: a worker outside the pool that takes the call while it is up, however busy.
            attempts: maximum number of attempts.
            ok: whether an answer counts as a success of its worker.

        Returns: the call's handle and answer; None if all ``attempts`` failed.
        Raises: what the call or `ElasticWorkers.acquire` raises.
        """
        for _ in range(attempts):
            if preferred is not None and preferred.up:
                pooled = preferred
                pooled.calls += 1
            else:
                pooled = await self.workers.acquire(rank)
            sent = send(pooled.worker)
            # A worker continues with the call of a cancelled caller, so the slot stays in use until the call ends.
            finishing = asyncio.create_task(self._finish(pooled, sent, ok))
            self._calls.add(finishing)
            finishing.add_done_callback(self._calls.discard)
            answer = await asyncio.shield(finishing)
            if answer is not None:
                return sent.handle, answer.result()
        return None

    async def drain(self, seconds: float) -> None:
        """Wait for the calls in flight, also those whose caller was cancelled, at most ``seconds``."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=seconds)

    async def _finish(
        self, pooled: PooledWorker[WorkerT], sent: PendingCall[HandleT, AnswerT], ok: Callable[[AnswerT], bool]
    ) -> asyncio.Future[AnswerT] | None:
        """Wait for a call's answer; None if its worker was abandoned or is out of reach."""
        answer = asyncio.ensure_future(sent.answer)
        await _answered_or_abandoned(pooled, answer)
        ended = answer.done() and not answer.cancelled()
        error = answer.exception() if ended else None
        # Before releasing the slot, mark the worker as down or record the call. Otherwise a retry could take the slot.
        if isinstance(error, WorkerUnavailable):
            self._down(pooled, error)
        elif ended and error is None:
            self.workers.record(pooled, ok=ok(answer.result()))
        self._release(pooled)
        if answer.done() and not isinstance(error, WorkerUnavailable):
            return answer
        answer.cancel()
        sent.cancel()
        return None

    def _release(self, pooled: PooledWorker[WorkerT]) -> None:
        if pooled in self.workers.pooled:
            self.workers.release(pooled)
        else:
            pooled.calls -= 1

    async def _keep_adjusting(self) -> None:
        while True:
            await asyncio.sleep(ADJUST_SECONDS)
            try:
                self.adjust()
            except Exception:
                # Workers that are up keep working; if the failure affects them too, their calls raise it.
                log.exception("the number of %ss could not be adjusted", self._kind)

    def adjust(self) -> None:
        """Scale the pool."""
        come, gone = self.workers.adjust()
        for pooled in come:
            self.monitor(pooled)
        for pooled in gone:
            self._monitors.pop(pooled).cancel()
            self._end(pooled.worker)
        if come or gone:
            log.info(
                "%ss: %d up, %d requested, %d calls in flight, %d waiting",
                *(self._kind, self.workers.up, len(self.workers.pooled), self.workers.in_flight, self.workers.waiting),
            )

    def _down(self, pooled: PooledWorker[WorkerT], error: WorkerUnavailable) -> None:
        if pooled.up:
            log.warning("%s %d cannot be reached: %s", self._kind, pooled.number, " ".join(str(error).split())[:300])
        self.workers.mark_down(pooled)

    async def _ping(self, pooled: PooledWorker[WorkerT]) -> None:
        await self._up(pooled.worker)
        # There is no await after the health check, so its result is still valid.
        self.workers.mark_up(pooled)

    async def _answered(self, answer: asyncio.Future[Any]) -> bool:
        """Whether the answer comes within `timeout_seconds`, not counting pauses of this process."""
        for _ in range(TIMEOUT_PARTS):
            done, _ = await asyncio.wait({answer}, timeout=self.timeout_seconds / TIMEOUT_PARTS)
            if done:
                return True
        return False

    async def _monitor(self, pooled: PooledWorker[WorkerT]) -> None:
        while True:
            answer = asyncio.create_task(self._ping(pooled))
            try:
                if not await self._answered(answer) and pooled.up:
                    log.warning("%s %d does not answer", self._kind, pooled.number)
                    self.workers.mark_down(pooled)
                    await _answered_or_abandoned(pooled, answer)
                    if not answer.done():
                        log.warning("%s %d is restarted", self._kind, pooled.number)
                        self._restart(pooled.worker)
                await answer
            except WorkerLost as error:
                cause = error.__cause__ or error
                log.warning("%s %d is lost: %s", self._kind, pooled.number, " ".join(str(cause).split())[:300])
                self.workers.mark_lost(pooled, cause)
                return
            except WorkerUnavailable as error:
                self._down(pooled, error)
            finally:
                answer.cancel()
            await asyncio.sleep(self.ping_seconds)


async def _answered_or_abandoned(pooled: PooledWorker[Any], answer: asyncio.Future[Any]) -> None:
    abandoned = asyncio.ensure_future(pooled.abandoned.wait())
    try:
        await asyncio.wait({answer, abandoned}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        abandoned.cancel()

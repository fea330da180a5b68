"""Workers that fall silent or are lost, and what becomes of the calls they had; nothing of Ray is in here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from draco_ray.workers.elastic import ElasticWorkers, Place

log = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT")
AnswerT = TypeVar("AnswerT")
HandleT = TypeVar("HandleT")

ADJUST_SECONDS = 1.0
"""Between two looks at how many workers are needed."""
LOOK_SECONDS = 5.0
"""Between a worker's answer and the next question whether it is there."""
SILENT_SECONDS = 60.0
"""After which a worker that does not answer gets no more calls, and those it has are made elsewhere."""
SILENT_PARTS = 6
"""In which that time is waited for: a stop of this process itself, however long, takes away no more than one."""
MOST_SENDS = 4
"""Times a call is given to a worker. A call under which so many workers fall silent is probably the cause: it fails,
instead of silencing the rest of them."""


class Away(Exception):
    """A worker cannot be asked now; it may come back."""


class Gone(Exception):
    """A worker is lost for good; the cause is what waiting callers are told."""


@dataclass(frozen=True, slots=True)
class Sent(Generic[HandleT, AnswerT]):
    """A call that a worker was given."""

    handle: HandleT
    """What the caller keeps of it."""
    answer: Awaitable[AnswerT]
    """Raises `Away` where the worker was lost under it, or out of reach."""
    cancel: Callable[[], object]
    """Tells the worker that nobody waits for the answer any longer."""


class WatchedWorkers(Generic[WorkerT]):
    """`ElasticWorkers` that are asked again and again whether they are there.

    A call goes to a worker that is up. Where that one stops answering while another answers, the call is made there;
    where it is lost under the call, or out of reach, at the next that is up. `MOST_SENDS` times in all, and a worker
    that was lost counts as up only when it has answered again: no call is spent on a node that is gone.
    """

    def __init__(
        self,
        workers: ElasticWorkers[WorkerT],
        *,
        up: Callable[[WorkerT], Awaitable[object]],
        end: Callable[[WorkerT], object],
        renew: Callable[[WorkerT], object],
        look_seconds: float = LOOK_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Prepare the watch; nothing is started yet.

        Args:
            workers: the workers.
            up: returns once a worker answers. Raises `Away` or `Gone`.
            end: ends a worker that is not needed, which holds no call.
            renew: ends the process of a silent worker whose calls are made elsewhere, and starts it anew: it may be
                stopped for good, holding a lock that the others wait for.
            look_seconds: see `LOOK_SECONDS`.
            silent_seconds: see `SILENT_SECONDS`; longer where a worker may be too busy to answer.
        """
        self.workers, self._up, self._end, self._renew = workers, up, end, renew
        self.look_seconds, self.silent_seconds = look_seconds, silent_seconds
        self._watching: dict[Place[WorkerT], asyncio.Task[None]] = {}
        self._adjusting: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Ask for the fewest workers; needs a running event loop, and returns at once."""
        self._adjust()
        self._adjusting = asyncio.create_task(self._keep_adjusting())

    def watch(self, place: Place[WorkerT]) -> None:
        """Ask a worker whether it is there until it is lost; one of the workers, or one beside them."""
        self._watching[place] = asyncio.create_task(self._watch(place))

    def close(self) -> None:
        """Watch and adjust no longer; the workers stay."""
        for task in (*self._watching.values(), *filter(None, [self._adjusting])):
            task.cancel()

    async def call(
        self,
        send: Callable[[WorkerT], Sent[HandleT, AnswerT]],
        *,
        rank: int = 0,
        preferred: Place[WorkerT] | None = None,
        sends: int = MOST_SENDS,
        well: Callable[[AnswerT], bool] = lambda answer: True,
    ) -> tuple[HandleT, AnswerT] | None:
        """Make a call, at another worker again where one falls silent under it.

        Args:
            send: gives it to a worker.
            rank: as of `ElasticWorkers.acquire`.
            preferred: a place beside the workers that takes it while it is up, whatever else it does.
            sends: times that it is given to a worker.
            well: whether an answer is one of a worker that can do its work.

        Returns: the call's handle and answer; None where ``sends`` workers fell silent or were lost under it.
        Raises: what the call raises; as `ElasticWorkers.acquire`.
        """
        for _ in range(sends):
            if preferred is not None and preferred.up:
                place = preferred
                place.calls += 1
            else:
                place = await self.workers.acquire(rank)
            sent = send(place.worker)
            answer = await self._finish(place, sent, well)
            if answer is not None:
                return sent.handle, answer.result()
        return None

    async def drain(self, seconds: float) -> None:
        """Wait for calls whose caller was cancelled, at most so long."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=seconds)

    async def _finish(
        self, place: Place[WorkerT], sent: Sent[HandleT, AnswerT], well: Callable[[AnswerT], bool]
    ) -> asyncio.Future[AnswerT] | None:
        """Wait for a call's answer; None if its worker was given up on, or out of reach."""
        answer = asyncio.ensure_future(sent.answer)
        given_up = asyncio.ensure_future(place.given_up.wait())
        try:
            await asyncio.wait({answer, given_up}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The worker goes on with the call, and its slot stays taken until it ends.
            task = asyncio.create_task(self._release_after(place, answer))
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            raise
        finally:
            given_up.cancel()
        ended = answer.done() and not answer.cancelled()
        error = answer.exception() if ended else None
        # Before its slot is free again, which would be given this very call.
        if isinstance(error, Away):
            self._down(place, error)
        elif ended and error is None:
            self.workers.did(place, well=well(answer.result()))
        self._release(place)
        if answer.done() and not isinstance(error, Away):
            return answer
        answer.cancel()
        sent.cancel()
        return None

    async def _release_after(self, place: Place[WorkerT], answer: asyncio.Future[AnswerT]) -> None:
        await asyncio.wait({answer})
        # Read, so that asyncio does not report an error that nobody awaits.
        _ = answer.cancelled() or answer.exception()
        self._release(place)

    def _release(self, place: Place[WorkerT]) -> None:
        if place in self.workers.places:
            self.workers.release(place)
        else:
            place.calls -= 1

    async def _keep_adjusting(self) -> None:
        while True:
            await asyncio.sleep(ADJUST_SECONDS)
            try:
                self._adjust()
            except Exception:
                # The workers that are up go on; where something has failed for them too, their calls raise it.
                log.exception("the number of workers could not be adjusted")

    def _adjust(self) -> None:
        come, gone = self.workers.adjust()
        for place in come:
            self.watch(place)
        for place in gone:
            self._watching.pop(place).cancel()
            self._end(place.worker)
        if come or gone:
            log.info(
                "workers: %d up, %d asked for, %d calls in flight, %d waiting",
                *(self.workers.up, len(self.workers.places), self.workers.in_flight, self.workers.waiting),
            )

    async def _renew_if_given_up(self, place: Place[WorkerT], answer: asyncio.Future[Any]) -> None:
        """Wait until a silent worker answers, or is given up on and started anew."""
        given_up = asyncio.ensure_future(place.given_up.wait())
        try:
            await asyncio.wait({answer, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up.cancel()
        if not answer.done():
            log.warning("worker %d does not answer and is started anew", place.number)
            self._renew(place.worker)

    def _down(self, place: Place[WorkerT], error: Away) -> None:
        if place.up:
            log.warning("worker %d cannot be asked: %s", place.number, " ".join(str(error).split())[:300])
        self.workers.went_down(place)

    async def _look(self, place: Place[WorkerT]) -> None:
        await self._up(place.worker)
        # In the same turn of the loop: what the worker has made sure of to be up holds still.
        self.workers.came_up(place)

    async def _answered(self, answer: asyncio.Future[Any]) -> bool:
        """Whether it comes within `silent_seconds` of this process's own."""
        for _ in range(SILENT_PARTS):
            done, _ = await asyncio.wait({answer}, timeout=self.silent_seconds / SILENT_PARTS)
            if done:
                return True
        return False

    async def _watch(self, place: Place[WorkerT]) -> None:
        while True:
            answer = asyncio.create_task(self._look(place))
            try:
                if not await self._answered(answer):
                    answered = place.up
                    self.workers.went_down(place)
                    if answered:
                        await self._renew_if_given_up(place, answer)
                await answer
            except Gone as error:
                cause = error.__cause__ or error
                log.warning("worker %d is lost: %s", place.number, " ".join(str(cause).split())[:300])
                self.workers.lost(place, cause)
                return
            except Away as error:
                self._down(place, error)
            finally:
                answer.cancel()
            await asyncio.sleep(self.look_seconds)

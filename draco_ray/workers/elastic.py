"""Workers that come and go with the calls that wait for them; nothing of Ray is in here."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

WorkerT = TypeVar("WorkerT")
MOST_GROUPS = 10_000
"""Whose last worker is known."""
REST_SECONDS, MOST_REST_SECONDS = 30.0, 600.0
"""For which a worker gets no call after one that it could not do: the first time, each time in a row twice as long."""


class Place(Generic[WorkerT]):
    """One worker of the pool, from the moment it is asked for."""

    def __init__(self, worker: WorkerT, number: int, now: float) -> None:
        self.worker = worker
        self.number = number
        """Counts the workers asked for so far; the number of a worker that left is not used again."""
        self.up = False
        """Whether it answers. One that waits for a node, or for its restart, is not up."""
        self.calls = 0
        """Calls it has been given and has not answered."""
        self.idle_since = now
        self.given_up = asyncio.Event()
        """Set when it stopped answering while another answers: its calls are to be made there."""
        self.failures = 0
        """Calls in a row that it could not do."""
        self.rests_until = -float("inf")


class ElasticWorkers(Generic[WorkerT]):
    """Slots of workers between two bounds; a call gets a slot of one that is up, or waits.

    The oldest ``fewest`` workers share the calls evenly; a younger one gets a call only while all before it are full,
    so the youngest are idle first. Where a call names a group, the worker that had the group's last call comes before
    all others while it has room: what the group's prompts share is in its memory.
    """

    def __init__(
        self,
        start: Callable[[int], WorkerT],
        *,
        slots: int,
        fewest: int,
        most: int,
        idle_seconds: float,
        most_calls: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the pool; nothing is started before the first `adjust`.

        Args:
            start: asks for the worker of that number.
            slots: calls of one worker at a time.
            fewest: workers there are at any time.
            most: workers there are at most; never fewer than ``fewest``.
            idle_seconds: after which a worker that is not needed goes.
            most_calls: of all workers together at a time, where that is less than they have slots.
            clock: seconds, for tests.
        """
        self._start = start
        self._slots = slots
        self._fewest = fewest
        self._most = max(fewest, most)
        self._idle_seconds = idle_seconds
        self._most_calls = most_calls
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, str, asyncio.Future[Place[WorkerT]]]] = []
        self._last: OrderedDict[str, Place[WorkerT]] = OrderedDict()
        """Of each group, the worker that had its last call."""
        self._arrivals = itertools.count()
        self._full_use_at = -float("inf")
        """When every worker there is was needed last."""
        self._grow_after = -float("inf")
        self._silent: set[Place[WorkerT]] = set()
        self.places: list[Place[WorkerT]] = []
        """By age, the oldest first."""

    @property
    def waiting(self) -> int:
        """Calls without a slot."""
        return sum(not future.done() for *_, future in self._waiting)

    @property
    def in_flight(self) -> int:
        """Calls that hold a slot."""
        return sum(place.calls for place in self.places)

    @property
    def up(self) -> int:
        """Workers that answer."""
        return sum(place.up for place in self.places)

    @property
    def wanted(self) -> int:
        """Workers that would hold every call there is, within the bounds."""
        needed = -(-(self.in_flight + self.waiting) // self._slots)
        return min(max(needed, self._fewest), self._most)

    def adjust(self) -> tuple[list[Place[WorkerT]], list[Place[WorkerT]]]:
        """Ask for workers that are missing, and let those go that have been idle for long.

        Returns: the places that are new, and those that left the pool, whose workers the caller ends.
        """
        now = self._clock()
        wanted = self.wanted
        if wanted >= len(self.places):
            self._full_use_at = now
        missing = wanted - len(self.places) if now >= self._grow_after else 0
        come = [self._ask() for _ in range(missing)]
        # Workers that never came up are let go first, then the youngest.
        unneeded = sorted(self.places, key=lambda place: (place.up, -place.number))
        gone = [
            place
            for place in unneeded[: max(0, len(self.places) - wanted)]
            if not place.calls and now - max(place.idle_since, self._full_use_at) >= self._idle_seconds
        ]
        for place in gone:
            self.places.remove(place)
            self._silent.discard(place)
        # Those that have rested are there for whoever waits.
        self._serve()
        return come, gone

    async def acquire(self, rank: int = 0, group: str = "") -> Place[WorkerT]:
        """A slot of a worker that is up; waits for one, the lowest rank first and equals in order of arrival.

        Raises: what `lost` or `refuse` was told.
        """
        place = self._free(group)
        if place is not None and not self.waiting:
            return self._given(place, group)
        future: asyncio.Future[Place[WorkerT]] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), group, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                # The slot was assigned just before the wait was cancelled: hand it back.
                self.release(future.result())
            raise

    def at_once(self) -> Place[WorkerT]:
        """A slot of the worker with the fewest calls, of one that is up where any is; waits for none."""
        place = self._free("") or min(self.places, key=lambda place: (place.calls, place.number))
        return self._given(place, "")

    def release(self, place: Place[WorkerT]) -> None:
        """Give a slot back."""
        place.calls -= 1
        if not place.calls:
            place.idle_since = self._clock()
        self._serve()

    def came_up(self, place: Place[WorkerT]) -> None:
        """Note that a worker answers: it gets calls from now on."""
        if not place.up:
            place.up, place.given_up = True, asyncio.Event()
            place.idle_since = self._clock()
        self._silent.discard(place)
        self._give_up_the_silent()
        self._serve()

    def went_down(self, place: Place[WorkerT]) -> None:
        """Note that a worker does not answer: it gets no call until it does, and its calls go to others that are up."""
        place.up = False
        self._silent.add(place)
        self._give_up_the_silent()

    def did(self, place: Place[WorkerT], *, well: bool) -> None:
        """Note whether a worker could do a call. One that could not rests while others are there that need not.

        It is free at once, where others still work: without a rest a worker on which everything fails would be given
        all that waits.
        """
        place.failures = 0 if well else place.failures + 1
        rest = 0.0 if well else min(REST_SECONDS * 2.0 ** (place.failures - 1), MOST_REST_SECONDS)
        place.rests_until = self._clock() + rest

    def lost(self, place: Place[WorkerT], error: BaseException) -> None:
        """Note that a worker is gone for good. Where it was the last one, whoever waits is told ``error``."""
        place.up = False
        self._silent.discard(place)
        if place in self.places:
            self.places.remove(place)
        # A new worker would most likely be lost in the same way if it were asked for at once.
        self._grow_after = self._clock() + self._idle_seconds
        if not self.places:
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Tell ``error`` to whoever waits."""
        while self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_exception(error)

    def _ask(self) -> Place[WorkerT]:
        number = next(self._numbers)
        place = Place(self._start(number), number, self._clock())
        self.places.append(place)
        return place

    def _given(self, place: Place[WorkerT], group: str) -> Place[WorkerT]:
        place.calls += 1
        if group:
            self._last[group] = place
            self._last.move_to_end(group)
            if len(self._last) > MOST_GROUPS:
                self._last.popitem(last=False)
        return place

    def _free(self, group: str) -> Place[WorkerT] | None:
        if self._most_calls is not None and self.in_flight >= self._most_calls:
            return None
        now = self._clock()
        none_fit = all(place.rests_until > now for place in self.places if place.up)

        def has_room(place: Place[WorkerT]) -> bool:
            return place.up and place.calls < self._slots and (none_fit or place.rests_until <= now)

        last = self._last.get(group)
        if last is not None and last in self.places and has_room(last):
            return last
        ranked = [
            (max(0, age - self._fewest + 1), place.calls, age)
            for age, place in enumerate(self.places)
            if has_room(place)
        ]
        return self.places[min(ranked)[-1]] if ranked else None

    def _serve(self) -> None:
        while self._waiting and (place := self._free(self._waiting[0][2])) is not None:
            _, _, group, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(self._given(place, group))

    def _give_up_the_silent(self) -> None:
        if self.up:
            for place in self._silent:
                place.given_up.set()


def standing(workers: int, slots: int) -> ElasticWorkers[int]:
    """So many workers that are up for good, each of them its number."""
    pool: ElasticWorkers[int] = ElasticWorkers(
        lambda number: number, slots=slots, fewest=workers, most=workers, idle_seconds=0.0
    )
    for place in pool.adjust()[0]:
        pool.came_up(place)
    return pool

"""Calls outlive workers that fall silent; nothing of Ray is in it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draco_ray.workers.elastic import ElasticWorkers, Place
from draco_ray.workers.silence import MOST_SENDS, SILENT_PARTS, Away, Gone, Sent, WatchedWorkers


class Worker:
    """Answers what it is asked with its number, or waits until it is told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.there = asyncio.Event()
        self.there.set()
        self.error: Exception | None = None
        self.looks = 0
        self.calls: list[asyncio.Future[int]] = []
        self.cancelled = 0
        self.ended = False
        self.renewed = 0

    async def up(self) -> None:
        self.looks += 1
        await self.there.wait()
        if self.error is not None:
            raise self.error

    def renew(self) -> None:
        self.renewed += 1
        self.error = Away("restarting")
        self.there.set()

    def send(self) -> Sent[int, int]:
        call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.calls.append(call)

        def cancel() -> None:
            self.cancelled += 1

        return Sent(self.number, call, cancel)


class Pool:
    """So many workers of one slot each, which are silent the moment they do not answer."""

    def __init__(self, number: int) -> None:
        self.made: list[Worker] = []
        self.workers: ElasticWorkers[Worker] = ElasticWorkers(
            self._make, slots=1, fewest=number, most=number, idle_seconds=1e9
        )
        self.watched = WatchedWorkers(
            self.workers,
            up=Worker.up,
            end=lambda worker: setattr(worker, "ended", True),
            renew=Worker.renew,
            look_seconds=0.0,
        )
        self.watched.silent_seconds = 0.0

    def _make(self, number: int) -> Worker:
        self.made.append(Worker(number))
        return self.made[-1]

    def ask(self, preferred: Place[Worker] | None = None) -> asyncio.Task[tuple[int, int] | None]:
        return asyncio.create_task(self.watched.call(Worker.send, preferred=preferred))

    async def open(self) -> None:
        self.watched.open()
        await until(lambda: self.workers.up == len(self.made))


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 (the loop's own turns are what is waited for)
            await asyncio.sleep(0)


@pytest.fixture
async def two() -> Any:
    pool = Pool(2)
    await pool.open()
    yield pool
    pool.watched.close()


async def test_a_call_of_a_silent_worker_is_made_at_one_that_answers(two: Pool) -> None:
    first, second = two.made
    asked = two.ask()
    await until(lambda: first.calls or second.calls)
    silent, other = (first, second) if first.calls else (second, first)
    silent.there.clear()
    await until(lambda: other.calls)
    assert silent.cancelled == 1
    other.calls[0].set_result(7)
    assert await asked == (other.number, 7)
    assert (two.workers.up, two.workers.in_flight) == (1, 0)
    # It was given up on, and is started anew, once.
    await until(lambda: silent.renewed)
    silent.error = None
    await until(lambda: two.workers.up == 2)
    assert (silent.renewed, other.renewed) == (1, 0)


async def test_a_stop_of_this_process_silences_nobody(two: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers that were on their way would be late at once, each worker started anew for the other's sake."""
    two.watched.silent_seconds = 60.0
    loop = asyncio.get_running_loop()
    now, stopped = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: now() + stopped)

    async def looked(more: int = 1) -> None:
        begun = [worker.looks for worker in two.made]
        await until(lambda: all(each.looks >= begun[i] + more for i, each in enumerate(two.made)))

    await looked(2)
    for worker in two.made:
        worker.there.clear()
    for _ in range(50):
        await asyncio.sleep(0)
    stopped = 90.0
    for _ in range(50):
        await asyncio.sleep(0)
    assert two.workers.up == 2
    two.made[0].there.set()
    # The other one is really silent, for a time in which this process runs.
    for _ in range(SILENT_PARTS):
        stopped += 60.0
        for _ in range(50):
            await asyncio.sleep(0)
    await until(lambda: two.made[1].renewed)
    assert two.made[0].renewed == 0


async def test_one_that_has_not_come_up_yet_is_left_to_come(two: Pool) -> None:
    late = Worker(2)
    late.there.clear()
    place = Place(late, 2, 0.0)
    two.watched.watch(place)
    looks = two.made[0].looks
    await until(lambda: two.made[0].looks > looks + 20)
    assert (late.looks, late.renewed, place.up) == (1, 0, False)


async def test_a_call_stays_where_it_is_while_nobody_else_answers(two: Pool) -> None:
    asked = two.ask()
    await until(lambda: any(worker.calls for worker in two.made))
    (holder,) = (worker for worker in two.made if worker.calls)
    for left, worker in ((1, next(worker for worker in two.made if worker is not holder)), (0, holder)):
        worker.there.clear()
        await until(lambda left=left: two.workers.up == left)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (holder.cancelled, holder.renewed) == (0, 0)
    holder.calls[0].set_result(1)
    assert await asked == (holder.number, 1)


async def test_a_call_that_silences_every_worker_is_given_up() -> None:
    pool = Pool(MOST_SENDS + 1)
    await pool.open()
    asked = pool.ask()
    for sends in range(1, MOST_SENDS + 1):
        await until(lambda sends=sends: sum(len(worker.calls) for worker in pool.made) == sends)
        for worker in pool.made:
            if worker.calls:
                worker.there.clear()
    assert await asked is None
    assert pool.workers.up == 1
    pool.watched.close()


async def test_one_that_cannot_be_asked_comes_back_and_one_that_is_lost_does_not(two: Pool) -> None:
    away, gone = two.made
    away.error = Away("restarting")
    await until(lambda: two.workers.up == 1)
    away.error = None
    await until(lambda: two.workers.up == 2)
    gone.error = Gone()
    await until(lambda: len(two.workers.places) == 1)
    looks = gone.looks
    await until(lambda: away.looks > looks + 5)
    assert gone.looks == looks


async def test_calls_of_a_worker_out_of_reach_are_made_at_the_other_and_none_is_spent_on_it(two: Pool) -> None:
    first, second = two.made
    asked = two.ask()
    await until(lambda: first.calls or second.calls)
    lost, other = (first, second) if first.calls else (second, first)
    lost.there.clear()
    lost.calls[0].set_exception(Away("its node does not answer"))
    await until(lambda: other.calls)
    # The one slot that answers is taken: whoever asks now waits, and is not given to the one that does not.
    more = [two.ask() for _ in range(MOST_SENDS)]
    await until(lambda: two.workers.waiting == MOST_SENDS)
    assert (len(lost.calls), two.workers.in_flight) == (1, 1)
    for index, call in enumerate([asked, *more]):
        await until(lambda index=index: len(other.calls) > index)
        other.calls[index].set_result(index)
        assert await call == (other.number, index)
    assert len(lost.calls) == 1
    lost.there.set()
    await until(lambda: two.workers.up == 2)


async def test_a_call_waits_where_every_worker_is_out_of_reach_and_fails_where_it_is_the_cause() -> None:
    pool = Pool(1)
    await pool.open()
    (worker,) = pool.made
    asked = pool.ask()
    for sends in range(1, MOST_SENDS + 1):
        await until(lambda sends=sends: len(worker.calls) == sends)
        worker.there.clear()
        worker.calls[-1].set_exception(Away("restarting"))
        await until(lambda: not pool.workers.up)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(worker.calls) == sends
        worker.there.set()
    assert await asked is None
    assert pool.workers.in_flight == 0
    pool.watched.close()


async def test_the_last_worker_lost_tells_its_cause_to_whoever_waits() -> None:
    pool = Pool(1)
    worker_there = asyncio.create_task(pool.watched.call(Worker.send))
    pool.watched.open()
    await until(lambda: pool.made and pool.made[0].calls)
    waiting = pool.ask()
    await until(lambda: pool.workers.waiting == 1)
    pool.made[0].error = Gone()
    pool.made[0].error.__cause__ = ValueError("no memory")
    with pytest.raises(ValueError, match="no memory"):
        await waiting
    pool.made[0].calls[0].set_result(1)
    assert await worker_there == (0, 1)
    pool.watched.close()


async def test_the_slot_of_a_cancelled_call_is_taken_until_its_answer_and_drained(two: Pool) -> None:
    asked = two.ask()
    await until(lambda: any(worker.calls for worker in two.made))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    (holder,) = (worker for worker in two.made if worker.calls)
    assert (two.workers.in_flight, holder.cancelled) == (1, 0)
    draining = asyncio.create_task(two.watched.drain(20))
    await asyncio.sleep(0)
    holder.calls[0].set_exception(ValueError("nobody reads this"))
    await draining
    assert two.workers.in_flight == 0


async def test_a_place_beside_the_workers_is_preferred_while_it_is_up(two: Pool) -> None:
    beside = Place(Worker(9), -1, 0.0)
    two.watched.watch(beside)
    await until(lambda: beside.up)
    asked, again = two.ask(beside), two.ask(beside)
    await until(lambda: len(beside.worker.calls) == 2)
    assert (beside.calls, two.workers.in_flight) == (2, 0)
    beside.worker.calls[0].set_result(3)
    assert await asked == (9, 3)
    beside.worker.there.clear()
    await until(lambda: any(worker.calls for worker in two.made))
    (other,) = (worker for worker in two.made if worker.calls)
    other.calls[0].set_result(4)
    assert await again == (other.number, 4)
    assert beside.calls == 0


async def test_the_error_of_a_call_is_its_callers(two: Pool) -> None:
    asked = two.ask()
    await until(lambda: any(worker.calls for worker in two.made))
    (holder,) = (worker for worker in two.made if worker.calls)
    holder.calls[0].set_exception(ValueError("the budget is spent"))
    with pytest.raises(ValueError, match="the budget is spent"):
        await asked
    assert two.workers.in_flight == 0

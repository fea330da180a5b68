"""Health checks and retries of a pool of workers, without Ray."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import (
    ADJUST_SECONDS,
    MAX_ATTEMPTS,
    TIMEOUT_PARTS,
    MonitoredWorkers,
    PendingCall,
    WorkerLost,
    WorkerUnavailable,
)
from tests.support.turns import LoopClock, outcome, yield_turns, yield_until


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

    def restart(self) -> None:
        self.renewed += 1
        self.error = WorkerUnavailable("restarting")
        self.there.set()

    def send(self) -> PendingCall[int, int]:
        call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.calls.append(call)

        def cancel() -> None:
            self.cancelled += 1

        return PendingCall(self.number, call, cancel)


class Pool:
    """Workers with one slot each, unresponsive the moment they do not answer."""

    def __init__(self, number: int, max_workers: int = 0) -> None:
        self.made: list[Worker] = []
        self.fails: Exception | None = None
        self.workers: ElasticWorkers[Worker] = ElasticWorkers(
            self._make, slots=1, min_workers=number, max_workers=max_workers or number, idle_seconds=1e9
        )
        self.watched = MonitoredWorkers(
            self.workers,
            up=Worker.up,
            end=lambda worker: setattr(worker, "ended", True),
            restart=Worker.restart,
            ping_seconds=0.0,
        )
        self.watched.timeout_seconds = 0.0

    def _make(self, number: int) -> Worker:
        if self.fails is not None:
            raise self.fails
        self.made.append(Worker(number))
        return self.made[-1]

    def ask(self, preferred: PooledWorker[Worker] | None = None, **how: Any) -> asyncio.Task[tuple[int, int] | None]:
        return asyncio.create_task(self.watched.call(Worker.send, preferred=preferred, **how))

    async def open(self) -> None:
        self.watched.open()
        await yield_until(lambda: self.workers.up == len(self.made))

    async def holder(self) -> tuple[Worker, Worker]:
        """The one of two that has a call, and the other."""
        await yield_until(lambda: any(worker.calls for worker in self.made))
        first, second = self.made
        return (first, second) if first.calls else (second, first)


@pytest.fixture
async def two() -> AsyncIterator[Pool]:
    pool = Pool(2)
    await pool.open()
    yield pool
    pool.watched.close()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    return LoopClock(monkeypatch)


async def test_a_call_of_an_unresponsive_worker_is_retried_at_one_that_answers(two: Pool) -> None:
    asked = two.ask()
    stuck, other = await two.holder()
    stuck.there.clear()
    await yield_until(lambda: other.calls)
    assert stuck.cancelled == 1
    other.calls[0].set_result(7)
    assert await outcome(asked) == (other.number, 7)
    assert (two.workers.up, two.workers.in_flight) == (1, 0)
    # It was abandoned and restarted, once.
    await yield_until(lambda: stuck.renewed)
    stuck.error = None
    await yield_until(lambda: two.workers.up == 2)
    assert (stuck.renewed, other.renewed) == (1, 0)


async def test_a_pause_of_this_process_makes_no_worker_unresponsive(two: Pool, clock: LoopClock) -> None:
    """Otherwise all answers would be late at once, and every worker would be restarted."""
    two.watched.timeout_seconds = 60.0
    # What was begun with no such time.
    await clock.pass_(0)
    for worker in two.made:
        worker.there.clear()
    await yield_turns(50)
    await clock.pass_(90)
    assert two.workers.up == 2
    two.made[0].there.set()
    # The other one is really unresponsive, while this process runs.
    for _ in range(TIMEOUT_PARTS):
        await clock.pass_(60)
    assert (two.made[0].renewed, two.made[1].renewed) == (0, 1)


async def test_a_worker_is_unresponsive_after_the_timeout(two: Pool, clock: LoopClock) -> None:
    two.watched.timeout_seconds, two.watched.ping_seconds = 60.0, 5.0
    first, second = two.made
    await yield_turns(50)
    looks = second.looks
    first.there.clear()
    await clock.pass_(4.9)
    assert second.looks == looks
    await clock.pass_(0.1)
    assert second.looks == looks + 1
    # Its look began now, and is waited for in parts.
    for _ in range(TIMEOUT_PARTS - 1):
        await clock.pass_(60 / TIMEOUT_PARTS)
    await clock.pass_(60 / TIMEOUT_PARTS - 0.1)
    assert (two.workers.up, first.renewed) == (2, 0)
    await clock.pass_(0.1)
    assert (two.workers.up, first.renewed, second.renewed) == (1, 1, 0)
    await clock.pass_(5)
    first.error = None
    await clock.pass_(5)
    assert (two.workers.up, first.renewed) == (2, 1)


async def test_one_that_has_not_come_up_yet_is_left_to_come(two: Pool) -> None:
    late = Worker(2)
    late.there.clear()
    place = PooledWorker(late, 2, 0.0)
    two.watched.monitor(place)
    looks = two.made[0].looks
    await yield_until(lambda: two.made[0].looks > looks + 20)
    assert (late.looks, late.renewed, place.up) == (1, 0, False)


async def test_a_call_stays_where_it_is_while_nobody_else_answers(two: Pool) -> None:
    asked = two.ask()
    holder, _ = await two.holder()
    for left, worker in ((1, next(worker for worker in two.made if worker is not holder)), (0, holder)):
        worker.there.clear()
        await yield_until(lambda left=left: two.workers.up == left)
    await yield_turns(20)
    assert (holder.cancelled, holder.renewed) == (0, 0)
    holder.calls[0].set_result(1)
    assert await outcome(asked) == (holder.number, 1)


async def test_a_call_that_makes_every_worker_unresponsive_fails() -> None:
    pool = Pool(MAX_ATTEMPTS + 1)
    await pool.open()
    asked = pool.ask()
    for attempts in range(1, MAX_ATTEMPTS + 1):
        await yield_until(lambda attempts=attempts: sum(len(worker.calls) for worker in pool.made) == attempts)
        for worker in pool.made:
            if worker.calls:
                worker.there.clear()
    assert await outcome(asked) is None
    assert pool.workers.up == 1
    pool.watched.close()


async def test_an_unavailable_worker_comes_back_and_a_lost_one_does_not(two: Pool) -> None:
    away, gone = two.made
    away.error = WorkerUnavailable("restarting")
    await yield_until(lambda: two.workers.up == 1)
    away.error = None
    await yield_until(lambda: two.workers.up == 2)
    gone.error = WorkerLost()
    await yield_until(lambda: len(two.workers.pooled) == 1)
    looks = gone.looks
    await yield_until(lambda: away.looks > looks + 5)
    assert gone.looks == looks


async def test_calls_of_a_worker_out_of_reach_are_made_at_the_other_and_none_is_spent_on_it(
    two: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    asked = two.ask()
    lost, other = await two.holder()
    lost.there.clear()
    lost.calls[0].set_exception(WorkerUnavailable("its node does not answer"))
    await yield_until(lambda: other.calls)
    # The one slot that answers is taken: whoever asks now waits, and is not given to the one that does not.
    more = [two.ask() for _ in range(MAX_ATTEMPTS)]
    await yield_until(lambda: two.workers.waiting == MAX_ATTEMPTS)
    assert (len(lost.calls), two.workers.in_flight) == (1, 1)
    for index, call in enumerate([asked, *more]):
        await yield_until(lambda index=index: len(other.calls) > index)
        other.calls[index].set_result(index)
        assert await outcome(call) == (other.number, index)
    assert len(lost.calls) == 1
    assert caplog.messages == [f"worker {lost.number} cannot be reached: its node does not answer"]
    lost.there.set()
    await yield_until(lambda: two.workers.up == 2)


async def test_a_call_waits_where_every_worker_is_out_of_reach_and_fails_where_it_is_the_cause() -> None:
    pool = Pool(1)
    await pool.open()
    (worker,) = pool.made
    asked = pool.ask()
    for attempts in range(1, MAX_ATTEMPTS + 1):
        await yield_until(lambda attempts=attempts: len(worker.calls) == attempts)
        worker.there.clear()
        worker.calls[-1].set_exception(WorkerUnavailable("restarting"))
        await yield_until(lambda: not pool.workers.up)
        await yield_turns(20)
        assert len(worker.calls) == attempts
        worker.there.set()
    assert await outcome(asked) is None
    assert pool.workers.in_flight == 0
    pool.watched.close()


async def test_the_last_worker_lost_tells_its_cause_to_whoever_waits() -> None:
    pool = Pool(1)
    worker_there = asyncio.create_task(pool.watched.call(Worker.send))
    pool.watched.open()
    await yield_until(lambda: pool.made and pool.made[0].calls)
    waiting = pool.ask()
    await yield_until(lambda: pool.workers.waiting == 1)
    pool.made[0].error = WorkerLost()
    pool.made[0].error.__cause__ = ValueError("no memory")
    with pytest.raises(ValueError, match="no memory"):
        await outcome(waiting)
    pool.made[0].calls[0].set_result(1)
    assert await outcome(worker_there) == (0, 1)
    pool.watched.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_slot_of_a_cancelled_call_is_taken_until_its_answer_and_drained(
    two: Pool, cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked = two.ask()
    await yield_until(lambda: any(worker.calls for worker in two.made))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    (holder,) = (worker for worker in two.made if worker.calls)
    assert (two.workers.in_flight, holder.cancelled) == (1, 0)
    draining = asyncio.create_task(two.watched.drain(20))
    await asyncio.sleep(0)
    assert not draining.done()
    if cancelled:
        holder.calls[0].cancel()
    else:
        holder.calls[0].set_exception(ValueError("nobody reads this"))
    await outcome(draining)
    assert two.workers.in_flight == 0
    assert not two.watched._calls
    # Nor does asyncio complain that nobody has.
    del asked, draining
    holder.calls.clear()
    gc.collect()
    assert caplog.messages == []


async def test_a_place_beside_the_workers_is_preferred_while_it_is_up(two: Pool) -> None:
    beside = PooledWorker(Worker(9), -1, 0.0)
    two.watched.monitor(beside)
    await yield_until(lambda: beside.up)
    asked, again = two.ask(beside), two.ask(beside)
    await yield_until(lambda: len(beside.worker.calls) == 2)
    assert (beside.calls, two.workers.in_flight) == (2, 0)
    beside.worker.calls[0].set_result(3)
    assert await outcome(asked) == (9, 3)
    beside.worker.there.clear()
    await yield_until(lambda: any(worker.calls for worker in two.made))
    (other,) = (worker for worker in two.made if worker.calls)
    other.calls[0].set_result(4)
    assert await outcome(again) == (other.number, 4)
    assert beside.calls == 0


async def test_the_error_of_a_call_is_its_callers(two: Pool) -> None:
    asked = two.ask()
    holder, _ = await two.holder()
    holder.calls[0].set_exception(ValueError("the budget is spent"))
    with pytest.raises(ValueError, match="the budget is spent"):
        await outcome(asked)
    assert two.workers.in_flight == 0


async def test_the_lowest_rank_is_called_first_and_a_call_that_names_none_has_rank_0() -> None:
    pool = Pool(1)
    await pool.open()
    asked = [pool.ask()]
    await yield_until(lambda: pool.made[0].calls)
    asked += [pool.ask(rank=1), pool.ask(), pool.ask(rank=-1), pool.ask(rank=0)]
    answered: list[int] = []
    for index in range(len(asked)):
        await yield_until(lambda index=index: len(pool.made[0].calls) > index)
        pool.made[0].calls[index].set_result(0)
        await yield_turns(5)
        answered += [number for number, call in enumerate(asked) if call.done() and number not in answered]
    assert answered == [0, 3, 2, 4, 1]
    pool.watched.close()


async def test_a_worker_that_answers_but_not_well_rests_while_the_other_takes_the_calls(two: Pool) -> None:
    asked = two.ask(ok=lambda answer: answer > 0)
    bad, good = await two.holder()
    bad.calls[0].set_result(0)
    assert await outcome(asked) == (bad.number, 0)
    for index in range(3):
        again = two.ask(ok=lambda answer: answer > 0)
        await yield_until(lambda index=index: len(good.calls) > index)
        good.calls[index].set_result(1)
        assert await outcome(again) == (good.number, 1)
    # Where nobody says what is ok, every answer is.
    for index in range(2):
        again = two.ask()
        await yield_until(lambda index=index: len(good.calls) > 3 + index)
        good.calls[3 + index].set_result(0)
        await outcome(again)
    assert len(bad.calls) == 1


async def test_a_call_is_given_to_no_more_workers_than_it_may(two: Pool) -> None:
    asked = two.ask(attempts=1)
    holder, other = await two.holder()
    holder.calls[0].set_exception(WorkerUnavailable("restarting"))
    assert await outcome(asked) is None
    assert (holder.cancelled, other.calls) == (1, [])


async def test_a_call_whose_answer_was_cancelled_under_it_raises_that(two: Pool) -> None:
    asked = two.ask()
    holder, other = await two.holder()
    holder.calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await outcome(asked)
    assert (other.calls, two.workers.in_flight) == ([], 0)


async def test_draining_waits_no_longer_than_it_may(two: Pool, clock: LoopClock) -> None:
    asked = two.ask()
    holder, _ = await two.holder()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    draining = asyncio.create_task(two.watched.drain(20))
    await yield_turns(5)
    await clock.pass_(19.9)
    assert not draining.done()
    await clock.pass_(0.1)
    await outcome(draining)
    # Should the answer come after all, its slot is free then.
    assert two.workers.in_flight == 1
    holder.calls[0].set_result(1)
    await yield_until(lambda: two.workers.in_flight == 0)


async def test_workers_come_with_the_calls_and_one_that_is_not_needed_is_ended(
    clock: LoopClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = Pool(1, max_workers=2)
    # That nothing was begun is no reason to fail.
    pool.watched.close()
    await pool.open()
    assert caplog.messages == ["workers: 0 up, 1 requested, 0 calls in flight, 0 waiting"]
    asked = [pool.ask() for _ in range(3)]
    await clock.pass_(ADJUST_SECONDS - 0.1)
    assert len(pool.made) == 1
    await clock.pass_(0.1)
    assert [len(worker.calls) for worker in pool.made] == [1, 1]
    assert caplog.messages[1:] == ["workers: 1 up, 2 requested, 1 calls in flight, 2 waiting"]
    first, second = pool.made
    for worker in (first, second, first):
        worker.calls[-1].set_result(1)
        await yield_turns(5)
    assert [await outcome(call) for call in asked] == [(0, 1), (1, 1), (0, 1)]
    pool.workers._idle_seconds = 0.0
    await clock.pass_(ADJUST_SECONDS)
    assert (first.ended, second.ended) == (False, True)
    looks = second.looks
    await clock.pass_(ADJUST_SECONDS)
    assert second.looks == looks
    # Nothing came or went: nothing is said.
    assert caplog.messages[2:] == ["workers: 1 up, 1 requested, 0 calls in flight, 0 waiting"]
    pool.watched.close()
    looks = first.looks
    waiting = [pool.ask() for _ in range(2)]
    await clock.pass_(ADJUST_SECONDS)
    assert (first.looks, len(pool.made)) == (looks, 2)
    for call in waiting:
        await yield_until(lambda: not first.calls[-1].done())
        first.calls[-1].set_result(1)
        await outcome(call)


async def test_workers_that_cannot_be_adjusted_now_are_adjusted_later(
    clock: LoopClock, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool(1, max_workers=2)
    await pool.open()
    asked = [pool.ask() for _ in range(2)]
    pool.fails = RuntimeError("the head is away")
    await clock.pass_(ADJUST_SECONDS)
    assert caplog.messages == ["the number of workers could not be adjusted"]
    assert "the head is away" in caplog.text
    pool.fails = None
    await clock.pass_(ADJUST_SECONDS)
    assert [len(worker.calls) for worker in pool.made] == [1, 1]
    for worker in pool.made:
        worker.calls[0].set_result(1)
    # The one that did not start has used up its number.
    assert [await outcome(call) for call in asked] == [(0, 1), (2, 1)]
    pool.watched.close()


async def test_an_unresponsive_unavailable_or_lost_worker_is_logged_once_on_one_line(
    two: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second = two.made
    first.error = WorkerUnavailable("its node\ndoes not answer" + " at all" * 100)
    await yield_until(lambda: two.workers.up == 1)
    await yield_turns(50)
    assert caplog.messages == [f"worker 0 cannot be reached: {('its node does not answer' + ' at all' * 100)[:300]}"]
    first.error = None
    await yield_until(lambda: two.workers.up == 2)
    first.there.clear()
    await yield_until(lambda: first.renewed)
    assert caplog.messages[1:] == ["worker 0 does not answer", "worker 0 is restarted"]
    second.error = WorkerLost("ended\nby Ray" + "!" * 400)
    await yield_until(lambda: len(two.workers.pooled) == 1)
    assert caplog.messages[3:] == [f"worker 1 is lost: {('ended by Ray' + '!' * 400)[:300]}"]
    first.error = None
    await yield_until(lambda: two.workers.up == 1)
    first.error = WorkerLost()
    first.error.__cause__ = MemoryError("killed")
    await yield_until(lambda: not two.workers.pooled)
    assert caplog.messages[4:] == ["worker 0 is lost: killed"]

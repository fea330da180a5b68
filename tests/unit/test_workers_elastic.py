"""Workers come with the calls that wait, and go when nobody needs them; nothing of Ray is in it."""

from __future__ import annotations

import asyncio

import pytest

from draco_ray.workers.elastic import ElasticWorkers, PooledWorker, fixed_workers

IDLE = 60.0


class Pool:
    """Three slots a worker, two to four of them, and a clock that is set by hand."""

    def __init__(self, min_workers: int = 2, max_workers: int = 4) -> None:
        self.now = 1000.0
        self.workers: ElasticWorkers[str] = ElasticWorkers(
            "worker-{}".format,
            slots=3,
            min_workers=min_workers,
            max_workers=max_workers,
            idle_seconds=IDLE,
            clock=lambda: self.now,
        )
        self.calls: list[asyncio.Task[PooledWorker[str]]] = []

    async def call(self, number: int) -> None:
        """So many calls that stay under way."""
        self.calls += [asyncio.create_task(self.workers.acquire()) for _ in range(number)]
        await asyncio.sleep(0)

    def bring_up(self) -> None:
        for place in self.workers.adjust()[0]:
            self.workers.mark_up(place)

    def end_all_calls(self) -> None:
        for call in self.calls:
            self.workers.release(call.result())
        self.calls.clear()

    async def given(self) -> list[str]:
        """Who was given the calls that have a slot, in the order they came."""
        await asyncio.sleep(0)
        return [call.result().worker for call in self.calls if call.done()]

    @property
    def names(self) -> list[str]:
        return [place.worker for place in self.workers.pooled]


async def test_the_fewest_are_asked_for_at_once_and_calls_wait_for_the_first_that_is_up() -> None:
    pool = Pool()
    come, gone = pool.workers.adjust()
    assert [place.worker for place in come] == ["worker-0", "worker-1"]
    assert gone == []
    await pool.call(2)
    assert await pool.given() == []
    assert pool.workers.waiting == 2
    pool.workers.mark_up(come[1])
    assert await pool.given() == ["worker-1", "worker-1"]
    assert (pool.workers.waiting, pool.workers.in_flight, pool.workers.up) == (0, 2, 1)


async def test_calls_beyond_the_room_bring_workers_up_to_the_most() -> None:
    pool = Pool()
    pool.bring_up()
    await pool.call(6)
    assert sorted(await pool.given()) == ["worker-0"] * 3 + ["worker-1"] * 3
    assert pool.workers.adjust() == ([], [])
    await pool.call(1)
    assert pool.workers.wanted == 3
    (third,) = pool.workers.adjust()[0]
    # It is asked for once, however long its node takes.
    assert pool.workers.adjust() == ([], [])
    await pool.call(50)
    assert len(pool.workers.adjust()[0]) == 1
    assert len(pool.names) == 4
    pool.workers.mark_up(third)
    assert (await pool.given())[6:] == ["worker-2"] * 3


async def test_the_fewest_share_evenly_and_a_younger_one_takes_what_they_cannot() -> None:
    pool = Pool()
    pool.bring_up()
    await pool.call(7)
    pool.bring_up()
    assert await pool.given() == ["worker-0", "worker-1"] * 3 + ["worker-2"]
    pool.workers.release(pool.calls[0].result())
    await pool.call(1)
    assert (await pool.given())[-1] == "worker-0"


async def test_an_idle_worker_goes_after_its_time_and_the_fewest_stay() -> None:
    pool = Pool()
    pool.bring_up()
    await pool.call(12)
    pool.bring_up()
    assert len(await pool.given()) == 12
    pool.workers.adjust()
    pool.end_all_calls()
    pool.now += IDLE - 1
    assert pool.workers.adjust() == ([], [])
    pool.now += 1
    assert [place.worker for place in pool.workers.adjust()[1]] == ["worker-3", "worker-2"]
    pool.now += 10 * IDLE
    assert pool.workers.adjust() == ([], [])
    assert pool.names == ["worker-0", "worker-1"]


async def test_a_worker_with_a_call_does_not_go() -> None:
    pool = Pool()
    pool.bring_up()
    await pool.call(7)
    pool.bring_up()
    kept = (await pool.given()).index("worker-2")
    for index, call in enumerate(pool.calls):
        if index != kept:
            pool.workers.release(call.result())
    pool.now += 10 * IDLE
    pool.workers.adjust()
    assert "worker-2" in pool.names
    pool.workers.release(pool.calls[kept].result())
    pool.now += IDLE
    assert [place.worker for place in pool.workers.adjust()[1]] == ["worker-2"]


async def test_a_load_that_comes_back_in_time_keeps_its_workers() -> None:
    pool = Pool()
    pool.bring_up()
    for _ in range(5):
        await pool.call(9)
        pool.bring_up()
        await pool.given()
        pool.workers.adjust()
        pool.end_all_calls()
        pool.now += IDLE / 2
        assert pool.workers.adjust()[1] == []
    assert pool.names == ["worker-0", "worker-1", "worker-2"]


async def test_a_worker_that_never_came_holds_nothing_up_and_goes_first() -> None:
    pool = Pool(min_workers=1)
    pool.bring_up()
    await pool.call(9)
    second, _third = pool.workers.adjust()[0]
    # Every call is answered by the one that is up.
    for _ in range(3):
        await asyncio.sleep(0)
        done = [call for call in pool.calls if call.done()]
        assert {call.result().worker for call in done} == {"worker-0"}
        for call in done:
            pool.workers.release(call.result())
            pool.calls.remove(call)
    assert pool.calls == []
    pool.workers.mark_up(second)
    pool.now += 2 * IDLE
    assert [place.worker for place in pool.workers.adjust()[1]] == ["worker-2", "worker-1"]


async def test_calls_of_a_silent_worker_are_given_up_once_another_answers() -> None:
    pool = Pool()
    one, other = pool.workers.adjust()[0]
    pool.workers.mark_up(one)
    await pool.call(1)
    await pool.given()
    pool.workers.mark_down(one)
    # There is nobody else to ask.
    assert not one.abandoned.is_set()
    await pool.call(1)
    assert pool.workers.waiting == 1
    pool.workers.mark_up(other)
    assert one.abandoned.is_set()
    assert (await pool.given())[-1] == "worker-1"
    pool.workers.mark_up(one)
    assert not one.abandoned.is_set()


async def test_a_slot_is_not_lost_to_a_caller_that_gave_up() -> None:
    pool = Pool(min_workers=1, max_workers=1)
    (place,) = pool.workers.adjust()[0]
    await pool.call(3)
    patient = asyncio.create_task(pool.workers.acquire())
    await asyncio.sleep(0)
    # One before it is served, one at the very moment.
    pool.calls[0].cancel()
    await asyncio.sleep(0)
    pool.workers.mark_up(place)
    pool.calls[1].cancel()
    assert (await patient).worker == "worker-0"
    await asyncio.gather(*pool.calls, return_exceptions=True)
    assert place.calls == 2


async def test_the_last_worker_lost_for_good_is_told_to_whoever_waits() -> None:
    pool = Pool()
    one, other = pool.workers.adjust()[0]
    await pool.call(1)
    pool.workers.mark_lost(one, RuntimeError("no such prompt"))
    assert not pool.calls[0].done()
    # What took one would take the next as well: it is asked for later.
    assert pool.workers.adjust() == ([], [])
    pool.workers.mark_lost(other, RuntimeError("no such prompt"))
    with pytest.raises(RuntimeError, match="no such prompt"):
        await pool.calls[0]
    pool.now += IDLE
    assert [place.worker for place in pool.workers.adjust()[0]] == ["worker-2", "worker-3"]


async def test_later_phases_of_a_group_go_before_new_groups() -> None:
    pool = Pool(min_workers=1, max_workers=1)
    pool.bring_up()
    await pool.call(3)
    order: list[str] = []

    async def wait(name: str, rank: int) -> None:
        place = await pool.workers.acquire(rank)
        order.append(name)
        pool.workers.release(place)

    names = [("stage1 a", 0), ("stage1 b", 0), ("credit", -5), ("score", -4), ("credit late", -5)]
    waiting = [asyncio.create_task(wait(name, rank)) for name, rank in names]
    await asyncio.sleep(0)
    assert pool.workers.waiting == 5
    pool.workers.release(pool.calls[0].result())
    await asyncio.gather(*waiting)
    assert order == ["credit", "credit late", "score", "stage1 a", "stage1 b"]


async def test_workers_that_stand_share_calls_evenly_and_one_can_be_had_at_once_whatever_is_up() -> None:
    workers = fixed_workers(2, slots=1)
    assert [workers.acquire_nowait().worker for _ in range(2)] == [0, 1]
    # No slot is free: what cannot wait has the one with the min_workers calls all the same.
    assert workers.acquire_nowait().worker == 0
    first, second = workers.pooled
    workers.release(first)
    workers.release(first)
    workers.mark_down(first)
    workers.release(second)
    assert workers.acquire_nowait() is second
    workers.release(second)
    workers.mark_down(second)
    assert workers.acquire_nowait() is first

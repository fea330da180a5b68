"""Slots go to the rollouts that come first in the step."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from draco_ray.records import EpisodeEnd, Termination
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.pool import RolloutPool, SlotQueue
from draco_ray.summaries import RolloutSummary


async def test_free_slots_are_handed_out_at_once_and_alternate_over_workers() -> None:
    queue = SlotQueue([("a", 2), ("b", 2)])
    assert [await queue.acquire(0) for _ in range(4)] == ["a", "b", "a", "b"]


async def test_the_lowest_priority_number_is_served_first_then_the_earliest() -> None:
    queue = SlotQueue([("a", 1)])
    await queue.acquire(0)
    served: list[str] = []

    async def wait(priority: int, name: str) -> None:
        worker = await queue.acquire(priority)
        served.append(name)
        queue.release(worker)

    tasks = []
    for priority, name in [(9, "late"), (1, "first"), (1, "second"), (0, "urgent")]:
        tasks.append(asyncio.create_task(wait(priority, name)))
        await asyncio.sleep(0)
    assert queue.waiting == 4
    queue.release("a")
    await asyncio.gather(*tasks)
    assert served == ["urgent", "first", "second", "late"]


async def test_a_slot_is_not_lost_to_a_waiter_that_gave_up() -> None:
    queue = SlotQueue([("a", 1)])
    await queue.acquire(0)
    gone = asyncio.create_task(queue.acquire(0))
    patient = asyncio.create_task(queue.acquire(1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    queue.release("a")
    assert await patient == "a"


class Up:
    """In the place of a worker's method of that name."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def remote(self) -> None:
        self.worker.looks += 1
        if self.worker.answers is not None:
            raise self.worker.answers


class Worker:
    """In the place of a rollout worker's handle: notes the engine of each rollout, which ends when it is told."""

    def __init__(self) -> None:
        self.engine: dict[int, int] = {}
        self.ends: dict[int, asyncio.Future[RolloutSummary]] = {}
        self.asked = asyncio.Semaphore(0)
        self.looks = 0
        self.answers: RayError | None = None
        """What it answers when it is asked whether it is there."""

    @property
    def up(self) -> Up:
        return Up(self)

    @property
    def rollout(self) -> Worker:
        return self

    def options(self, **_: Any) -> Worker:
        return self

    def remote(self, request: RolloutRequest, engine: int) -> tuple[None, asyncio.Future[RolloutSummary], None]:
        self.engine[request.rollout] = engine
        self.ends[request.rollout] = asyncio.get_running_loop().create_future()
        self.asked.release()
        return None, self.ends[request.rollout], None

    def end(self, rollout: int, ended: EpisodeEnd = EpisodeEnd.FINISHED) -> None:
        self.ends[rollout].set_result(
            RolloutSummary(
                task_id="t",
                rollout=rollout,
                attempt=0,
                ended=ended,
                termination=Termination.SUBMITTED,
                error=None,
                turns=1,
                steps=1,
                prompt_tokens=1,
                sampled_tokens=1,
                seconds_generating=0.0,
                seconds_executing=0.0,
                started_at=0.0,
                ended_at=0.0,
            )
        )


async def test_an_episode_goes_to_the_engine_with_the_fewest_and_stays_there() -> None:
    """One engine for all turns: the worker is told it once. What ends makes room where it was."""
    worker = Worker()
    pool = RolloutPool([(worker, 6)], policies=2, retries=0, seed=0)
    playing = [asyncio.create_task(pool.run("t", "g", rollout, step=0, priority=0)) for rollout in range(4)]
    await asyncio.sleep(0)
    assert [worker.engine[rollout] for rollout in range(4)] == [0, 1, 0, 1]
    for rollout in (1, 3):
        worker.end(rollout)
        await playing[rollout]
    playing += [asyncio.create_task(pool.run("t", "g", rollout, step=0, priority=0)) for rollout in (4, 5)]
    await asyncio.sleep(0)
    assert [worker.engine[rollout] for rollout in (4, 5)] == [1, 1]
    assert pool.in_flight == 4
    for rollout in (0, 2, 4, 5):
        worker.end(rollout)
    await asyncio.gather(*playing)
    assert pool.in_flight == 0


async def test_a_world_that_the_policy_ended_is_a_result_and_a_lost_one_is_played_again() -> None:
    worker = Worker()
    pool = RolloutPool([(worker, 1)], policies=1, retries=2, seed=0)
    for ends, expected in (
        ([EpisodeEnd.CRASHED], EpisodeEnd.CRASHED),
        ([EpisodeEnd.SERVER_ERROR, EpisodeEnd.CRASHED], EpisodeEnd.CRASHED),
        ([EpisodeEnd.SERVER_ERROR] * 3, None),
    ):
        playing = asyncio.create_task(pool.run("t", "g", 0, step=0, priority=0))
        for ended in ends:
            await worker.asked.acquire()
            worker.end(0, ended)
        member = (await playing).member
        assert (member.summary.ended if member is not None else None) is expected
    assert pool.lost == 1


async def test_a_worker_out_of_reach_gets_no_rollout_until_it_answers() -> None:
    away, there = Worker(), Worker()
    pool = RolloutPool([(away, 2), (there, 1)], policies=1, retries=1, seed=0, look_seconds=0.0)
    away.answers = ActorUnavailableError("its node does not answer", b"0" * 16)
    playing = [asyncio.create_task(pool.run("t", "g", rollout, step=0, priority=rollout)) for rollout in range(4)]
    await away.asked.acquire()
    await there.asked.acquire()
    # Its first call fails; its second slot is taken, too, and fails a moment later.
    for rollout in list(away.ends):
        away.ends[rollout].set_exception(away.answers)
    while away.looks < 5:  # noqa: ASYNC110 (the loop's own turns are what is waited for)
        await asyncio.sleep(0)
    # Both, and those that waited, are played at the other, one after the other.
    for _ in range(3):
        (current,) = (rollout for rollout, end in there.ends.items() if not end.done())
        there.end(current)
        await there.asked.acquire()
    assert len(away.ends) == 2
    away.answers = None
    await asyncio.gather(*pool._asking)
    (current,) = (rollout for rollout, end in there.ends.items() if not end.done())
    there.end(current)
    assert [played.member is not None for played in await asyncio.gather(*playing)] == [True] * 4
    assert pool.lost == 0
    # Both slots are handed out again.
    again = [asyncio.create_task(pool.run("t", "h", rollout, step=0, priority=0)) for rollout in (7, 8, 9)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(away.ends) == 4
    for rollout in (7, 8, 9):
        (away if rollout in away.ends else there).end(rollout)
    await asyncio.gather(*again)


async def test_a_worker_that_is_lost_for_good_costs_its_rollouts_and_nobody_waits_for_it() -> None:
    worker = Worker()
    pool = RolloutPool([(worker, 1)], policies=1, retries=1, seed=0, look_seconds=0.0)
    worker.answers = ActorDiedError()
    playing = asyncio.create_task(pool.run("t", "g", 0, step=0, priority=0))
    for _ in range(2):
        await worker.asked.acquire()
        worker.ends[0].set_exception(ActorDiedError())
    played = await playing
    assert (played.member, played.attempts, pool.lost) == (None, 2, 1)

"""Slots go to the rollouts that come first in the step."""

from __future__ import annotations

import asyncio

from draco_ray.actors.pools import SlotQueue


async def test_free_slots_are_handed_out_at_once_and_alternate_over_workers() -> None:
    queue = SlotQueue(["a", "b"], slots_per_worker=2)
    assert [await queue.acquire(0) for _ in range(4)] == ["a", "b", "a", "b"]


async def test_the_lowest_priority_number_is_served_first_then_the_earliest() -> None:
    queue = SlotQueue(["a"], slots_per_worker=1)
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
    queue = SlotQueue(["a"], slots_per_worker=1)
    await queue.acquire(0)
    gone = asyncio.create_task(queue.acquire(0))
    patient = asyncio.create_task(queue.acquire(1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    queue.release("a")
    assert await patient == "a"

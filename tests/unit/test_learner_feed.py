"""The log of commands: order, combined answers, and what happens when workers die."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from draco_ray.errors import LearnerError
from draco_ray.learner.base import Accumulate, Failed, Publish, SaveCheckpoint, Start, Stop, TokenLogprobs, Update
from draco_ray.learner.feed import LearnerFeed
from tests.unit.test_training_metrics import an_update

CANARY = TokenLogprobs(token_ids=(1, 2), adapter=True)


async def submitted(feed: LearnerFeed, command: object) -> asyncio.Task[object]:
    """Submit and let it reach the log."""
    task = asyncio.create_task(feed.submit(command))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return task


async def started(feed: LearnerFeed) -> Start:
    """Where workers begin that may."""
    start = await feed.start()
    assert start is not None
    return start


async def test_every_worker_gets_every_command_in_order() -> None:
    feed = LearnerFeed(workers=2)
    commands = (Publish(version=1), CANARY, Stop())
    tasks = [await submitted(feed, command) for command in commands]
    for rank in range(2):
        assert [await feed.next(position) for position in range(3)] == list(commands)
        for position in range(3):
            await feed.answer(rank, position, ((rank, position),))
    assert await asyncio.gather(*tasks) == [(0, 0), (0, 1), (0, 2)]  # rank 0 speaks for all


async def test_sums_are_added_over_workers() -> None:
    feed = LearnerFeed(workers=2)
    task = await submitted(feed, Accumulate(groups=()))
    await feed.answer(1, 0, ({"valid_tokens": 4.0, "kl": 0.5},))
    assert not task.done()
    await feed.answer(0, 0, ({"valid_tokens": 3.0, "kl": 0.25},))
    assert await task == {"valid_tokens": 7.0, "kl": 0.75}


async def test_an_updates_extremes_are_those_of_any_worker() -> None:
    feed = LearnerFeed(workers=2)
    task = await submitted(feed, Update())
    metrics = an_update(100, kl=0.0)
    await feed.answer(1, 0, (replace(metrics, engine_ratio_min=0.5, engine_ratio_max=2.0),))
    await feed.answer(0, 0, (replace(metrics, engine_ratio_min=0.75, engine_ratio_max=4.0),))
    assert await task == replace(metrics, engine_ratio_min=0.5, engine_ratio_max=4.0)


async def test_a_worker_waits_for_the_next_command() -> None:
    feed = LearnerFeed(workers=1)
    waiting = asyncio.create_task(feed.next(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await submitted(feed, CANARY)
    assert await waiting == CANARY


async def test_new_workers_begin_after_the_last_complete_checkpoint() -> None:
    feed = LearnerFeed(workers=2, resume_from="first", max_failures=1)
    save = SaveCheckpoint(directory="second")
    for command in (Publish(version=1), save, CANARY):
        await submitted(feed, command)
    for rank in range(2):
        await feed.answer(rank, 0, (None,))
    await feed.answer(0, 1, (None,))
    assert await started(feed) == Start(checkpoint="first", position=0)  # one worker has not confirmed
    await feed.answer(1, 1, (None,))
    start = await started(feed)
    assert start.checkpoint == "second"
    assert await feed.next(start.position) == CANARY


async def test_work_after_a_checkpoint_is_done_again_until_it_is_written() -> None:
    feed = LearnerFeed(workers=1, max_failures=1)
    saving = await submitted(feed, SaveCheckpoint(directory="second"))
    task = await submitted(feed, CANARY)
    await feed.answer(0, 1, ("learned meanwhile",))
    assert await task == "learned meanwhile"
    assert not saving.done()
    # A worker that starts now begins before the checkpoint, and what it answers again changes nothing.
    assert (await started(feed)).position == 0
    await feed.answer(0, 0, (None,))
    await saving
    assert (await started(feed)) == Start(checkpoint="second", position=1)
    assert await feed.next(1) == CANARY


async def test_a_repeated_answer_changes_nothing() -> None:
    feed = LearnerFeed(workers=1)
    task = await submitted(feed, CANARY)
    await feed.answer(0, 0, ("first",))
    await feed.answer(0, 0, ("again",))
    assert await task == "first"


async def test_a_command_that_one_worker_could_not_carry_out_raises() -> None:
    feed = LearnerFeed(workers=2)
    task = await submitted(feed, SaveCheckpoint(directory="full-disk"))
    await feed.answer(0, 0, (Failed(message="no space left on device"),))
    await feed.answer(1, 0, (None,))
    with pytest.raises(LearnerError, match="no space left"):
        await task
    assert (await started(feed)).position == 0


async def test_losing_the_workers_for_good_fails_everything_that_waits() -> None:
    feed = LearnerFeed(workers=1)
    task = await submitted(feed, CANARY)
    await feed.fail("workers died 4 times")
    with pytest.raises(LearnerError, match="died 4 times"):
        await task
    with pytest.raises(LearnerError, match="died 4 times"):
        await feed.submit(CANARY)
    assert await feed.next(1) == Stop()


async def test_workers_that_fail_too_often_between_two_checkpoints_are_given_up() -> None:
    feed = LearnerFeed(workers=1, max_failures=1)
    for directory in ("first", "second"):
        start = await started(feed)
        saving = await submitted(feed, SaveCheckpoint(directory=directory))
        await feed.answer(0, start.position, (None,))
        await saving
    await started(feed)
    waiting = await submitted(feed, CANARY)
    await feed.trouble("RuntimeError: out of memory")
    assert await feed.start() is None
    with pytest.raises(LearnerError, match=r"RuntimeError: out of memory; 2 times since the last checkpoint, .*=1"):
        await waiting
    await feed.fail("the learner has stopped")
    with pytest.raises(LearnerError, match="out of memory"):
        await feed.submit(CANARY)

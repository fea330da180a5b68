"""The log of commands: order, combined answers, and what happens when workers die."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.errors import LearnerError
from draco_ray.learner.checkpoint import Snapshot
from draco_ray.learner.command_log import Command, CommandLog, StartPosition


class Writes:
    """A snapshot that is written once the disk is ready."""

    def __init__(self, disk_ready: threading.Event | None = None, error: Exception | None = None) -> None:
        self.disk_ready, self._error = disk_ready, error
        self.written: list[Path] = []

    def write(self, directory: Path) -> None:
        """As `Snapshot.write`."""
        if self.disk_ready is not None:
            assert self.disk_ready.wait(60)
        if self._error is not None:
            raise self._error
        self.written.append(directory)


CANARY = Command("token_logprobs", options={"token_ids": (1, 2), "adapter": True})
WEIGHTS = Command("weights", options={"version": 1})


async def submitted(log: CommandLog, command: Command | None) -> asyncio.Task[list[Any]]:
    """Submit and let it reach the log."""
    task = asyncio.create_task(log.submit(command))
    await asyncio.sleep(0)
    return task


async def asked_to_save(log: CommandLog, directory: str) -> asyncio.Task[None]:
    """Ask for a checkpoint and let the command reach the log."""
    task = asyncio.create_task(log.save(directory))
    await asyncio.sleep(0)
    return task


async def started(log: CommandLog) -> StartPosition:
    """Where workers begin that may."""
    start = await log.start()
    assert start is not None
    return start


async def test_every_worker_gets_every_command_in_order() -> None:
    log = CommandLog(workers=2)
    commands = (WEIGHTS, CANARY, None)
    tasks = [await submitted(log, command) for command in commands]
    for rank in range(2):
        assert [await log.next(position) for position in range(3)] == list(commands)
        for position in range(3):
            await log.finish(rank, position, ((rank, position),))
    assert await asyncio.gather(*tasks) == [[(0, position), (1, position)] for position in range(3)]


async def test_a_worker_waits_for_the_next_command() -> None:
    log = CommandLog(workers=1)
    waiting = asyncio.create_task(log.next(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await submitted(log, CANARY)
    assert await waiting == CANARY


async def test_new_workers_begin_after_the_last_complete_checkpoint() -> None:
    log = CommandLog(workers=2, resume_from="first", max_failures=1)
    await submitted(log, WEIGHTS)
    saving = await asked_to_save(log, "second")
    await submitted(log, CANARY)
    for rank in range(2):
        await log.finish(rank, 0, (None,))
    await log.finish(0, 1, (Writes(),))
    assert await started(log) == StartPosition(checkpoint="first", position=0)  # one worker has not finished
    await log.finish(1, 1, (None,))
    await saving
    start = await started(log)
    assert start.checkpoint == "second"
    assert await log.next(start.position) == CANARY


async def test_work_after_a_checkpoint_is_done_again_until_it_is_written() -> None:
    log = CommandLog(workers=1, max_failures=1)
    saving = await asked_to_save(log, "second")
    task = await submitted(log, CANARY)
    await log.finish(0, 1, ("learned meanwhile",))
    assert await task == ["learned meanwhile"]
    assert not saving.done()
    # A worker that starts now begins before the checkpoint.
    assert (await started(log)).position == 0
    disk_ready = threading.Event()
    snapshot = Writes(disk_ready)
    await log.finish(0, 0, (snapshot,))
    # While it is written, the result of a worker that has started anew changes nothing.
    await log.finish(0, 0, (Writes(),))
    assert not saving.done()
    disk_ready.set()
    await saving
    assert snapshot.written == [Path("second")]
    assert (await started(log)) == StartPosition(checkpoint="second", position=1)
    assert await log.next(1) == CANARY


async def test_a_repeated_answer_changes_nothing() -> None:
    log = CommandLog(workers=1)
    task = await submitted(log, CANARY)
    await log.finish(0, 0, ("first",))
    await log.finish(0, 0, ("again",))
    assert await task == ["first"]


async def test_a_command_that_one_worker_could_not_carry_out_raises() -> None:
    log = CommandLog(workers=2)
    task = await asked_to_save(log, "full-disk")
    await log.finish(0, 0, (LearnerError("no space left on device"),))
    await log.finish(1, 0, (None,))
    with pytest.raises(LearnerError, match="no space left"):
        await task
    assert (await started(log)).position == 0


async def test_a_checkpoint_that_cannot_be_written_raises_and_workers_begin_before_it() -> None:
    log = CommandLog(workers=1)
    task = await asked_to_save(log, "second")
    await log.finish(0, 0, (Writes(error=OSError(28, "No space left on device")),))
    with pytest.raises(LearnerError, match="checkpoint second: .*No space left"):
        await task
    assert (await started(log)).position == 0


async def test_a_checkpoint_is_read_for_the_workers(tmp_path: Path) -> None:
    log = CommandLog(workers=1)
    snapshot = Snapshot(
        adapter={"a": np.ones(3, np.float32)},
        adapter_config={"r": 1},
        optimizer={"0.step": np.array(2, np.float32), "0.exp_avg": np.zeros(3, np.float32)},
        updates=2,
    )
    task = await asked_to_save(log, str(tmp_path / "step00001"))
    await log.finish(0, 0, (snapshot,))
    await task
    found = await log.read_checkpoint(str(tmp_path / "step00001"))
    assert isinstance(found, Snapshot)
    assert (found.updates, found.adapter_config) == (2, {"r": 1})
    np.testing.assert_array_equal(found.adapter["a"], snapshot.adapter["a"])
    assert not isinstance(await log.read_checkpoint(str(tmp_path / "none")), Snapshot)


async def test_losing_the_workers_for_good_fails_everything_that_waits() -> None:
    log = CommandLog(workers=1)
    task = await submitted(log, CANARY)
    await log.fail("workers died 4 times")
    with pytest.raises(LearnerError, match="died 4 times"):
        await task
    with pytest.raises(LearnerError, match="died 4 times"):
        await log.submit(CANARY)
    assert await log.next(1) is None


async def test_workers_that_fail_too_often_between_two_checkpoints_are_given_up() -> None:
    log = CommandLog(workers=1, max_failures=1)
    for directory in ("first", "second"):
        start = await started(log)
        saving = await asked_to_save(log, directory)
        await log.finish(0, start.position, (Writes(),))
        await saving
    await started(log)
    waiting = await submitted(log, CANARY)
    await log.report_failure("RuntimeError: out of memory")
    assert await log.start() is None
    with pytest.raises(
        LearnerError, match=r"2 times since the last checkpoint \(.*=1\), last: RuntimeError: out of memory"
    ):
        await waiting
    await log.fail("the learner has stopped")
    with pytest.raises(LearnerError, match="out of memory"):
        await log.submit(CANARY)


async def test_the_log_stops_once_its_commands_are_done_and_a_checkpoint_is_written() -> None:
    log = CommandLog(workers=1)
    disk_ready = threading.Event()
    snapshot = Writes(disk_ready)
    saving = await asked_to_save(log, "second")
    stopping = asyncio.create_task(log.stop())
    await asyncio.sleep(0)
    await log.finish(0, 0, (snapshot,))
    assert await log.next(1) is None
    await log.finish(0, 1, (None,))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stopping.done()
    disk_ready.set()
    await asyncio.gather(saving, stopping)
    assert snapshot.written == [Path("second")]


async def test_a_log_whose_workers_are_lost_stops_at_once() -> None:
    log = CommandLog(workers=1)
    await log.fail("workers died 4 times")
    await log.stop()

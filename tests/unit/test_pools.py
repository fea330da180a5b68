"""Rollouts and the workers that play them: who gets a slot, on which policy, and what is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.records import EpisodeEnd, Termination
from draco_ray.rollout import pool as pool_module
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.pool import RolloutPool, RolloutWorkers
from draco_ray.summaries import RolloutSummary
from draco_ray.workers.elastic import BACKOFF_SECONDS, fixed_workers
from tests.support.actor_errors import ASKED_TO_GO, OUT_OF_REACH


class Up:
    """In the place of a worker's method of that name."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def remote(self) -> None:
        self.worker.looks += 1
        if self.worker.silent:
            await asyncio.Event().wait()
        if self.worker.answers is not None:
            raise self.worker.answers


class Stop:
    """The same."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def remote(self) -> None:
        if self.worker.silent:
            await asyncio.Event().wait()
        self.worker.stopped = True


class Worker:
    """In the place of a rollout worker's handle: notes the engine of each rollout, which ends when it is told."""

    def __init__(self) -> None:
        self.engine: dict[int, int] = {}
        self.ends: dict[int, asyncio.Future[RolloutSummary]] = {}
        self.asked = asyncio.Semaphore(0)
        self.looks = 0
        self.silent = False
        self.stopped = False
        self.killed = False
        """As it has to be after it was stopped: its name is free then."""
        self.answers: RayError | None = None
        """What it answers when it is asked whether it is there."""
        self.names: set[str] = set()
        """Other names than the method's that rollouts were asked for under."""

    @property
    def up(self) -> Up:
        return Up(self)

    @property
    def rollout(self) -> Worker:
        return self

    @property
    def stop(self) -> Stop:
        return Stop(self)

    def options(self, name: str) -> Worker:
        self.names.add(name)
        return self

    def remote(self, request: RolloutRequest, engine: int) -> tuple[None, asyncio.Future[RolloutSummary], None]:
        self.engine[request.rollout] = engine
        self.ends[request.rollout] = asyncio.get_running_loop().create_future()
        self.asked.release()
        return None, self.ends[request.rollout], None

    def finish(self, rollout: int, ended: EpisodeEnd = EpisodeEnd.FINISHED) -> None:
        self.ends[rollout].set_result(
            RolloutSummary(
                task_id="t",
                rollout=rollout,
                attempt=0,
                ended=ended,
                termination=Termination.SUBMITTED,
                error=None,
                turns=1,
                sampled_tokens=1,
                started_at=0.0,
                ended_at=0.0,
            )
        )


class Crew:
    """Workers that there are, in the order in which they are asked for, and pools over them."""

    def __init__(self, made: Sequence[Worker], slots: int, each: int, **config: Any) -> None:
        self.made = list(made)
        settings = EnvironmentConfig(slots=slots, slots_per_worker=each, **config)
        self.workers = RolloutWorkers(lambda number: self.made[number], settings)
        self.workers.watched.ping_seconds = 0.0
        self.workers.open()
        self.playing: list[asyncio.Task[Any]] = []

    def pool(self, policies: int = 1, retries: int = 0) -> RolloutPool:
        return RolloutPool(self.workers, fixed_workers(policies, 100), retries, seed=0)


def play(pool: RolloutPool, rollout: int) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.run("t", "g", rollout, step=0, priority=rollout))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not true():  # noqa: ASYNC110 (the loop's own turns are what is waited for)
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that were taken back."""
    calls: list[Any] = []
    monkeypatch.setattr(ray, "cancel", calls.append)
    monkeypatch.setattr(ray, "kill", lambda worker: setattr(worker, "killed", True))
    return calls


async def test_an_episode_goes_to_the_engine_with_the_fewest_and_stays_there() -> None:
    """One engine for all turns: the worker is told it once. What ends makes room where it was."""
    worker = Worker()
    pool = Crew([worker], slots=6, each=6).pool(policies=2)
    playing = [play(pool, rollout) for rollout in range(4)]
    await until(lambda: len(worker.engine) == 4)
    assert [worker.engine[rollout] for rollout in range(4)] == [0, 1, 0, 1]
    for rollout in (1, 3):
        worker.finish(rollout)
        await playing[rollout]
    playing += [play(pool, rollout) for rollout in (4, 5)]
    await until(lambda: len(worker.engine) == 6)
    assert [worker.engine[rollout] for rollout in (4, 5)] == [1, 1]
    assert pool.workers.elastic.in_flight == 4
    for rollout in (0, 2, 4, 5):
        worker.finish(rollout)
    await asyncio.gather(*playing)
    assert pool.workers.elastic.in_flight == 0


async def test_no_more_rollouts_run_than_there_are_slots_and_the_first_of_the_step_come_first() -> None:
    """Three slots on workers of two."""
    made = [Worker(), Worker()]
    pool = Crew(made, slots=3, each=2).pool()
    playing = [play(pool, rollout) for rollout in (9, 2, 1, 4, 3)]
    await until(lambda: sum(len(worker.ends) for worker in made) == 3)
    assert pool.workers.elastic.waiting == 2
    assert {rollout for worker in made for rollout in worker.ends} == {1, 2, 3}
    for rollout in (1, 2, 3, 4, 9):
        await until(lambda: any(rollout in worker.ends for worker in made))  # noqa: B023
        next(worker for worker in made if rollout in worker.ends).finish(rollout)
    await asyncio.gather(*playing)
    assert (pool.workers.elastic.waiting, pool.workers.elastic.in_flight) == (0, 0)


async def test_workers_come_with_the_rollouts_that_wait_and_go_when_they_are_idle() -> None:
    made = [Worker() for _ in range(4)]
    crew = Crew(made, slots=6, each=2, min_slots=2, idle_seconds=1e-6)
    pool = crew.pool()
    assert len(crew.workers.elastic.pooled) == 1
    playing = [play(pool, rollout) for rollout in range(7)]
    await until(lambda: len(made[0].ends) == 2)
    assert pool.workers.elastic.waiting == 5
    crew.workers.watched.adjust()
    # Two more: with six slots there are all that there may be.
    await until(lambda: [len(worker.ends) for worker in made] == [2, 2, 2, 0])
    assert (pool.workers.elastic.in_flight, pool.workers.elastic.waiting) == (6, 1)
    for worker in made[1:3]:
        for rollout in list(worker.ends):
            worker.finish(rollout)
    await until(lambda: pool.workers.elastic.in_flight == 3 and len(made[1].ends) == 3)
    crew.workers.watched.adjust()
    # The one that waited has the place of one that ended; its worker is needed, the other is not.
    await until(lambda: [worker.killed for worker in made] == [False, False, True, False])
    assert made[2].stopped
    assert crew.workers.elastic.up == 2
    for worker in made[:2]:
        for rollout, end in worker.ends.items():
            if not end.done():
                worker.finish(rollout)
    await asyncio.gather(*playing)
    crew.workers.watched.adjust()
    await until(lambda: [worker.killed for worker in made] == [False, True, True, False])
    # At the end the last one goes, and not without having ended what it had started.
    await crew.workers.stop()
    assert (made[0].killed, made[0].stopped) == (True, True)


async def test_a_world_that_the_policy_ended_is_a_result_and_a_lost_one_is_played_again() -> None:
    worker = Worker()
    pool = Crew([worker], slots=1, each=1).pool(retries=2)
    for ends, expected in (
        ([EpisodeEnd.CRASHED], EpisodeEnd.CRASHED),
        ([EpisodeEnd.SERVER_ERROR, EpisodeEnd.CRASHED], EpisodeEnd.CRASHED),
        ([EpisodeEnd.SERVER_ERROR] * 3, None),
    ):
        playing = play(pool, 0)
        for ended in ends:
            await worker.asked.acquire()
            worker.finish(0, ended)
        member = (await playing).member
        assert (member.summary.ended if member is not None else None) is expected
    assert pool.lost == 1


async def test_the_names_of_calls_do_not_grow_with_the_run() -> None:
    """Ray's metrics keep every name of a task that there ever was, in the driver and in each worker."""
    worker = Worker()
    pool = Crew([worker], slots=1, each=1).pool()
    for step in range(50):
        playing = asyncio.create_task(pool.run(f"t{step}", f"step{step}/t{step}", 0, step=step, priority=0))
        await worker.asked.acquire()
        worker.finish(0)
        assert (await playing).member is not None
    assert len(worker.names) <= 1


@pytest.mark.parametrize("said", [OUT_OF_REACH, ASKED_TO_GO])
async def test_a_worker_out_of_reach_gets_no_rollout_until_it_answers(said: RayActorError) -> None:
    away, there = Worker(), Worker()
    crew = Crew([away, there], slots=4, each=2)
    pool = crew.pool(retries=1)
    playing = [play(pool, rollout) for rollout in range(6)]
    await until(lambda: len(away.ends) + len(there.ends) == 4)
    away.answers = said
    # A call fails, and the other is given up with it: both are played where there is room.
    lost = list(away.ends)
    away.ends[lost[0]].set_exception(said)
    for _ in range(6):
        await until(lambda: any(not end.done() for end in there.ends.values()))
        there.finish(next(rollout for rollout, end in there.ends.items() if not end.done()))
    finished = await asyncio.gather(*playing)
    assert [played.member is not None for played in finished] == [True] * 6
    assert [played.attempts for played in finished] == [2 if rollout in lost else 1 for rollout in range(6)]
    assert (list(away.ends), set(there.ends), pool.lost) == (lost, set(range(6)), 0)
    away.answers = None
    await until(lambda: crew.workers.elastic.up == 2)
    again = [play(pool, rollout) for rollout in (7, 8, 9, 10)]
    await until(lambda: len(away.ends) == 4)
    for rollout in (7, 8, 9, 10):
        (away if rollout in away.ends else there).finish(rollout)
    await asyncio.gather(*again)


async def test_a_worker_that_loses_every_world_is_not_given_all_that_waits() -> None:
    """On a node whose disk is full, say: it is free again at once, while the others still play."""
    sick, sound = Worker(), Worker()
    crew = Crew([sick, sound], slots=2, each=1)
    pool = crew.pool(retries=1)
    now = 0.0
    crew.workers.elastic._clock = lambda: now
    await until(lambda: crew.workers.elastic.up == 2)
    playing = [play(pool, rollout) for rollout in range(8)]

    async def until_played(number: int) -> None:
        while number:
            for rollout, end in list(sick.ends.items()):
                if not end.done():
                    sick.finish(rollout, EpisodeEnd.SERVER_ERROR)
            for rollout, end in list(sound.ends.items()):
                if not end.done() and number:
                    sound.finish(rollout)
                    number -= 1
            for _ in range(20):
                await asyncio.sleep(0)

    await until_played(3)
    assert len(sick.ends) == 1
    now = BACKOFF_SECONDS
    crew.workers.watched.adjust()
    await until_played(3)
    assert len(sick.ends) == 2
    # The second rest in a row is longer.
    now = 2 * BACKOFF_SECONDS
    crew.workers.watched.adjust()
    await until_played(2)
    assert len(sick.ends) == 2
    played = await asyncio.gather(*playing)
    assert all(each.member is not None for each in played)
    assert sorted(each.attempts for each in played) == [1] * 6 + [2] * 2
    # Where nobody is better it is asked all the same.
    crew.workers.elastic.mark_down(crew.workers.elastic.pooled[1])
    again = play(pool, 8)
    await until(lambda: 8 in sick.ends)
    sick.finish(8)
    assert (await again).member is not None
    assert crew.workers.elastic.pooled[0].failures == 0


async def test_rollouts_of_a_worker_that_is_stopped_are_played_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, there = Worker(), Worker()
    renewed: list[Worker] = []
    monkeypatch.setattr(ray, "kill", lambda worker, no_restart=True: renewed.append(worker))
    crew = Crew([stopped, there], slots=2, each=1)
    assert crew.workers.watched.timeout_seconds == 1800
    crew.workers.watched.timeout_seconds = 0.2
    pool = crew.pool(retries=1)
    playing = [play(pool, rollout) for rollout in range(2)]
    await until(lambda: len(stopped.ends) + len(there.ends) == 2)
    stopped.silent = True
    (lost,) = stopped.ends
    there.finish(1 - lost)
    await until(lambda: lost in there.ends)
    there.finish(lost)
    assert [(await each).attempts for each in playing] == [1 + (rollout == lost) for rollout in range(2)]
    await until(lambda: renewed == [stopped])


async def test_a_rollout_that_nobody_waits_for_is_taken_back_and_keeps_its_slot_until_it_ends(
    cancelled: list[Any],
) -> None:
    worker = Worker()
    pool = Crew([worker], slots=1, each=1).pool()
    playing, waiting = play(pool, 0), play(pool, 1)
    await until(lambda: 0 in worker.ends)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert (cancelled, pool.workers.elastic.in_flight, pool.workers.elastic.waiting) == ([worker.ends[0]], 1, 1)
    worker.ends[0].cancel()
    await until(lambda: 1 in worker.ends)
    worker.finish(1)
    await waiting


async def test_a_worker_that_cannot_be_made_ends_what_waits_with_its_error() -> None:
    worker = Worker()
    worker.answers = ActorDiedError()
    pool = Crew([worker], slots=1, each=1).pool(retries=1)
    with pytest.raises(ActorDiedError):
        await play(pool, 0)


async def test_a_worker_that_is_stopped_does_not_hold_up_the_end_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation, say, which ends its workers before the training goes on."""
    monkeypatch.setattr(pool_module, "STOP_SECONDS", 0.01)
    crew = Crew([Worker(), Worker()], slots=2, each=1)
    await until(lambda: crew.workers.elastic.up == 2)
    crew.made[0].silent = True
    await crew.workers.stop()
    assert [(worker.stopped, worker.killed) for worker in crew.made] == [(False, True), (True, True)]

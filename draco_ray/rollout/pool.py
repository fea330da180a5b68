"""Playing rollouts: who waits for a slot, from which policy they sample, and what is tried again."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from draco_ray.records import EpisodeEnd, Usage
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.summaries import RolloutSummary

log = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT")

LOOK_SECONDS = 5.0
"""Between two questions whether a worker that was out of reach is there again."""


class SlotQueue(Generic[WorkerT]):
    """Free slots of the workers, handed to whoever waits with the lowest priority number."""

    def __init__(self, workers: Sequence[tuple[WorkerT, int]]) -> None:
        """Take workers with their numbers of slots; free ones are spread over the workers."""
        most = max((slots for _, slots in workers), default=0)
        self._free = [worker for turn in range(most) for worker, slots in workers if turn < slots]
        self._waiting: list[tuple[int, int, asyncio.Future[WorkerT]]] = []
        self._arrivals = itertools.count()
        self._kept: dict[int, list[WorkerT]] = {}
        """Slots that are handed to nobody, by the identity of their worker."""

    async def acquire(self, priority: int) -> WorkerT:
        """Wait for a slot; equal priorities are served in order of arrival."""
        if self._free:
            return self._free.pop(0)
        future: asyncio.Future[WorkerT] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), future))
        return await future

    def release(self, worker: WorkerT) -> None:
        """Give a slot back."""
        if (kept := self._kept.get(id(worker))) is not None:
            kept.append(worker)
            return
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(worker)
                return
        self._free.append(worker)

    def keep_back(self, worker: WorkerT) -> bool:
        """Hand a worker's slots to nobody until `give_out`; False where that is so already."""
        if id(worker) in self._kept:
            return False
        self._kept[id(worker)] = [slot for slot in self._free if slot is worker]
        self._free = [slot for slot in self._free if slot is not worker]
        return True

    def give_out(self, worker: WorkerT) -> None:
        """Hand a worker's slots out again."""
        for slot in self._kept.pop(id(worker)):
            self.release(slot)

    @property
    def waiting(self) -> int:
        """Rollouts that wait for a slot."""
        return sum(not future.done() for _, _, future in self._waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A finished rollout of a group: references to what is large, the summary itself."""

    rollout: int
    trajectory: ray.ObjectRef[Any]
    evaluation: ray.ObjectRef[Any]
    summary: RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of a rollout, all its attempts together."""

    member: Member | None
    """None when every attempt was lost."""
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    """Of the attempts that were lost, too, as far as they could tell."""
    error: str | None = None
    """Why the last attempt was lost, if it was."""


class RolloutPool:
    """Rollout workers and the policies they sample from: the one path of training, evaluation and authoring.

    A rollout that ends in ``server_error``, or whose worker dies, is tried again in a fresh environment; when its
    retries are spent the group goes on without it. A worker that was out of reach gets no rollout until it answers, so
    that no rollout spends its retries on a node that is gone.
    """

    def __init__(
        self,
        workers: Sequence[tuple[Any, int]],
        policies: int,
        retries: int,
        seed: int,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """
        Args:
            workers: what `draco_ray.rollout.worker.start_rollout_workers` gives.
            policies: how many a worker samples from.
            retries: fresh environments that a rollout may use after a server error.
            seed: of the run; every rollout's own is drawn from it.
            look_seconds: see `LOOK_SECONDS`.
        """
        self._slots: SlotQueue[Any] = SlotQueue(workers)
        self._load = [0] * policies
        self._retries = retries
        self._seed = seed
        self._recorded: dict[tuple[str, int], Member] = {}
        self.lost = 0
        self._look_seconds = look_seconds
        self._asking: set[asyncio.Task[None]] = set()

    def take_over(self, group: str, member: Member) -> None:
        """Take a rollout of ``group`` that an earlier process of this run has finished; it is not played again."""
        self._recorded[group, member.rollout] = member

    async def run(self, task_id: str, group: str, rollout: int, *, step: int, priority: int) -> Played:
        """Play one rollout of ``group``, with the policy of ``step``."""
        if (recorded := self._recorded.pop((group, rollout), None)) is not None:
            return Played(member=recorded, usage=recorded.summary.usage)
        usage, error = Usage(), ""
        for attempt in range(self._retries + 1):
            # Drawn from the identity of the rollout, not from the order of events: a rerun draws the same.
            entropy = (self._seed, step, rollout, attempt, *task_id.encode())
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
            request = RolloutRequest(task_id=task_id, group=group, rollout=rollout, attempt=attempt, seed=seed)
            member = await self._try(request, priority)
            usage += Usage() if member is None else member.summary.usage
            if member is not None and member.summary.ended is not EpisodeEnd.SERVER_ERROR:
                return Played(member=member, attempts=attempt + 1, usage=usage)
            error = "its worker died" if member is None else member.summary.error or "the world was lost"
            log.warning("%s rollout %d attempt %d: server_error: %s", task_id, rollout, attempt, error)
        self.lost += 1
        return Played(member=None, attempts=self._retries + 1, usage=usage, error=error)

    @property
    def waiting(self) -> int:
        """Rollouts that wait for a slot."""
        return self._slots.waiting

    @property
    def in_flight(self) -> int:
        """Rollouts that hold a slot."""
        return sum(self._load)

    async def _try(self, request: RolloutRequest, priority: int) -> Member | None:
        worker = await self._slots.acquire(priority)
        policy = self._load.index(min(self._load))
        self._load[policy] += 1
        try:
            method = worker.rollout.options(name=f"rollout {request.group}/{request.rollout}")
            trajectory, summary, evaluation = method.remote(request, policy)
            try:
                finished = await summary
            except asyncio.CancelledError:
                ray.cancel(summary)
                raise
            return Member(rollout=request.rollout, trajectory=trajectory, evaluation=evaluation, summary=finished)
        except RayActorError as error:
            # Ray has repeated the rollout as often as it may: in seconds where a node is out of reach.
            self._leave_alone(worker, error)
            return None
        finally:
            self._load[policy] -= 1
            self._slots.release(worker)

    def _leave_alone(self, worker: Any, error: RayActorError) -> None:
        if self._slots.keep_back(worker):
            log.warning("a rollout worker cannot be asked: %s", " ".join(str(error).split())[:300])
            asking = asyncio.create_task(self._until_it_answers(worker))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def _until_it_answers(self, worker: Any) -> None:
        try:
            while not await _answers(worker):  # noqa: ASYNC110 (Ray tells nobody when an actor is there again)
                await asyncio.sleep(self._look_seconds)
        finally:
            self._slots.give_out(worker)


async def _answers(worker: Any) -> bool:
    """Whether a worker is there; also where it never will be again, which rollouts have to learn."""
    try:
        await worker.up.remote()
    except ActorUnavailableError:
        return False
    except RayActorError:
        log.exception("a rollout worker is lost for good")
    return True

"""What takes time in a step, as waits: engines, environments, the judge, the learner.

They have the faces of `RolloutPool`, `JudgePool`, the advantage actor, the run store and a `GroupLearner`, so that
`draco_ray.pipeline.Pipeline` and `draco_ray.training.streaming.streamed_update` work with them as they are.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from draco_ray.judging.judge import CallContext
from draco_ray.judging.limiter import BURST_REQUESTS, BURST_SECONDS, BURST_SHARE, PACE, WINDOW_SECONDS, SlidingWindow
from draco_ray.judging.phases import urgency
from draco_ray.judging.phases.base import Phase
from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.union import Union
from draco_ray.lab.simulation.critical import LEARNER, UPDATE, Entry
from draco_ray.lab.simulation.work import WAITS, CallWork, GroupWork, PhaseWork, RolloutWork, Setting, Speeds
from draco_ray.summaries import RewardSummary
from draco_ray.workers.elastic import fixed_workers

ROUNDING = 1e-9


class Book:
    """The work there is, and what became of it."""

    def __init__(self) -> None:
        self.work: dict[str, GroupWork] = {}
        """By the task's name."""
        self.entries: list[Entry] = []
        self.calls: list[tuple[float, float]] = []
        """Start and end of every phase at a judge worker."""
        self.requests: list[tuple[float, float]] = []
        """Second and tokens of every request to the judge."""


def now() -> float:
    """Seconds on the clock of the running loop."""
    return asyncio.get_running_loop().time()


async def pause(seconds: float) -> None:
    """Let so many seconds pass."""
    if seconds > 0:
        await asyncio.sleep(seconds)


class SharedEngine:
    """An engine whose sequences all advance at one rate, which depends on how many there are."""

    def __init__(self, slowdown: Callable[[int], float], sequences: int) -> None:
        """
        Args:
            slowdown: number of sequences -> factor on what a turn takes alone.
            sequences: that run at one time; further ones wait in order of arrival.
        """
        self._slowdown = slowdown
        self._room = asyncio.Semaphore(sequences)
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        """By the progress at which they end."""
        self._arrivals = itertools.count()
        self._progress = 0.0
        """Seconds that each sequence would have run alone."""
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, seconds: float) -> None:
        """Return when a turn has ended that takes ``seconds`` alone."""
        if seconds <= 0:
            return
        async with self._room:
            self._advance()
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._running, (self._progress + seconds, next(self._arrivals), ended))
            self._plan()
            await ended

    def _advance(self) -> None:
        if self._running:
            self._progress += (now() - self._at) / self._slowdown(len(self._running))
        self._at = now()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left = max(0.0, self._running[0][0] - self._progress)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + left * self._slowdown(len(self._running)), self._end)

    def _end(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._progress + ROUNDING:
            _, _, ended = heapq.heappop(self._running)
            ended.set_result(None)
        self._plan()


class Rollouts:
    """The pool of rollouts: slots, and engines among which they are spread evenly."""

    def __init__(self, book: Book, speeds: Speeds, setting: Setting) -> None:
        self._book = book
        self._slots = fixed_workers(1, setting.slots)
        self._engines = [SharedEngine(speeds.engine.slowdown, setting.sequences) for _ in range(setting.engines)]
        self._load = [0] * setting.engines
        self._handover = speeds.handover.get("rollout", 0.0)

    async def run(self, task_id: str, group: str, rollout: int, *, step: int, priority: int) -> Any:
        """Play a rollout; one that its record lacks is lost."""
        work = next((each for each in self._book.work[task_id].rollouts if each.number == rollout), None)
        if work is None:
            return SimpleNamespace(member=None)
        ready = now()
        slot = await self._slots.acquire(priority)
        begun = now()
        engine = self._load.index(min(self._load))
        self._load[engine] += 1
        if begun > ready + ROUNDING:
            await pause(self._handover)
        parts = {WAITS["slots"]: begun - ready, "hand-over": now() - begun}
        parts |= await _play(work, self._engines[engine])
        self._load[engine] -= 1
        self._slots.release(slot)
        self._book.entries.append(Entry("rollout", group, ready, now(), parts))
        summary = SimpleNamespace(rollout=rollout)
        return SimpleNamespace(
            member=SimpleNamespace(rollout=rollout, trajectory=None, evaluation=None, summary=summary)
        )


async def _play(work: RolloutWork, engine: SharedEngine) -> dict[str, float]:
    """The turns of a rollout; returns what their time went to."""
    await pause(work.opening)
    generating = 0.0
    for turn in work.turns:
        begun = now()
        await engine.generate(turn.generating)
        generating += now() - begun
        await pause(turn.executing)
    alone = min(generating, sum(turn.generating for turn in work.turns))
    return {
        "opening worlds": work.opening,
        "generating": alone,
        WAITS["engines"]: generating - alone,
        "environment": sum(turn.executing for turn in work.turns),
    }


class Judges:
    """The judge's workers, all up, and its limits; the union has an actor beside the workers."""

    def __init__(self, book: Book, speeds: Speeds, setting: Setting) -> None:
        self._book = book
        self._handover = speeds.handover
        self._workers = fixed_workers(setting.judge_workers, setting.calls_per_worker)
        self._line = Line(setting)

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Any:
        """Ask what the group's record says; what it lacks costs nothing."""
        ready = now()
        work = self._book.work[context.task_id].phases.get((phase.name, context.rollout), PhaseWork())
        await pause(self._handover.get(phase.name, 0.0))
        handed = now()
        place = None if issubclass(phase, Union) else await self._workers.acquire(urgency(phase.name))
        begun = now()
        await pause(work.overhead)
        limited = 0.0
        for calls in work.rounds:
            limited += max(await asyncio.gather(*(self._call(call, phase.name) for call in calls)))
        if place is not None:
            self._workers.release(place)
        self._book.calls.append((begun, now()))
        parts = {
            "hand-over": handed - ready,
            WAITS["judge workers"]: begun - handed,
            WAITS["judge limits"]: limited,
            phase.name: now() - begun - limited,
        }
        self._book.entries.append(Entry(phase.name, context.group, ready, now(), parts))
        summary = SimpleNamespace(phase=phase.name, error=None if work.ok else "recorded so")
        return SimpleNamespace(judged=(context.task_id, work.ok), archived=None, summary=summary, ok=work.ok)

    async def _call(self, call: CallWork, phase: str) -> float:
        """Make a call; returns the seconds that it waited for leave."""
        if not call.requests:
            await pause(call.seconds)
            return 0.0
        waited, tokens = 0.0, (call.input_tokens + call.output_tokens) / call.requests
        for _ in range(call.requests):
            asked_at = now()
            await self._line.lease(tokens, urgency(phase))
            waited += now() - asked_at
            self._book.requests.append((now(), tokens))
            await pause(call.seconds / call.requests)
        return waited


class Line:
    """The judge's limits: the windows of `draco_ray.judging.limiter`, with every request's tokens known beforehand."""

    def __init__(self, setting: Setting) -> None:
        requests, tokens = setting.requests_per_minute, setting.tokens_per_minute
        burst = max(BURST_REQUESTS, BURST_SECONDS * (requests or 0.0) / WINDOW_SECONDS)
        self._requests = SlidingWindow(requests, burst)
        self._tokens = SlidingWindow(tokens, BURST_SHARE * (tokens or 0.0), PACE)
        self._limited = requests is not None or tokens is not None
        self._waiting: list[tuple[int, int, float, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def lease(self, tokens: float, rank: int) -> None:
        """Return when a request of so many tokens may be sent; the lowest rank goes first."""
        if not self._limited:
            return
        leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), tokens, leave))
        self._serve()
        await leave

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, _, tokens, leave = self._waiting[0]
            wait = max(self._requests.seconds_to_wait(1, now()), self._tokens.seconds_to_wait(tokens, now()))
            if wait > 0:
                self._timer = asyncio.get_running_loop().call_later(wait, self._serve)
                return
            heapq.heappop(self._waiting)
            self._requests.take(1, now())
            self._tokens.take(tokens, now())
            leave.set_result(None)


class _Answer:
    """What a call to an actor returns; nobody has to await it."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self._value
        yield


def _remote(answer: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=lambda *given: answer(*given))


class Advantages:
    """The advantage actor: whether credit is asked for is what the record says."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.rewards = _remote(lambda numbers, judged: _Answer(self._rewards(numbers, judged)))
        # What the learner is given is known by the group's task.
        self.from_verdicts = _remote(lambda name, *_: self._samples(name))
        self.from_evaluations = self.from_noise = self.from_verdicts

    def _rewards(self, numbers: Sequence[int], judged: Sequence[tuple[str, bool]]) -> RewardSummary:
        phases = self._book.work[judged[0][0]].phases
        credited = {rollout for phase, rollout in phases if phase == Credit.name}
        scored = tuple(number for number, (_, ok) in zip(numbers, judged, strict=True) if ok)
        return RewardSummary(
            criteria=1,
            surviving=(0,),
            unanimous=tuple(number for number in scored if number not in credited),
            scored=scored,
            rewards=tuple(float(bool(credited) and place == 0) for place in range(len(scored))),
            applicable=1,
            passed=0,
        )

    def _samples(self, name: str) -> tuple[str, None, None, _Answer]:
        return name, None, None, _Answer()


class Keep:
    """The run store: nothing is kept."""

    def __init__(self) -> None:
        self.trajectory = self.judged = self.outcome = self.group = _remote(lambda *_: _Answer())


class SimulatedLearner:
    """A `GroupLearner` that does one thing at a time, in the order in which it was asked."""

    def __init__(self, book: Book, speeds: Speeds, setting: Setting) -> None:
        self._book = book
        self._speed = speeds.learner
        self._workers = setting.learners
        self._handover = speeds.handover.get("learning", 0.0)
        self._turn = asyncio.Lock()
        self._updates = 0

    async def accumulate(self, group: str) -> None:
        """Take as long as gradients do."""
        # The first pass of a group comes after its advantages; later minibatches are all there.
        handover = 0.0 if self._updates else self._handover
        await self._work("accumulate", group, self._seconds(group), handover)

    async def remember_old_logprobs(self, group: str) -> None:
        """Take as long as old log-probs do."""
        await self._work("remember", group, self._seconds(group) * self._speed.remember_share, self._handover)

    async def step(self) -> Any:
        """Take as long as the optimizer does."""
        await self._work(UPDATE, LEARNER, self._speed.update_seconds, 0.0)
        self._updates += 1

    def begin(self) -> None:
        """A new training step."""
        self._updates = 0

    def _seconds(self, group: str) -> float:
        return self._speed.gradients(self._book.work[group.partition("/")[2]].rollouts) / self._workers

    async def _work(self, kind: str, group: str, seconds: float, handover: float) -> None:
        ready = now()
        await pause(handover)
        handed = now()
        async with self._turn:
            begun = now()
            await pause(seconds)
        parts = {"hand-over": handed - ready, WAITS["learner"]: begun - handed, "learning": now() - begun}
        self._book.entries.append(Entry(kind, group, ready, now(), parts))

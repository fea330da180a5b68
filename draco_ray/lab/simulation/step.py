"""Discrete-event simulation of training steps, on a clock that jumps from one event to the next.

The dependencies are those of `draco_ray.pipeline` and `draco_ray.training.trainer`. Work of engines, environments,
judge and learner is simulated by sleeping for its duration.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from draco_ray.judging.limiter import ROUNDING, limit_windows
from draco_ray.judging.phases import PHASES, phase_rank
from draco_ray.lab.rows import group_by
from draco_ray.lab.simulation.recorded import Group, Phase, ResourceCounts, Rollout

ResultT = TypeVar("ResultT")
WAITS = {
    "slots": "waiting for a slot",
    "engines": "slowed by other rollouts",
    "judge workers": "waiting for a judge worker",
    "judge limits": "waiting for the judge's limits",
    "learner": "waiting for the learner",
}
"""Resource -> name of the part of a step's longest path that is spent waiting for it."""
PARTS = (
    *("between steps", WAITS["slots"], "opening worlds", "generating", WAITS["engines"], "environment", "hand-over"),
    *(WAITS["judge workers"], WAITS["judge limits"], *PHASES, WAITS["learner"], "learning", "sync and checkpoint"),
)
"""Parts of a step's longest path, in the order of the data flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of a run's engines, learner and hand-overs, in seconds."""

    per_turn: float = 0.0
    """Fixed time of a turn on an engine without other sequences."""
    per_sampled: float = 0.0
    """Additional time of each sampled token."""
    per_read: float = 0.0
    """Additional time of each token of a prompt or an observation."""
    slowdown: float = 0.0
    """Relative slowdown of a turn per further sequence on the engine."""
    per_learned: float = 0.0
    """Time of the gradient computation, per token."""
    per_learned_sampled: float = 0.0
    """Additional time of the gradient computation for each sampled token."""
    remember_share: float = 0.25
    """Time of old log-probs relative to gradients of the same tokens."""
    update: float = 0.0
    handover: Mapping[str, float] = field(default_factory=dict)
    """Stage -> delay between the end of the work that the stage waits for and the start of the stage."""
    head: float = 0.0
    """Time from the start of a step to its first rollout."""
    tail: float = 0.0
    """Time from the last update to the step's end: sync, canary, checkpoint."""


@dataclass(slots=True, eq=False)
class Work:
    """A piece of finished work: when its inputs were ready, how its time was spent, and its last input."""

    ready: float
    ended: float
    parts: dict[str, float]
    """How the time was spent -> seconds; adds up to ``ended - ready``."""
    after: Work | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step."""

    seconds: float
    path: dict[str, float]
    """Part of the longest path -> seconds; adds up to ``seconds``."""


def now() -> float:
    """Seconds on the running event loop's clock."""
    return asyncio.get_running_loop().time()


class _Clock(selectors.DefaultSelector):
    """A simulated clock that jumps to the next timer instead of sleeping."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: all tasks wait and no timer is set")
        self.now += max(0.0, timeout)
        return []


def run_on_simulated_clock(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine on a simulated clock."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


class PrioritySemaphore:
    """A priority semaphore: lowest rank first, then first come, first served."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def take(self, rank: int = 0) -> float:
        """Acquire a place; returns the seconds waited."""
        began = now()
        if self._free:
            self._free -= 1
            return 0.0
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (rank, next(self._arrivals), place))
        await place
        return now() - began

    def give(self) -> None:
        """Release a place."""
        if self._line:
            heapq.heappop(self._line)[2].set_result(None)
        else:
            self._free += 1


class Engine:
    """An engine whose sequences all advance at the same rate, which falls with their number."""

    def __init__(self, slowdown: float, sequences: int) -> None:
        self.rollouts = 0
        self._slowdown, self._room = slowdown, PrioritySemaphore(sequences)
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        """Running sequences as (progress at the sequence's end, arrival number, future)."""
        self._arrivals = itertools.count()
        self._progress, self._at = 0.0, 0.0
        """``_progress``: seconds that a sequence would have taken alone; ``_at``: time at which it was last updated."""
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, seconds: float) -> None:
        """Generate a turn that takes ``seconds`` without other sequences."""
        await self._room.take()
        self._advance()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._running, (self._progress + seconds, next(self._arrivals), ended))
        self._advance()
        await ended
        self._room.give()

    def _advance(self) -> None:
        """Update the progress, end finished sequences, and set a timer for the next one."""
        self._progress += (now() - self._at) / self._factor()
        self._at = now()
        while self._running and self._running[0][0] <= self._progress + ROUNDING:
            heapq.heappop(self._running)[2].set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left = (self._running[0][0] - self._progress) * self._factor()
            self._timer = asyncio.get_running_loop().call_later(left, self._advance)

    def _factor(self) -> float:
        return 1 + self._slowdown * max(0, len(self._running) - 1)


class Simulation:
    """The resources of a run, and the stages that use them."""

    def __init__(self, speeds: Speeds, setting: ResourceCounts) -> None:
        self._speeds, self._setting = speeds, setting
        self._slots = PrioritySemaphore(setting.slots)
        self._engines = [Engine(speeds.slowdown, setting.sequences) for _ in range(setting.engines)]
        self._judge = PrioritySemaphore(setting.judge_workers * setting.calls_per_worker)
        self._lease, self._learner = PrioritySemaphore(1), PrioritySemaphore(1)
        # Unlike in `draco_ray.judging.limiter`, a request's tokens are known before it is sent.
        self._limits = limit_windows(setting.requests_per_minute, setting.tokens_per_minute)

    async def play(self, steps: Sequence[Sequence[Group]]) -> list[SimulatedStep]:
        """Simulate successive training steps, which overlap as far as `ResourceCounts.staleness` allows."""
        # The groups of this step and of the later steps that have begun.
        begun: list[list[asyncio.Task[Work]]] = []
        played = []
        for step, groups in enumerate(steps):
            started = now()
            if not begun:
                await asyncio.sleep(self._speeds.head)
            # During the first step no rollouts of later steps run: its canary needs idle engines.
            ahead = self._setting.staleness if step else 0
            for later in range(step + len(begun), min(step + ahead + 1, len(steps))):
                ranked = enumerate(steps[later], later << 20)
                begun.append([asyncio.create_task(self._group(rank, group)) for rank, group in ranked])
            last = await self._update(groups, begun.pop(0))
            await asyncio.sleep(self._speeds.tail)
            path = longest_path(last, started, now(), self._speeds.tail)
            played.append(SimulatedStep(seconds=now() - started, path=path))
        return played

    async def _group(self, rank: int, group: Group) -> Work:
        """Simulate a group's rollouts and its recorded judge phases; returns the work that ended last."""
        phases = group_by(group.phases.items(), lambda item: item[0][0])
        stage1 = [asyncio.create_task(self._ask("stage1", phase)) for _, phase in phases["stage1"]]

        async def member(rollout: Rollout) -> Work:
            done = [await self._rollout(rank, rollout), *[await each for each in stage1]]
            phase = group.phases.get(("stage2", rollout.number))
            return await self._ask("stage2", phase, *done) if phase else done[0]

        done = await asyncio.gather(*(member(rollout) for rollout in group.rollouts))
        for kind in ("union", "score", "credit"):
            done = await asyncio.gather(*(self._ask(kind, phase, *done) for _, phase in phases[kind])) or done
        return max(done, key=lambda each: each.ended)

    async def _rollout(self, rank: int, rollout: Rollout) -> Work:
        ready, speeds = now(), self._speeds
        waited = await self._slots.take(rank)
        engine = min(self._engines, key=lambda each: each.rollouts)
        engine.rollouts += 1
        handover = speeds.handover.get("rollout", 0.0) if waited > ROUNDING else 0.0
        await asyncio.sleep(handover + rollout.opening)
        generating = alone = 0.0
        for turn in rollout.turns:
            begun = now()
            if turn.generating > 0:
                seconds = speeds.per_turn + turn.sampled * speeds.per_sampled + turn.read * speeds.per_read
                alone += seconds
                await engine.generate(seconds)
            generating += now() - begun
            await asyncio.sleep(turn.executing)
        engine.rollouts -= 1
        self._slots.give()
        alone = min(alone, generating)
        parts = {WAITS["slots"]: waited, "hand-over": handover, "opening worlds": rollout.opening, "generating": alone}
        parts |= {WAITS["engines"]: generating - alone, "environment": sum(turn.executing for turn in rollout.turns)}
        return Work(ready, now(), parts)

    async def _ask(self, kind: str, phase: Phase, *after: Work) -> Work:
        ready, rank, handover = now(), phase_rank(kind), self._speeds.handover.get(kind, 0.0)
        await asyncio.sleep(handover)
        # Union calls have their own worker.
        waited = 0.0 if kind == "union" else await self._judge.take(rank)
        limited = 0.0
        for _ in range(phase.requests):
            asked = now()
            await self._lease.take(rank)
            needed = list(zip(self._limits, (1, phase.tokens / phase.requests), strict=True))
            while wait := max(window.seconds_to_wait(amount, now()) for window, amount in needed):  # noqa: ASYNC110
                await asyncio.sleep(wait)
            for window, amount in needed:
                window.take(amount, now())
            self._lease.give()
            limited += now() - asked
            await asyncio.sleep(phase.seconds / phase.requests)
        await asyncio.sleep(0.0 if phase.requests else phase.seconds)
        if kind != "union":
            self._judge.give()
        parts = {"hand-over": handover, WAITS["judge workers"]: waited, WAITS["judge limits"]: limited}
        return Work(ready, now(), parts | {kind: phase.seconds}, _last(after))

    async def _update(self, groups: Sequence[Group], judged: Sequence[asyncio.Task[Work]]) -> Work:
        """Simulate the learner's work on a step's groups, each of which follows its task of ``judged``.

        Returns: the last update.
        """
        speeds, minibatch = self._speeds, self._setting.minibatch or len(groups)

        async def learn(seconds: float, after: Work | None, handover: float = 0.0) -> Work:
            ready = now()
            await asyncio.sleep(handover)
            parts = {"hand-over": handover, WAITS["learner"]: await self._learner.take(), "learning": seconds}
            await asyncio.sleep(seconds)
            self._learner.give()
            return Work(ready, now(), parts, after)

        def seconds(group: Group) -> float:
            every, sampled = speeds.per_learned, speeds.per_learned_sampled
            return sum(r.tokens * every + r.sampled * sampled for r in group.rollouts) / self._setting.learners

        async def first_pass(place: int, group: Group, judged: asyncio.Task[Work]) -> Work | None:
            after = await judged
            if group.failed:
                return None
            share = 1.0 if place < minibatch else speeds.remember_share
            return await learn(share * seconds(group), everything or after, speeds.handover.get("learning", 0.0))

        # On shared GPUs, learning starts after all generation.
        everything = _last(await asyncio.gather(*judged)) if self._setting.colocate else None
        done = await asyncio.gather(*map(first_pass, itertools.count(), groups, judged))
        last = await learn(speeds.update, _last(done))
        for first in range(minibatch, len(groups), minibatch):
            batch = [group for group in groups[first : first + minibatch] if not group.failed]
            learned = await asyncio.gather(*(learn(seconds(group), last) for group in batch))
            last = await learn(speeds.update, _last(learned) or last)
        return last


def simulate(steps: Sequence[Sequence[Group]], speeds: Speeds, setting: ResourceCounts) -> list[SimulatedStep]:
    """Simulate training steps.

    Args:
        steps: the groups of each step, in the batch's order.
        speeds: see `Speeds`.
        setting: numbers of resources.
    """
    return run_on_simulated_clock(Simulation(speeds, setting).play(steps))


def longest_path(last: Work | None, began: float, ended: float, tail: float) -> dict[str, float]:
    """Seconds per part of a step's longest path: from the last update back, following the input that finished last.

    Work that began before the step (it ran ahead) counts only from the start of the step.
    """
    path: dict[str, float] = {}
    while last is not None and last.ended > began:
        left = last.ended - max(last.ready, began)
        for part, seconds in reversed(last.parts.items()):
            path[part] = path.get(part, 0.0) + min(seconds, left)
            left -= min(seconds, left)
        last = last.after
    path["sync and checkpoint"] = tail
    path["between steps"] = ended - began - math.fsum(path.values())
    return {part: path[part] for part in PARTS if path.get(part, 0.0) > 1e-6}


def _last(work: Iterable[Work | None]) -> Work | None:
    return max(filter(None, work), key=lambda each: each.ended, default=None)

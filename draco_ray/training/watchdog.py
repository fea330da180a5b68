"""Stops an unattended run: after steps without a group, with a failing judge, or in a step that never ends.

`PendingOperations` records what the run waits for, `Watchdog` decides after each step, `PeakMemory` samples memory. No
Ray here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

from draco_ray.config.schema import WatchConfig
from draco_ray.errors import RunStopped
from draco_ray.judging.outage import format_duration

TIME_SHARE_DIVISOR = 30
"""The memory thread spends at most 1 / `TIME_SHARE_DIVISOR` of its time on samples. They are slow: the kernel walks
every page."""


def tree_memory_bytes() -> int:
    """Proportional set size of this process and its descendants: a page shared by n of them counts once.

    Processes that end while being read are not counted.
    """
    total, root = 0, psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total


class PeakMemory:
    """Samples `tree_memory_bytes` in a thread while a ``with`` block runs."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        """``every_seconds``: shortest pause between two samples."""
        self._every = every_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            started = time.monotonic()
            self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
            self._done.wait(max(self._every, TIME_SHARE_DIVISOR * (time.monotonic() - started)))


ResultT = TypeVar("ResultT")

LOOK_SECONDS = 5.0
FEWEST_PHASES = 10
"""Minimum number of judge phases in a step for checking the share of failures."""


class PendingOperations:
    """What the run is waiting for, and since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: returns seconds; replaced by tests."""
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, str, float]] = {}
        self._changed = clock()

    @contextmanager
    def of(self, kind: str, which: str = "") -> Iterator[None]:
        """Record that the run waits for ``kind`` during the block; ``which`` names a single operation of this kind.

        Both the beginning and the end of the block count as progress.
        """
        number = next(self._numbers)
        self._waiting[number] = (kind, which, self._clock())
        self._changed = self._clock()
        try:
            yield
        finally:
            del self._waiting[number]
            self._changed = self._clock()

    async def wait(self, kind: str, work: Awaitable[ResultT]) -> ResultT:
        """Await ``work`` and return its result; `of` records the wait for ``kind``."""
        with self.of(kind):
            return await work

    @property
    def kinds(self) -> set[str]:
        """What is being waited for; thread-safe."""
        return {kind for kind, _, _ in list(self._waiting.values())}

    @property
    def quiet(self) -> float:
        """Seconds since the last wait began or ended."""
        return self._clock() - self._changed

    def __str__(self) -> str:
        """Each kind with its count and its oldest wait, e.g. ``12 rollouts (the oldest: step3/a_1/2, for 11 min)``."""
        if not self._waiting:
            return "unknown"
        counts = Counter(kind for kind, _, _ in self._waiting.values())
        parts = []
        for kind, count in counts.items():
            _, which, since = min(
                (each for each in self._waiting.values() if each[0] == kind), key=lambda each: each[2]
            )
            lasted = format_duration(self._clock() - since)
            named = f"{kind} {which}".strip()
            parts.append(
                f"{named}, for {lasted}" if count == 1 else f"{count} x {kind} (the oldest: {which}, for {lasted})"
            )
        return "; ".join(parts)


class Watchdog:
    """Decides after each step whether the run should go on."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._empty = 0
        self._last = ""

    def check(self, metrics: Mapping[str, Any], reasons: Mapping[str, int]) -> None:
        """Check a step before its checkpoint is written.

        Args:
            metrics: of `draco_ray.training.metrics.step_metrics`.
            reasons: why groups were dropped, with counts.

        Raises:
            RunStopped: too many steps in a row had no group left, or the judge failed too often.
        """
        step = metrics["step"]
        self._last = ""
        if metrics["groups"] and metrics["groups_failed"] == metrics["groups"]:
            self._empty += 1
            lost, why = (
                metrics["rollouts_lost"],
                [f"{count} x {reason}" for reason, count in Counter(reasons).most_common(3)],
            )
            self._last = (
                f"step {step}: all {metrics['groups']} groups were dropped, {lost} of {lost + metrics['rollouts']} "
                f"rollouts lost: {'; '.join(why) or 'unknown reason'}"
            )
            if self._empty >= self._config.empty_steps:
                in_row = f" ({self._empty} such steps in a row)" if self._empty > 1 else ""
                raise RunStopped(f"{self._last}{in_row}, so the policy cannot learn; the run stops (watch.empty_steps)")
            return
        self._empty = 0
        phases = {name: (each["failed"], each["phases"]) for name, each in metrics["judge"].items()}
        failed, asked = sum(bad for bad, _ in phases.values()), sum(all_ for _, all_ in phases.values())
        if asked >= FEWEST_PHASES and failed > self._config.judge_failures * asked:
            most = ", ".join(f"{name} {bad} of {all_}" for name, (bad, all_) in phases.items() if bad)
            raise RunStopped(
                f"step {step}: {failed} of {asked} judge phases failed ({most}), more than watch.judge_failures="
                f"{self._config.judge_failures:g}; check `draco runs cost` and the judge workers' log"
            )

    def check_drift(self, metrics: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Check a finished step for a policy that exploits its judge; ``say`` prints a warning.

        Raises:
            RunStopped: there is evidence, and ``watch.drift`` is ``stop``. A resumed run goes on with the next step.
        """
        signs = []
        if metrics.get("drift_significant"):
            signs.append(
                f"less than {metrics['drift_share']:.0%} of the criteria in more of the best-rewarded rollouts than of "
                f"those with a middle reward, by {100 * metrics['drift']:.0f} points (95 % interval "
                f"{100 * metrics['drift_low']:.0f} to {100 * metrics['drift_high']:.0f})"
            )
        if metrics.get("fall_significant"):
            signs.append(
                f"{100 * metrics['fall']:.0f} points less in the better-rewarded half than in earlier steps (95 % "
                f"interval {100 * metrics['fall_low']:.0f} to {100 * metrics['fall_high']:.0f})"
            )
        if not signs or self._config.drift == "off":
            return
        said = (
            f"step {metrics['step']}: the held-out judge passes {'; it passes '.join(signs)}: the policy may exploit "
            "the judge; read rollouts that only the judge passes"
        )
        if self._config.drift == "stop":
            raise RunStopped(f"{said} (watch.drift=stop)")
        say(said)

    def end(self) -> None:
        """Check the last step. Raises: RunStopped: every group of it was dropped."""
        if self._last:
            raise RunStopped(f"{self._last}, so the policy has not learned from the last step")


async def report_inactivity(
    pending: PendingOperations,
    seconds: float,
    say: Callable[[str], None],
    why: Callable[[], str] = str,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Until cancelled, report what is being waited for whenever nothing has happened for another ``seconds``.

    ``why``: a possible reason, or an empty text; called in a thread.
    """
    said = 0
    while True:
        await asyncio.sleep(look_seconds)
        times = int(pending.quiet // seconds)
        if times > said:
            reason = await asyncio.to_thread(why)
            say(f"no progress for {format_duration(pending.quiet)}, waiting for: {pending}{reason and f' ({reason})'}")
        said = times


async def cancel_on_loss(
    work: Coroutine[Any, Any, ResultT], *losses: Coroutine[Any, Any, None], cancelled: Callable[[], None] = lambda: None
) -> ResultT:
    """Await ``work``; if something that it depends on is lost, cancel it and raise instead of waiting forever.

    Args:
        losses: each waits for one such loss and raises. Its error is raised once ``work`` has ended.
        cancelled: called if this call is cancelled, before ``work`` is cancelled.
    """
    working, watched = asyncio.create_task(work), [asyncio.create_task(loss) for loss in losses]
    try:
        await asyncio.wait({working, *watched}, return_when=asyncio.FIRST_COMPLETED)
        for loss in watched:
            if loss.done():
                await loss
        return await working
    except asyncio.CancelledError:
        cancelled()
        raise
    finally:
        for each in (working, *watched):
            each.cancel()
        await asyncio.gather(working, *watched, return_exceptions=True)


async def run_with_timeout(
    work: Coroutine[Any, Any, ResultT], seconds: float | None, late: Callable[[], Exception]
) -> ResultT:
    """Await ``work``; if it takes longer than ``seconds``, cancel it, wait for it to end, and raise ``late()``.

    ``late`` is called while ``work`` runs, since it names what is pending. ``seconds`` None: no limit.
    """
    if seconds is None:
        return await work

    async def limit() -> None:
        await asyncio.sleep(seconds)
        raise late()

    return await cancel_on_loss(work, limit())

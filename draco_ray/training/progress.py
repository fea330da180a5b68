"""What the driver of a run prints and reports: a live line, a line after each step, metrics, trackers and logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.fleet import EngineFleet
from draco_ray.engine.sampler import EngineStatistics, growth
from draco_ray.judging.outage import OutageStatus, format_duration
from draco_ray.judging.pool import JudgePool
from draco_ray.observability import catalogue
from draco_ray.observability.metrics import RunMetrics
from draco_ray.observability.trackers import open_trackers, scalars
from draco_ray.pipeline import Group
from draco_ray.rollout.pool import RolloutPool
from draco_ray.terminal import escape_control
from draco_ray.training.watchdog import PendingOperations

LOOK_SECONDS = 1.0
"""Interval between two checks for an outage of the judge, and between two checks whether a progress line is due."""
SLOW_SECONDS = 10.0
"""Interval of the progress lines of `shown`, if the output is not a terminal."""
STAGES = {
    "rollout": "generating",
    "judge's ": "judging",
    "advantages": "judging",
    "a group's gradients": "learning",
    "the learner's update": "learning",
    "the learner's log-probs": "learning",
    "sync": "sync",
    "the engines to": "sync",
    "the learner's checkpoint": "checkpoint",
    "writing": "writing",
    "the run store": "writing",
    "the trackers": "writing",
    "the engines' start": "loading engine",
    "the learner's start": "loading learner",
    "the held-out judge": "judging",
    "the first": "waiting for the judge",
}
"""Prefix of the kind of a pending operation -> name of the stage; the first match is shown."""


def stage(pending: PendingOperations) -> str:
    """Name of a run's current stage; empty if nothing is pending."""
    kinds = pending.kinds
    return next((name for begins, name in STAGES.items() if any(kind.startswith(begins) for kind in kinds)), "")


class StepProgress:
    """A progress line with clock, stage and counts: live on a terminal, elsewhere printed at intervals."""

    def __init__(
        self,
        console: Console,
        pending: PendingOperations | None = None,
        *,
        heartbeat_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            console: where the line is printed.
            pending: the pending operations, which determine the stage.
            heartbeat_seconds: see ``watch.heartbeat_seconds``.
            clock: monotonic time in seconds; replaced by tests.
        """
        self._console, self._pending, self._clock = console, pending or PendingOperations(), clock
        self._heartbeat = heartbeat_seconds
        self._live: Live | None = None
        self._title = ""
        self._note = ""
        self._groups: Sequence[Group] = ()
        self._ended = threading.Event()
        self._begun = self._said = clock()
        self._rollouts = self._of_rollouts = 0

    def start(self, title: str, groups: Sequence[Group] = (), rollouts: int = 0) -> None:
        """Begin a step or another long operation.

        Args:
            title: its name.
            groups: of a step; their progress is read whenever the line is shown.
            rollouts: number of rollouts of all groups; 0: counts are not shown.
        """
        self._end()
        self._title, self._note, self._groups = title, "", groups
        self._begun = self._said = self._clock()
        self._rollouts, self._of_rollouts = 0, rollouts
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, transient=True, refresh_per_second=4, get_renderable=self._renderable
            )
            self._live.start()
        elif self._heartbeat is not None:
            self._ended = threading.Event()
            # A thread, because starting Ray blocks the driver's thread.
            threading.Thread(target=self._beat, args=(self._ended,), daemon=True).start()

    def advance(self) -> None:
        """Count a rollout that belongs to no group."""
        self._rollouts += 1

    def note(self, text: str) -> None:
        """Show ``text`` instead of the stage; an empty text shows the stage again."""
        self._note = text

    def line(self, width: int = 1000) -> str:
        """Clock, stage and counts; counts that do not fit into ``width`` columns are left out."""
        doing = self._note or stage(self._pending)
        head = f"{self._title} {_clock(self._clock() - self._begun)}"
        if not self._of_rollouts:
            return " · ".join(filter(None, [head, doing]))
        groups = self._groups
        judged = sum(len(each.phases) for each in groups)
        counts = [
            f"{self._rollouts + sum(len(each.rollouts) for each in groups)}/{self._of_rollouts} rollouts",
            f"{judged} judge phases" if judged else "",
            f"{sum(map(_done, groups))}/{len(groups)} groups" if groups else "",
        ]
        parts = [part for part in (head, doing, *counts) if part]
        # The most important parts come first.
        while len(line := " · ".join(parts)) > width and len(parts) > 2:
            parts.pop()
        return line

    def due(self) -> str | None:
        """The progress line, if it must be printed now; else None.

        While an operation runs without a live line, it must be printed every ``heartbeat_seconds``.
        """
        now = self._clock()
        if self._heartbeat is None or self._live is not None or not self._title or now - self._said < self._heartbeat:
            return None
        self._said = now
        return self.line()

    def stop(self) -> None:
        """End the live line."""
        self._end()
        self._title = ""

    def _beat(self, ended: threading.Event) -> None:
        """Print the progress line at its interval, if the output is a log and not a terminal."""
        while not ended.wait(LOOK_SECONDS):
            if (line := self.due()) is not None:
                self._console.print(f"in progress: {line}")

    def _end(self) -> None:
        self._ended.set()
        # Clear the attribute first, because an interrupt may call this method a second time.
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _renderable(self) -> Text:
        width = self._console.width
        return Text(escape_control(self.line(width)), no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def shown(console: Console, title: str) -> Iterator[None]:
    """Show a line with a clock while the block runs; if not on a terminal, print it every `SLOW_SECONDS`."""
    progress = StepProgress(console, heartbeat_seconds=SLOW_SECONDS)
    progress.start(title)
    try:
        yield
    finally:
        progress.stop()


def _done(group: Group) -> bool:
    return group.advantage is not None or group.reason is not None


def _clock(seconds: float) -> str:
    """Format as minutes and seconds, with hours if there are any.

    >>> _clock(42.9), _clock(3661)
    ('0:42', '1:01:01')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


async def watch_judge(
    pause: Callable[[], Awaitable[OutageStatus | None]],
    progress: StepProgress,
    console: Console,
    seconds: float = LOOK_SECONDS,
) -> None:
    """Report outages of the judge until cancelled: a line when one begins and ends, and a countdown as the stage.

    Args:
        pause: returns the current outage, if any.
        progress: shows the countdown.
        console: prints the lines.
        seconds: interval between two checks.
    """
    shown = False
    while True:
        found = await pause()
        if found is not None:
            countdown = f"next try in {found.next_try:.0f} s, the run stops in {format_duration(found.gives_up)}"
            progress.note(f"judge unavailable: {countdown}")
            if not shown:
                console.print(f"the judge does not answer ({found.reason}): judging is paused; {countdown}")
        elif shown:
            progress.note("")
            console.print("the judge answers again: judging continues")
        shown = found is not None
        await asyncio.sleep(seconds)


def step_line(metrics: Mapping[str, Any], steps: int) -> str:
    """A step in one line; names as in metrics.jsonl."""
    ended = " ".join(f"{mode} {count}" for mode, count in metrics["ended"].items() if count)
    parts = [
        f"step {metrics['step']}/{steps} {metrics['seconds']:.0f}s",
        f"reward {_number(metrics['reward'], '+.2f')}",
        f"pass_rate {_number(metrics['pass_rate'], '.0%')}",
        f"signal {metrics['groups_with_signal']}/{metrics['groups']} groups",
        f"ended: {ended or 'none'}",
        f"judge ${metrics['judge_dollars']:.2f}, {metrics['judge_failed_phases']} failed",
        f"generation {metrics['seconds_generation']:.0f}s judging {metrics['seconds_judging']:.0f}s "
        f"({_number(metrics['judge_hidden_share'], '.0%')} hidden) learning {metrics['seconds_learning']:.0f}s "
        f"sync {metrics['seconds_sync']:.1f}s",
        f"kl {_number(metrics['kl'], '.4f')} grad {_number(metrics['grad_norm'], '.2f')} "
        f"gap {_number(metrics['canary_gap'], '.4f')}",
    ]
    if metrics.get("tgc") is not None:
        parts.insert(1, f"tgc {metrics['tgc']:.1%}")
    if metrics.get("held_out_rate") is not None:
        drift = f", drift {metrics['drift']:+.0%}" if metrics["drift"] is not None else ""
        drift += f", fall {metrics['fall']:+.0%}" if metrics["fall"] is not None else ""
        parts.append(f"held-out judge {metrics['held_out_rate']:.0%} to {metrics['held_out_trained_rate']:.0%}{drift}")
    if metrics.get("judge_prompts_cut"):
        parts.append(f"{metrics['judge_prompts_cut']} judge prompts truncated to the judge's context")
    if metrics["rollouts_lost"] or metrics["groups_failed"]:
        parts.append(f"lost {metrics['rollouts_lost']} rollouts, {metrics['groups_failed']} groups")
    return " | ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


log = logging.getLogger(__name__)

SAMPLE_SECONDS = 2.0
"""Interval between two readings of the queues; Prometheus scrapes Ray less often."""


class RunObserver:
    """Records groups and steps in metrics, logs and trackers; errors of trackers do not stop the run."""

    def __init__(self, config: DracoConfig, run: Path, spent: float = 0.0, done: int = 0) -> None:
        """Open the trackers; needs a connected Ray.

        Args:
            config: the run's.
            run: its directory.
            spent: dollars spent on judging before this process.
            done: steps finished before this process.

        Raises:
            ConfigError: a tracker of ``run.trackers`` cannot be used.
        """
        self._trackers = open_trackers(config.run.trackers, run, config.model_dump(mode="json"))
        self._metrics = RunMetrics(run.name)
        self._dollars = spent
        self._seen: dict[str, tuple[int, int]] = {}
        """Group name -> number of recorded rollouts, and of recorded phases."""
        # Reported by `watch_pools` even before the first step ends, so that alerts can detect a run without progress.
        self._last_step: Mapping[str, Any] = {"step": done}
        """Metrics line of the last finished step."""

    def group(self, group: Group) -> None:
        """Record the group's rollouts and phases that are new since the last call."""
        rollouts, phases = self._seen.get(group.name, (0, 0))
        self._seen[group.name] = (len(group.rollouts), len(group.phases))
        where = {"step": group.step, "task": group.task_id}
        for rollout in group.rollouts[rollouts:]:
            self._metrics.rollout(rollout)
            seconds = rollout.ended_at - rollout.started_at
            log.info(
                "rollout %s after %d turns, %.1fs",
                *(rollout.termination.value, rollout.turns, seconds),
                extra=where | {"rollout": rollout.rollout},
            )
        for phase in group.phases[phases:]:
            self._metrics.phase(phase)
            self._dollars += phase.dollars
            if phase.error is not None:
                log.warning(
                    "judge phase %s failed: %s",
                    *(phase.phase, phase.error),
                    extra=where | {"rollout": phase.rollout},
                )
        if group.reason is not None:
            log.warning("group dropped: %s", group.reason, extra=where)

    def step(self, line: Mapping[str, Any]) -> None:
        """Record a finished step's metrics line."""
        self._last_step = line
        self._metrics.step(line)
        log.info("step finished in %.1fs, reward %s", line["seconds"], line["reward"], extra={"step": line["step"]})
        self._track(line["step"], scalars(line))

    def held_out(self, step: int, rates: Mapping[str, float]) -> None:
        """Record results of the policy of ``step`` on held-out tasks: rates in [0, 1] by name."""
        self._track(step, {f"held_out/{name}": rate for name, rate in rates.items()})

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.step(step, numbers)
            except Exception:
                log.exception("tracker %s failed and is not used any more", name)
                del self._trackers[name]

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers.values():
            with contextlib.suppress(Exception):
                tracker.close()

    async def watch_pools(self, rollouts: RolloutPool, judges: JudgePool) -> None:
        """Record the pools' queues every few seconds until cancelled.

        Also sets the last step's gauges again, since Ray drops gauges that are not set for two report intervals.
        """
        while True:
            self._metrics.set(catalogue.ROLLOUTS_WAITING, rollouts.workers.elastic.waiting)
            self._metrics.set(catalogue.ROLLOUTS_IN_FLIGHT, rollouts.workers.elastic.in_flight)
            self._metrics.set(catalogue.JUDGE_IN_FLIGHT, judges.in_flight)
            self._metrics.set(catalogue.JUDGE_WAITING, judges.workers.waiting)
            self._metrics.set(catalogue.JUDGE_WORKERS_UP, judges.workers.up)
            self._metrics.set(catalogue.JUDGE_WORKERS_WANTED, judges.workers.wanted)
            self._metrics.set(catalogue.RUN_DOLLARS, self._dollars)
            self._metrics.step(self._last_step)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def watch_engines(self, fleet: EngineFleet) -> None:
        """Record the engines' statistics every few seconds until cancelled."""
        before: dict[str, EngineStatistics] = {}
        while True:
            self._metrics.set(catalogue.ENGINES_UP, fleet.workers.up)
            self._metrics.set(catalogue.ENGINES_REPLACED, fleet.replaced)
            for index, now in (await fleet.statistics()).items():
                engine = str(index)
                self._engine(engine, before.get(engine, EngineStatistics()), now)
                # A copy, because an engine in this process updates its statistics in place.
                before[engine] = replace(now)
            await asyncio.sleep(SAMPLE_SECONDS)

    def _engine(self, engine: str, before: EngineStatistics, now: EngineStatistics) -> None:
        self._metrics.set(catalogue.ENGINE_RUNNING, now.running, engine=engine)
        self._metrics.set(catalogue.ENGINE_WAITING, now.waiting, engine=engine)
        self._metrics.set(catalogue.ENGINE_KV_CACHE, now.kv_cache, engine=engine)
        for metric, name in (
            (catalogue.ENGINE_SAMPLED, "sampled_tokens"),
            (catalogue.ENGINE_PROMPTS, "prompt_tokens"),
            (catalogue.ENGINE_PREEMPTIONS, "preemptions"),
        ):
            self._metrics.count(metric, growth(before, now, name), engine=engine)

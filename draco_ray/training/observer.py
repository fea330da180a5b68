"""Observing a run from its driver: metrics, trackers and a log line for whatever changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.fleet import EngineFleet
from draco_ray.engine.statistics import EngineStatistics, growth
from draco_ray.judging.pool import JudgePool
from draco_ray.observability.catalogue import (
    ENGINE_KV_CACHE,
    ENGINE_PREEMPTIONS,
    ENGINE_PROMPTS,
    ENGINE_RUNNING,
    ENGINE_SAMPLED,
    ENGINE_WAITING,
    ENGINES_REPLACED,
    ENGINES_UP,
    JUDGE_IN_FLIGHT,
    JUDGE_WAITING,
    JUDGE_WORKERS_UP,
    JUDGE_WORKERS_WANTED,
    ROLLOUTS_IN_FLIGHT,
    ROLLOUTS_WAITING,
    RUN_DOLLARS,
)
from draco_ray.observability.metrics import RunMetrics
from draco_ray.observability.trackers import open_trackers, scalars
from draco_ray.pipeline import Group
from draco_ray.rollout.pool import RolloutPool
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.progress import StepProgress

VERDICTS = {1: "passed", -1: "failed", 0: "not_applicable"}


def rollout_table(run: RunDirectory, step: int) -> dict[str, list[Any]]:
    """Columns by name: the rollout, how it ended, its reward and advantage, criteria by verdict, evidence of failures.

    Reward and advantage are null for a rollout whose group was dropped.

    Raises:
        DamagedRun: a table of the run cannot be read.
    """
    titles = {
        (row["task_id"], row["criterion"]): row["title"]
        for row in run.table("criteria", step, ["task_id", "criterion", "title"]).to_pylist()
    }
    judged: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in run.table("verdicts", step, ["task_id", "rollout", "criterion", "verdict", "evidence"]).to_pylist():
        of = judged[row["task_id"], row["rollout"]]
        of[VERDICTS[row["verdict"]]].append(titles.get((row["task_id"], row["criterion"]), f"#{row['criterion']}"))
        if row["verdict"] == -1 and row["evidence"]:
            of["evidence"].append(row["evidence"])
    given = {
        (row["task_id"], row["rollout"]): row
        for row in run.table("advantages", step, ["task_id", "rollout", "reward", "advantage"]).to_pylist()
    }
    columns = ["task_id", "rollout", "ended", "turns", "steps", "reward", "advantage"]
    columns += [*VERDICTS.values(), "evidence"]
    table: dict[str, list[Any]] = {name: [] for name in columns}
    played = run.table("trajectories", step, ["task_id", "rollout", "ended", "turns", "steps"]).to_pylist()
    for row in sorted(played, key=lambda row: (row["task_id"], row["rollout"])):
        key = row["task_id"], row["rollout"]
        values = row | {name: given.get(key, {}).get(name) for name in ("reward", "advantage")}
        values |= {name: "\n".join(judged[key][name]) for name in (*VERDICTS.values(), "evidence")}
        for name, column in table.items():
            column.append(values[name])
    return table


log = logging.getLogger(__name__)

SAMPLE_SECONDS = 2.0
"""Between two readings of the queues; Prometheus scrapes Ray less often."""


class RunObserver:
    """Records groups and steps; an error while recording never stops the run."""

    def __init__(self, config: DracoConfig, run: Path, spent: float = 0.0, done: int = 0) -> None:
        """Open the trackers; needs a connected Ray.

        Args:
            config: the run's.
            run: its directory.
            spent: dollars of judging before this process.
            done: steps before this process.

        Raises:
            ConfigError: a tracker of ``run.trackers`` cannot be used.
        """
        self._trackers = open_trackers(config.run.trackers, run, config.model_dump(mode="json"))
        self._metrics = RunMetrics(run.name)
        self._dollars = spent
        self._sampling: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        """Group -> its rollouts and phases that were taken in already."""
        # Before the first step ends as well: whoever is told that none does needs a figure that stands still.
        self._last_step: Mapping[str, Any] = {"step": done}
        """Metrics line of the step that ended last."""

    def group(self, group: Group) -> None:
        """Take in what is new in a group since the last call."""
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
        """Take in a finished step's metrics line."""
        self._last_step = line
        self._metrics.step(line)
        self._seen.clear()
        log.info("step finished in %.1fs, reward %s", line["seconds"], line["reward"], extra={"step": line["step"]})
        self._track(line["step"], scalars(line))

    def held_out(self, step: int, rates: Mapping[str, float]) -> None:
        """Take in what the policy of ``step`` achieves on held-out tasks, a rate in [0, 1] by name."""
        self._track(step, {f"held_out/{name}": rate for name, rate in rates.items()})

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.step(step, numbers)
            except Exception:
                log.exception("tracker %s failed and is left out from here on", name)
                del self._trackers[name]

    def rollouts(self, step: int, run: RunDirectory) -> None:
        """Send a finished step's rollouts with their verdicts to the trackers that show tables."""
        showing = {name: tracker for name, tracker in self._trackers.items() if tracker.shows_tables}
        try:
            table = rollout_table(run, step) if showing else {}
        except Exception:
            log.exception("the table of the rollouts of step %d cannot be made", step)
            return
        for name, tracker in showing.items():
            try:
                tracker.rollouts(step, table)
            except Exception:
                log.exception("tracker %s failed and is left out from here on", name)
                del self._trackers[name]

    def watch_pools(self, rollouts: RolloutPool, judges: JudgePool) -> None:
        """Read the pools' queues every few seconds until `close`; needs a running event loop.

        Keeps the last step's gauges up as well: Ray forgets one that was not set again for two of its report intervals.
        """
        self._sampling = asyncio.create_task(self._sample(rollouts, judges))

    def watch_engines(self, fleet: EngineFleet) -> None:
        """Ask the engines every few seconds what they do, until `close`; needs a running event loop."""
        self._asking = asyncio.create_task(self._ask(fleet))

    def close(self) -> None:
        """Write what is buffered."""
        for task in filter(None, (self._sampling, self._asking)):
            task.cancel()
        for tracker in self._trackers.values():
            with contextlib.suppress(Exception):
                tracker.close()

    async def _sample(self, rollouts: RolloutPool, judges: JudgePool) -> None:
        while True:
            self._metrics.set(ROLLOUTS_WAITING, rollouts.waiting)
            self._metrics.set(ROLLOUTS_IN_FLIGHT, rollouts.in_flight)
            self._metrics.set(JUDGE_IN_FLIGHT, judges.in_flight)
            self._metrics.set(JUDGE_WAITING, judges.waiting)
            self._metrics.set(JUDGE_WORKERS_UP, judges.up)
            self._metrics.set(JUDGE_WORKERS_WANTED, judges.wanted)
            self._metrics.set(RUN_DOLLARS, self._dollars)
            self._metrics.step(self._last_step)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _ask(self, fleet: EngineFleet) -> None:
        before: dict[str, EngineStatistics] = {}
        while True:
            self._metrics.set(ENGINES_UP, fleet.workers.up)
            self._metrics.set(ENGINES_REPLACED, fleet.replaced)
            for index, now in (await fleet.statistics()).items():
                engine = str(index)
                self._engine(engine, before.get(engine, EngineStatistics()), now)
                # Copied: what an engine in this process fills is one and the same.
                before[engine] = replace(now)
            await asyncio.sleep(SAMPLE_SECONDS)

    def _engine(self, engine: str, before: EngineStatistics, now: EngineStatistics) -> None:
        self._metrics.set(ENGINE_RUNNING, now.running, engine=engine)
        self._metrics.set(ENGINE_WAITING, now.waiting, engine=engine)
        self._metrics.set(ENGINE_KV_CACHE, now.kv_cache, engine=engine)
        for metric, name in (
            (ENGINE_SAMPLED, "sampled_tokens"),
            (ENGINE_PROMPTS, "prompt_tokens"),
            (ENGINE_PREEMPTIONS, "preemptions"),
        ):
            self._metrics.count(metric, growth(before, now, name), engine=engine)


class StepWatch:
    """Shows and counts the groups of the step under way; the pipeline tells it of every change."""

    def __init__(self, progress: StepProgress, observer: RunObserver, phases: int = 0) -> None:
        """``phases``: see `draco_ray.training.progress.most_phases`."""
        self._progress, self._observer, self._phases = progress, observer, phases
        self._step = 0

    def __call__(self, group: Group) -> None:
        """Take in a group's news. One that runs ahead is taken in, with all its news, when its step begins."""
        if group.step == self._step:
            self._progress.update(group)
            self._observer.group(group)

    def begin(self, title: str, groups: Sequence[Group], group_size: int) -> None:
        """Begin a step."""
        self._progress.start(title, len(groups), len(groups) * group_size, self._phases)
        self._step = groups[0].step
        for group in groups:
            self(group)

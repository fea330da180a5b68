"""Observes a run that ends a step and then does nothing; prints what Prometheus sees, for `test_observability`.

It runs in a process of its own, like a run's driver: Ray 2.60 may export no metrics of a process that joined another
Ray before, and the test process may have done so in an earlier test file.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import ray

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.sampler import EngineStatistics
from draco_ray.judging.phases import PHASES
from draco_ray.observability.catalogue import CATALOGUE, STEP_GAUGES
from draco_ray.pipeline import Group
from draco_ray.records import EpisodeEnd
from draco_ray.summaries import PhaseSummary
from draco_ray.training import progress
from draco_ray.training.cluster import start_ray
from draco_ray.training.progress import RunObserver
from tests.support.summaries import a_phase, a_rollout

REPORT_SECONDS = 2
"""RAY_metrics_report_interval_ms of this process; a gauge lives twice as long."""
SEEN_SECONDS = 600
"""In which every metric must be there; this waits for them, not for a time."""
IDLE_SECONDS = 4 * REPORT_SECONDS
"""Duration of a long step, which exceeds the time for which Ray keeps gauges."""


class Queue:
    """A pool's queues as the observer reads them."""

    waiting, in_flight, up, wanted = 3, 5, 2, 4

    @property
    def workers(self) -> Queue:
        """Itself."""
        return self

    elastic = workers


class Engines:
    """Statistics of two engines: one has just been restarted, the other is absent."""

    replaced = 1
    workers = SimpleNamespace(up=1)

    async def statistics(self) -> dict[int, EngineStatistics]:
        """The same statistics at every call."""
        counted = {"sampled_tokens": 700, "prompt_tokens": 9000, "preemptions": 2}
        return {0: EngineStatistics(running=6, waiting=7, kv_cache=0.25, **counted)}


def a_group() -> Group:
    """Two rollouts, a call of each phase, and one that failed."""
    group = Group(step=3, index=0, task_id="t_1", prompt=())
    group.rollouts = [a_rollout(0, 0, 10), a_rollout(1, 0, 40, EpisodeEnd.TURN_LIMIT)]
    phases: list[PhaseSummary] = [a_phase(phase, 0, 2) for phase in PHASES]
    group.phases = [*phases, a_phase("score", 0, 1, error="cannot be parsed", rollout=1)]
    return group


def scraped() -> dict[str, float]:
    """Series with labels -> value, as Prometheus would read this node."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=None).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ray_draco_")]
    return {series: float(value) for series, value in lines}


async def wait_for_metrics() -> dict[str, float]:
    """The scraped metrics once all of the catalogue are there, or at the time limit."""
    wanted = {metric.series[0] for metric in CATALOGUE}
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        series = scraped()
        if wanted <= {key.split("{")[0] for key in series} or time.monotonic() > deadline:
            return series
        await asyncio.sleep(0.5)


async def observe_run(run: Path) -> dict[str, dict[str, float]]:
    """The scraped metrics after a step, and after `IDLE_SECONDS` without any event."""
    # Shorter than Ray's interval by the same factor as in a run.
    progress.SAMPLE_SECONDS = REPORT_SECONDS / 5
    watcher = RunObserver(DracoConfig(), run, spent=10.0)
    watching = [
        asyncio.create_task(watcher.watch_pools(Queue(), Queue())),  # type: ignore[arg-type]
        asyncio.create_task(watcher.watch_engines(Engines())),  # type: ignore[arg-type]
    ]
    group = a_group()
    # A group that is reported twice counts once.
    watcher.group(group)
    watcher.group(group)
    line = dict.fromkeys(STEP_GAUGES, 0.5) | {"step": 3, "kl": None, "judge": {"score": {"dollars": 0.5}}}
    watcher.step(line)
    watcher.step(line | {"kl": 0.25})
    first = await wait_for_metrics()
    await asyncio.sleep(IDLE_SECONDS)
    later = await wait_for_metrics()
    for task in watching:
        task.cancel()
    watcher.close()
    return {"at first": first, "later": later}


if __name__ == "__main__":
    start_ray(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20)
    print(json.dumps(asyncio.run(observe_run(Path(sys.argv[1])))))

"""`draco judge --ray`: sends the judge phases of many groups to the judge pool of a cluster.

This process loads the groups, truncates traces and keeps the results. Each phase runs in one of the judge workers,
whose number follows the load. An actor on this process's node stores the replies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import ray

from draco_ray.config.schema import DracoConfig, EngineConfig, JudgeConfig, LearnerConfig
from draco_ray.judging.actors import start_judge_limiter, start_replies
from draco_ray.judging.judge import CallContext, Judgement
from draco_ray.judging.local.actor import start_judge_servers
from draco_ray.judging.phases import Phase
from draco_ray.judging.pool import JudgePool, judge_starter
from draco_ray.traces.judging import Ask, environment_facts
from draco_ray.traces.judging_run import JudgingRun
from draco_ray.traces.library import MeteredJudge
from draco_ray.training.cluster import release_start_lock
from draco_ray.training.session import ray_session, unwrap_ray_errors

FACTS_FROM = 8
"""Number of groups from whose traces facts about the environment are derived: the first ones still to judge."""
LOOK_SECONDS = 2.0
"""Seconds between two queries for the servers that are loading."""


class PooledJudge:
    """Sends judge phases to the workers of a pool, and counts their calls."""

    def __init__(self, pool: JudgePool, meter: MeteredJudge) -> None:
        self._pool, self._meter = pool, meter

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """Run a phase in a worker of the pool.

        Raises:
            JudgeUnavailable: the judge does not answer; BudgetSpent if the budget is spent.
        """
        number = next(self._meter.numbers)
        self._meter.begun[number] = time.monotonic()
        try:
            with unwrap_ray_errors():
                judgement = await self._pool.ask(phase, context, **given)
                archived = await judgement.archived
        finally:
            del self._meter.begun[number]
        self._meter.done += judgement.summary.calls
        self._meter.dollars += judgement.summary.dollars
        self._meter.failed += judgement.summary.error is not None
        return replace(judgement, judged=replace(archived, calls=()), archived=archived)


def _told(judge: JudgeConfig, kept: JudgingRun) -> JudgeConfig:
    """The judge's configuration, with facts about the environment for the prompts of all groups.

    If none are configured, they are derived from the traces of the first `FACTS_FROM` groups that are still to judge.
    """
    if judge.environment_facts is not None:
        return judge
    traces = [trace for _, group in kept.pending()[:FACTS_FROM] for trace in group.traces]
    return judge.model_copy(update={"environment_facts": environment_facts(traces)})


async def _say_what_loads(servers: Any, meter: MeteredJudge) -> None:
    while True:
        with suppress(ray.exceptions.RayError):
            meter.waits_for = "; ".join(await servers.pending.remote())
        await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def open_judge_pool(config: DracoConfig, kept: JudgingRun, meter: MeteredJudge) -> AsyncIterator[Ask]:
    """A pool of judge workers for as long as the block runs, on the cluster of ``ray.address`` or this machine.

    Raises:
        ConfigError, ClusterError: there is no such cluster, or it has no slot for a judge.
        JudgeUnavailable: the judge cannot be reached from there.
    """
    # This command starts only judges.
    judges_only = config.model_copy(
        update={
            "environment": config.environment.model_copy(update={"slots": 1, "cpus_per_worker": 0.0}),
            "engine": EngineConfig(gpus_per_engine=0.0, cpus_per_engine=0.0),
            "learner": LearnerConfig(gpus_per_worker=0.0, cpus_per_worker=0.0),
        }
    )
    with ray_session(judges_only):
        name = f"judge-{kept.path.name}"
        # Keep the handles: an actor ends with its handle.
        _limiter, leases = start_judge_limiter(config.judge, kept.path, name) or (None, None)
        local, servers = start_judge_servers(config.judge, kept.path, name) or (None, None)
        judge = _told(config.judge, kept)
        _replies, replies = start_replies(judge, name) or (None, None)
        starter = judge_starter(judge, None, leases, name, servers, replies, own_replies=True)
        pool = JudgePool(starter, config.judge)
        pool.open()
        saying = None if local is None else asyncio.create_task(_say_what_loads(local, meter))
        try:
            with unwrap_ray_errors():
                await pool.ready()
                release_start_lock()
                yield PooledJudge(pool, meter).ask
        finally:
            pool.close()
            if local is not None and saying is not None:
                saying.cancel()
                with suppress(ray.exceptions.RayError):
                    await local.stop.remote()

"""Judge workers as Ray actors, and their pool, which grows and shrinks with the calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.engine.actor import EngineClient
from draco_ray.errors import ClusterError
from draco_ray.judging.build import prompts_of
from draco_ray.judging.endpoint import Servers
from draco_ray.judging.judge import CallContext, Judge, Judgement, ask_phase, phase_summary
from draco_ray.judging.limiter import Leases
from draco_ray.judging.panel import member_config
from draco_ray.judging.phases import Phase, Union, phase_rank
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.observability.logs import set_log_context, start_run_log
from draco_ray.records import Judged
from draco_ray.summaries import PhaseSummary
from draco_ray.workers import monitor
from draco_ray.workers.elastic import ElasticWorkers, PooledWorker
from draco_ray.workers.monitor import MAX_ATTEMPTS, MonitoredWorkers, PendingCall, pin_argument

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJudge:
    """The policy that judges itself."""

    samplers: Sequence[EngineClient]
    tokenizer: Any
    name: str
    """Name of the model in the archive."""


class JudgeWorkerActor:
    """One asynchronous judge client with many calls in flight."""

    def __init__(
        self,
        config: JudgeConfig,
        policy: PolicyJudge | None,
        leases: Leases | None,
        servers: Servers | None,
        replies: ReplyCache | None,
        own_replies: bool,
        prompts: Prompts,
    ) -> None:
        from draco_ray.judging.build import build_judge, build_self_judge

        start_run_log()
        self._judge: Judge = (
            build_self_judge(config, policy.samplers, policy.tokenizer, policy.name, prompts)
            if config.self_judge.enabled and policy is not None
            else build_judge(config, leases, servers, replies=replies, own_replies=own_replies, prompts=prompts)
        )
        self._held_out = self._judge
        if config.held_out is not None and config.held_out.model:
            self._held_out = build_judge(
                member_config(config, config.held_out), leases, replies=replies, prompts=prompts
            )

    async def up(self) -> str:
        """The id of the Ray node on which this actor runs. The pool calls this method as a health check."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def check(self) -> None:
        """Check that the judge and the held-out judge answer. Raises: JudgeUnavailable."""
        for judge in {self._judge, self._held_out}:
            await judge.check()

    @ray.method(num_returns=3)
    async def ask(
        self, phase: Phase, context: CallContext, **given: Any
    ) -> tuple[Judged[Any], Judged[Any], PhaseSummary]:
        """Ask a question of ``phase``; returns the answer, the answer with its calls for the archive, and a summary.

        The arguments are those of `draco_ray.judging.judge.ask_phase`.
        """
        set_log_context(context.group, context.rollout)
        found = await ask_phase(self._held_out if context.held_out else self._judge, phase, context, **given)
        for note in found.archived.notes:
            log.warning("%s of %s: %s", phase.name, context.group, note)
        return found.judged, found.archived, found.summary


def judge_starter(
    config: JudgeConfig,
    policy: PolicyJudge | None,
    leases: Leases | None,
    run_name: str,
    servers: Servers | None = None,
    replies: ReplyCache | None = None,
    *,
    own_replies: bool = False,
) -> Callable[[str], Any]:
    """A function that starts a judge actor of a given name; each takes one unit of the resource ``judge``.

    The actors may run on hosts that cannot read the driver's files: prompts and examples are sent to them, and
    ``replies`` (`draco_ray.judging.actors.start_replies`) are reached through Ray. ``own_replies``: see `build_judge`.

    Raises:
        ConfigError, StoreError: as `prompts_of`.
    """
    remote = ray.remote(JudgeWorkerActor)
    kept_policy, prompts = pin_argument(policy), pin_argument(prompts_of(config))

    def start(name: str) -> Any:
        return remote.options(
            name=f"{name}@{run_name}",
            num_cpus=0,
            resources={"judge": 1},
            # Above the pool's limit: abandoned calls still run, and the health check `up` must get through.
            max_concurrency=4 * config.concurrency_per_worker,
            # A new process repeats the phase; replies that had arrived come from the durable cache.
            max_restarts=-1,
            # Retry at the same worker; if its node is gone this fails within seconds, and the pool retries elsewhere.
            max_task_retries=1,
        ).remote(config, kept_policy, leases, servers, replies, own_replies, prompts)

    return start


class JudgePool(MonitoredWorkers[Any]):
    """Autoscaled judge workers and the union actor.

    A phase that is retried at another worker asks nothing twice: earlier replies are in the durable cache. While the
    union actor is down, its calls go to a worker.
    """

    def __init__(self, start: Callable[[str], Any], config: JudgeConfig) -> None:
        """Prepare the pool; nothing is started yet.

        Args:
            start: function that requests a judge actor with the given name from Ray and returns its handle at once.
            config: limits and timeouts.
        """
        self._start = start
        self._config = config
        workers: ElasticWorkers[Any] = ElasticWorkers(
            lambda number: start(f"JudgeWorker-{number}"),
            slots=config.concurrency_per_worker,
            min_workers=config.workers,
            max_workers=config.max_workers,
            idle_seconds=config.idle_seconds,
        )
        super().__init__(workers, up=monitor.wait_until_up, end=ray.kill, restart=monitor.restart)
        self._union: PooledWorker[Any] | None = None

    @property
    def in_flight(self) -> int:
        """Number of phases in flight."""
        return self.workers.in_flight + (self._union.calls if self._union is not None else 0)

    def open(self) -> None:
        """Request the minimum number of workers and the union actor; needs a running event loop, returns at once."""
        # Start the workers first: if resources are short, a worker can also take the union's calls, but not vice versa.
        super().open()
        self._union = PooledWorker(self._start("RubricUnion"), -1, 0.0)
        self.monitor(self._union)

    async def ready(self) -> None:
        """Return once a worker is up and the judge answers it.

        Raises:
            JudgeUnavailable: the judge cannot be reached from where the worker runs.
            ClusterError: no worker came up.
        """
        seconds = self._config.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                place = await self.workers.acquire()
        except TimeoutError:
            raise ClusterError(
                f"no judge worker started within judge.start_timeout_seconds={seconds:g}; each needs one unit of the "
                "custom resource 'judge', check the cluster's resources with `ray status`"
            ) from None
        try:
            await place.worker.check.remote()
        finally:
            self.workers.release(place)

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """Ask a question of ``phase``; see `draco_ray.judging.pool.JudgeWorkerActor.ask`."""
        label = context.task_id if context.rollout is None else f"{context.task_id}/{context.rollout}"
        started = time.time()

        def send(worker: Any) -> PendingCall[tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]], PhaseSummary]:
            # No task id in the name: Ray keeps a metric for every name that was ever used.
            judged, archived, summary = worker.ask.options(name=phase.name).remote(phase, context, **given)
            return PendingCall((judged, archived), monitor.answer(summary), partial(ray.cancel, summary))

        preferred = self._union if issubclass(phase, Union) else None
        found = await self.call(send, rank=phase_rank(phase.name), preferred=preferred)
        if found is not None:
            (judged, archived), summary = found
            return Judgement(judged=judged, archived=archived, summary=summary)
        error = f"{phase.name} of {label}: {MAX_ATTEMPTS} judge workers in a row hung or were lost during this call"
        log.error("%s; the call has no result", error)
        failed: Judged[Any] = Judged(value=None, error=error)
        nothing = ray.put(failed)
        summary = phase_summary(phase.name, context, failed, started)
        return Judgement(judged=nothing, archived=nothing, summary=summary)

"""The Ray shell of `draco_ray.judging.judge.Judge`: a phase, and its summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.engine.actor import EngineClient
from draco_ray.judging.build import prompts_of
from draco_ray.judging.endpoint import Servers
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.limiter import Leases
from draco_ray.judging.phases.base import Phase
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.observability.logs import start_run_log, working_on
from draco_ray.records import Judged
from draco_ray.summaries import PhaseSummary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJudge:
    """How a self-judge reaches the policy."""

    samplers: Sequence[EngineClient]
    tokenizer: Any
    name: str
    """Of the model, in the books."""


class JudgeWorkerActor:
    """One asynchronous judge client with many calls in flight."""

    def __init__(
        self,
        config: JudgeConfig,
        policy: PolicyJudge,
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
            if config.self_judge.enabled
            else build_judge(config, leases, servers, replies=replies, own_replies=own_replies, prompts=prompts)
        )

    async def up(self) -> str:
        """The node this process runs on; an answer means that phases would be answered as well."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def check(self) -> None:
        """Raise JudgeUnavailable now rather than in the middle of a step."""
        await self._judge.check()

    @ray.method(num_returns=3)
    async def ask(
        self, phase: Phase, context: CallContext, **given: Any
    ) -> tuple[Judged[Any], Judged[Any], PhaseSummary]:
        """Ask a question of ``phase``; returns the answer, the same with its calls, for the archive, and a summary.

        Args:
            phase: what is asked.
            context: for the archive.
            given: the question's fields. What another phase returned stands for its value, or for nothing where it
                failed; a list may hold references, and the values of several phases become one sequence.
        """
        working_on(context.group, context.rollout)
        started = time.time()
        question = phase(**{name: await _value(each) for name, each in given.items()})
        judged = await self._judge.ask(question, context)
        for note in judged.notes:
            log.warning("%s of %s: %s", phase.name, context.group, note)
        # Whoever reads verdicts is spared the prompts: they go from here to the run store.
        return replace(judged, calls=()), judged, phase_summary(phase.name, context, judged, started)


async def _value(given: Any) -> Any:
    if isinstance(given, ray.ObjectRef):
        given = await given
    if isinstance(given, Judged):
        return given.value or ()
    if not isinstance(given, list):
        return given
    found = [await each if isinstance(each, ray.ObjectRef) else each for each in given]
    if any(isinstance(each, Judged) for each in found):
        return [value for judged in found for value in judged.value or ()]
    return found


def judge_starter(
    config: JudgeConfig,
    policy: PolicyJudge,
    leases: Leases | None,
    run_name: str,
    servers: Servers | None = None,
    replies: ReplyCache | None = None,
    *,
    own_replies: bool = False,
) -> Callable[[str], Any]:
    """What starts a judge actor of a given name: workers and the union alike ask for one of the resource ``judge``.

    They may run on hosts that see no file of the driver's: prompts and examples come with them, and ``replies``
    (`draco_ray.judging.actors.start_replies`) are reached through Ray; ``own_replies`` as of `build_judge`.

    Raises:
        ConfigError, StoreError: as `prompts_of`.
    """
    remote, prompts = ray.remote(JudgeWorkerActor), prompts_of(config)

    def start(name: str) -> Any:
        return remote.options(
            name=f"{name}@{run_name}",
            num_cpus=0,
            resources={"judge": 1},
            # More than it answers at once: calls that it was given up on still run, and `up` must always get through.
            max_concurrency=4 * config.concurrency_per_worker,
            # A new process repeats the phase, and takes replies that had come already from the durable cache.
            max_restarts=-1,
            # At the same worker, and in seconds where its node is gone: then the pool has the phase made elsewhere.
            max_task_retries=1,
        ).remote(config, policy, leases, servers, replies, own_replies, prompts)

    return start


def phase_summary(phase: str, context: CallContext, judged: Judged[Any], started: float) -> PhaseSummary:
    """What the driver is told of a phase that began at ``started`` and ends now."""
    calls = judged.calls
    return PhaseSummary(
        phase=phase,
        task_id=context.task_id,
        rollout=context.rollout,
        error=judged.error,
        criteria=len(judged.value or ()),
        calls=len(calls),
        requests=sum(call.requests for call in calls),
        input_tokens=sum(call.input_tokens for call in calls),
        cached_tokens=sum(call.cached_tokens for call in calls),
        output_tokens=sum(call.output_tokens for call in calls),
        dollars=sum(call.dollars for call in calls),
        looked_at=judged.looked_at,
        contradicted=judged.contradicted,
        prompt_cut=judged.left_out > 0,
        started_at=started,
        ended_at=time.time(),
    )

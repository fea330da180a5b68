"""The Ray shell of the judge: the five phases of `draco_ray.judging.judge.Judge`, each with its summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.engine.actor import EngineClient
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.limiter import Leases
from draco_ray.observability.logs import start_run_log, working_on
from draco_ray.records import (
    Attribution,
    Criterion,
    Judged,
    Message,
    Phase,
    ScoredCriterion,
    Trajectory,
    Verdict,
)
from draco_ray.summaries import PhaseSummary

Rubric = tuple[Criterion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a self-judge reaches the policy."""

    samplers: Sequence[EngineClient]
    model_path: str


class JudgeWorkerActor:
    """One asynchronous judge client with many calls in flight."""

    def __init__(self, config: JudgeConfig, policy: Policy, leases: Leases | None) -> None:
        from draco_ray.judging.judge import build_judge, build_self_judge

        start_run_log()
        self._judge: Judge = (
            build_self_judge(config, policy.samplers, policy.model_path)
            if config.self_judge.enabled
            else build_judge(config, leases)
        )

    async def up(self) -> str:
        """The node this process runs on; an answer means that phases would be answered as well."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def check(self) -> None:
        """Raise JudgeUnavailable now rather than in the middle of a step."""
        await self._judge.check()

    @ray.method(num_returns=2)
    async def stage1(
        self, group: str, task_id: str, prompt: tuple[Message, ...]
    ) -> tuple[Judged[Rubric], PhaseSummary]:
        """Criteria from the instruction alone."""
        working_on(group)
        started = time.time()
        judged = await self._judge.stage1(prompt, CallContext(group=group, task_id=task_id))
        return judged, phase_summary(Phase.STAGE1, task_id, None, judged, started)

    @ray.method(num_returns=2)
    async def stage2(self, trajectory: Trajectory, existing: Judged[Rubric]) -> tuple[Judged[Rubric], PhaseSummary]:
        """Criteria that this rollout reveals; a failed stage1 counts as no existing criteria."""
        working_on(trajectory.group, trajectory.rollout)
        started = time.time()
        judged = await self._judge.stage2(trajectory, existing.value or (), _context(trajectory))
        return judged, phase_summary(Phase.STAGE2, trajectory.task_id, trajectory.rollout, judged, started)

    @ray.method(num_returns=2)
    async def union(
        self,
        group: str,
        task_id: str,
        prompt: tuple[Message, ...],
        proposals: Sequence[ray.ObjectRef[Judged[Rubric]]],
        trajectories: Sequence[ray.ObjectRef[Trajectory]],
    ) -> tuple[Judged[Rubric], PhaseSummary]:
        """One rubric for the group from every proposal; nothing proposed is an empty rubric without a call."""
        working_on(group)
        started = time.time()
        judged_proposals = [await proposal for proposal in proposals]
        candidates = [criterion for judged in judged_proposals for criterion in judged.value or ()]
        rollouts = [await trajectory for trajectory in trajectories]
        judged = await self._judge.union(prompt, candidates, rollouts, CallContext(group=group, task_id=task_id))
        return judged, phase_summary(Phase.UNION, task_id, None, judged, started)

    @ray.method(num_returns=2)
    async def merge(self, name: str, prompt: str) -> tuple[Judged[Rubric], PhaseSummary]:
        """Merge what ``prompt`` lists; ``name`` stands for group and task in the archive."""
        started = time.time()
        judged = await self._judge.merge(prompt, CallContext(group=name, task_id=name))
        return judged, phase_summary(Phase.UNION, name, None, judged, started)

    @ray.method(num_returns=2)
    async def score(
        self, trajectory: Trajectory, rubric: Judged[Rubric]
    ) -> tuple[Judged[tuple[ScoredCriterion, ...]], PhaseSummary]:
        """A verdict per criterion."""
        working_on(trajectory.group, trajectory.rollout)
        started = time.time()
        judged = await self._judge.score(trajectory, rubric.value or (), _context(trajectory))
        verdicts = [score.verdict for score in judged.value or ()]
        summary = phase_summary(Phase.SCORE, trajectory.task_id, trajectory.rollout, judged, started, verdicts)
        return judged, summary

    @ray.method(num_returns=2)
    async def credit(
        self,
        trajectory: Trajectory,
        rubric: Judged[Rubric],
        scores: Judged[tuple[ScoredCriterion, ...]],
        criteria: tuple[int, ...] | None,
    ) -> tuple[Judged[tuple[Attribution, ...]], PhaseSummary]:
        """The steps responsible for each verdict, or for those of ``criteria``."""
        working_on(trajectory.group, trajectory.rollout)
        started = time.time()
        judged = await self._judge.credit(
            trajectory, rubric.value or (), scores.value or (), _context(trajectory), criteria
        )
        return judged, phase_summary(Phase.CREDIT, trajectory.task_id, trajectory.rollout, judged, started)


def judge_starter(config: JudgeConfig, policy: Policy, leases: Leases | None, run_name: str) -> Callable[[str], Any]:
    """What starts a judge actor of a given name: workers and the union alike ask for one of the resource ``judge``."""
    remote = ray.remote(JudgeWorkerActor)

    def start(name: str) -> Any:
        return remote.options(
            name=f"{name}@{run_name}",
            num_cpus=0,
            resources={"judge": 1},
            # Beside the calls it answers there are those whose worker was thought lost, and questions whether it is up.
            max_concurrency=4 * config.concurrency_per_worker,
            # A phase repeated by a new process takes the replies that had come from the durable cache.
            max_restarts=-1,
            max_task_retries=3,
        ).remote(config, policy, leases)

    return start


def _context(trajectory: Trajectory) -> CallContext:
    return CallContext(group=trajectory.group, task_id=trajectory.task_id, rollout=trajectory.rollout)


def phase_summary(
    phase: Phase,
    task_id: str,
    rollout: int | None,
    judged: Judged[Any],
    started: float,
    verdicts: Sequence[Verdict] = (),
) -> PhaseSummary:
    """What the driver is told of a phase that began at ``started`` and ends now."""
    calls = judged.calls
    return PhaseSummary(
        phase=phase,
        task_id=task_id,
        rollout=rollout,
        error=judged.error,
        criteria=len(judged.value or ()),
        passes=verdicts.count(Verdict.PASS),
        fails=verdicts.count(Verdict.FAIL),
        calls=len(calls),
        requests=sum(call.requests for call in calls),
        failed_calls=sum(call.error is not None for call in calls),
        input_tokens=sum(call.input_tokens for call in calls),
        cached_tokens=sum(call.cached_tokens for call in calls),
        output_tokens=sum(call.output_tokens for call in calls),
        dollars=sum(call.dollars for call in calls),
        started_at=started,
        ended_at=time.time(),
    )

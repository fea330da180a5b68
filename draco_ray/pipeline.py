"""The graph of one training step, without algorithms or I/O.

::

    task ──► stage1 (cached per task) ─────────────┐
      │                                            ▼
      └► rollout ×G ──► stage2 ×G ──► union ──► score ×G ──► credit ×G ──► advantages ──► learner

Arrows pass object references: a trajectory is written once, and readers map that copy. A rollout is judged as soon as
it ends, while others are still generating; a group's gradients are accumulated as soon as its advantages exist.

``algorithm.merge_proposals`` merges a group's stage2 calls into one, ``merge_verdicts`` a rollout's score and credit.
With ``rubric_visits`` a task's rubric is carried over to its next visits: proposals extend it during that many visits,
after which it no longer changes.

The parts, in this order: `draco_ray.rollout.worker` and `draco_ray.rollout.turn_agent` play a rollout;
`draco_ray.judging.judge` asks the questions of `draco_ray.judging.phases`; `draco_ray.algorithm.computer` applies
`draco_ray.algorithm.rules` and `draco_ray.algorithm.equations`; `draco_ray.training.trainer` feeds the learner,
`draco_ray.learner.worker` with `draco_ray.learner.lora_learner` and `draco_ray.learner.loss`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draco_ray.algorithm.rules import find_rule
from draco_ray.config.schema import AlgorithmConfig
from draco_ray.judging.held_out import HeldOutJudge, HeldOutScores
from draco_ray.judging.judge import CallContext, Judgement
from draco_ray.judging.phases import Credit, Phase, Proposals, Rubric, Score, Stage1, Stage2, Union, Verdicts
from draco_ray.observability.logs import set_log_context
from draco_ray.records import Judged, Message
from draco_ray.rollout.finished import FinishedRollout
from draco_ray.runs.rows import CarriedRubric
from draco_ray.summaries import AdvantageSummary, PhaseSummary, RewardSummary, RolloutSummary
from draco_ray.workers.local import Reference, resolve
from draco_ray.workers.tasks import gather_or_cancel

if TYPE_CHECKING:
    from draco_ray.judging.pool import JudgePool
    from draco_ray.rollout.pool import RolloutPool

MOST_GROUPS = 1_000_000
"""Number of priority values per step, so that every group of a step comes before those of the next step."""


Wait = Callable[[str, str], AbstractContextManager[None]]


@dataclass(slots=True, kw_only=True)
class Group:
    """A task's rollouts in a training step, and their results so far."""

    step: int
    index: int
    """Position in the step's batch; earlier groups and those of earlier steps have priority."""
    task_id: str
    prompt: tuple[Message, ...]
    members: str = "rollouts"
    """Word for the group's rollouts in error messages, such as ``traces``."""
    reason: str | None = None
    """Why the group was dropped from the update; None if it was not."""
    rollouts: list[RolloutSummary] = field(default_factory=list)
    phases: list[PhaseSummary] = field(default_factory=list)
    reward: RewardSummary | None = None
    advantage: AdvantageSummary | None = None
    held_out: asyncio.Task[HeldOutScores | None] | None = None
    """Scoring by the held-out judge; runs concurrently, and the group does not wait for it."""

    @property
    def name(self) -> str:
        """``step<n>/<task>``; in step 0, which training does not use, only the task."""
        return f"step{self.step}/{self.task_id}" if self.step else self.task_id


@dataclass
class Pipeline:
    """Runs groups, several at the same time, through the graph of a training step: from a task to training samples."""

    config: AlgorithmConfig
    rollouts: RolloutPool
    """Its `run` plays on a `draco_ray.rollout.worker.RolloutWorkerActor`. A lost rollout is retried with another seed;
    after the last retry the result's `member` is None."""
    judges: JudgePool
    """Its `ask` runs `draco_ray.judging.judge.ask_phase` in a judge worker; if that worker hangs or is lost, in another
    one. With ``judge.jury`` several judges vote on the verdicts (`draco_ray.judging.panel`)."""
    advantages: Any
    """The advantage actor: a `draco_ray.algorithm.computer.AdvantageComputer`, with `probe` for the canary."""
    keep: Any
    """The actor that stores results, a `draco_ray.runs.store_actor.RunStoreActor`, or a stand-in with its methods."""
    static_rubric: Any = None
    """A reference to the fixed rubric as a `Judged`, if there is one."""
    held_out: HeldOutJudge | None = None
    """Scores some rollouts with a second judge, whose scores are never trained on; None: no such judge."""
    carried: dict[str, CarriedRubric] = field(default_factory=dict)
    """The rubric that each task carries over to its next visit."""
    seed: int = 0
    least: int = 2
    """Minimum number of rollouts; a group with fewer is dropped."""
    watch: Callable[[Group], None] = lambda group: None
    """Called at every change of a group."""
    wait: Wait = lambda kind, which: nullcontext()
    """Takes the kind and name of what is awaited; returns a context manager that is open during the wait."""

    def __post_init__(self) -> None:
        self._cites = find_rule(self.config.rule, self.config.reliability).cites
        self._visits: dict[str, asyncio.Lock] = {}

    async def run(self, group: Group) -> Reference | None:
        """Run one group; returns a reference to its training samples, or None if it failed."""
        if self.config.rubric_visits is None:
            return await self._run(group)
        # With staleness a task's next visit may begin before this one has a rubric to carry over.
        async with self._visits.setdefault(group.task_id, asyncio.Lock()):
            return await self._run(group)

    async def _run(self, group: Group) -> Reference | None:
        set_log_context(group.name)
        existing = self._existing(group)
        if not isinstance(existing, asyncio.Task):
            return await self._played(group, existing)
        # If a rollout fails first, retrieve stage1's error, which asyncio would otherwise log.
        existing.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await self._played(group, existing)
        finally:
            existing.cancel()

    async def _played(
        self, group: Group, existing: asyncio.Task[Judgement] | Judged[Rubric] | None
    ) -> Reference | None:
        """Play the group's rollouts, and run everything after them in the graph."""
        members = await gather_or_cancel(
            self._member(group, rollout, existing) for rollout in range(self.config.group_size)
        )
        played = [member for member in members if member is not None]
        if len(played) < self.least:
            self._failed(
                group,
                f"{len(played)} of {self.config.group_size} rollouts finished; a group needs at least {self.least}",
            )
            return None
        if self.config.reward == "rubric":
            return await self._rubric_reward(group, [m for m, _ in played], [p for _, p in played if p], existing)
        return await self._plain_reward(group, [m for m, _ in played])

    def _existing(self, group: Group) -> asyncio.Task[Judgement] | Judged[Rubric] | None:
        """The criteria that proposals extend: stage1's or the rubric carried over; None if there are no proposals."""
        carried = self.carried.get(group.task_id, CarriedRubric())
        if not self._dynamic or carried.visits >= (self.config.rubric_visits or math.inf):
            return None
        if carried.rubric:
            return Judged(value=carried.rubric)
        return asyncio.create_task(self._ask(group, Stage1, messages=group.prompt))

    @property
    def _dynamic(self) -> bool:
        return self.config.reward == "rubric" and self.config.rubric == "dynamic"

    async def _member(
        self, group: Group, rollout: int, existing: asyncio.Task[Judgement] | Judged[Rubric] | None
    ) -> tuple[FinishedRollout, Judgement | None] | None:
        """Play one rollout and ask for its stage2 proposals, without waiting for the rest of the group."""
        set_log_context(group.name, rollout)
        with self.wait("rollout", f"{group.name}/{rollout}"):
            played = await self.rollouts.run(
                group.task_id, group.name, rollout, step=group.step, priority=group.step * MOST_GROUPS + group.index
            )
        member = played.member
        if member is None:
            return None
        group.rollouts.append(member.summary)
        # Store the rollout before judging it: a resumed run then asks the same questions and finds cached replies.
        with self.wait("writing a rollout", f"{group.name}/{rollout}"):
            await self.keep.trajectory.remote(group.step, member.trajectory)
        self.watch(group)
        if existing is None or self.config.merge_proposals:
            return member, None
        known = existing if isinstance(existing, Judged) else (await existing).judged
        return member, await self._ask(group, Stage2, member, trajectory=member.trajectory, existing=known)

    async def _rubric_reward(
        self,
        group: Group,
        members: list[FinishedRollout],
        proposals: list[Judgement],
        existing: asyncio.Task[Judgement] | Judged[Rubric] | None,
    ) -> Reference | None:
        """Run the graph from union to advantages, for rewards from a rubric."""
        if existing is not None:
            rubric = await self._rubric(group, members, proposals, existing)
            if rubric is None:
                return None
        elif self._dynamic:
            rubric = Judged(value=self.carried[group.task_id].rubric)
        else:
            rubric = self.static_rubric

        merged = self.config.merge_verdicts and self._cites
        scores = await gather_or_cancel(
            self._ask(group, Verdicts if merged else Score, member, trajectory=member.trajectory, rubric=rubric)
            for member in members
        )
        numbers = [member.rollout for member in members]
        with self.wait("advantages", group.name):
            group.reward = await self.advantages.rewards.remote(numbers, [score.judged for score in scores])
        if len(group.reward.scored) < self.least:
            self._failed(group, f"{len(group.reward.scored)} of {len(members)} {group.members} could be scored")
            return None
        if self.held_out is not None:
            context = CallContext(group=group.name, task_id=group.task_id)
            scored = [(m.rollout, m.trajectory, score.summary) for m, score in zip(members, scores, strict=True)]
            group.held_out = asyncio.create_task(
                self.held_out.score(group.step, context, scored, group.reward, rubric, group.phases)
            )

        credits: list[Judgement | None] | None = None
        if merged:
            credits = [*scores]
        elif self._credit_matters(group.reward):
            credits = await gather_or_cancel(
                self._credit(group, group.reward, member, rubric, score)
                for member, score in zip(members, scores, strict=True)
            )
        result = self.advantages.from_verdicts.remote(
            group.name,
            numbers,
            [member.trajectory for member in members],
            [score.judged for score in scores],
            None if credits is None else [credit and credit.judged for credit in credits],
        )
        return await self._credited(group, rubric, result)

    async def _rubric(
        self,
        group: Group,
        members: list[FinishedRollout],
        proposals: list[Judgement],
        existing: asyncio.Task[Judgement] | Judged[Rubric],
    ) -> Any:
        """The group's rubric or a reference to it: a new one, or the last visit's rubric with additions.

        Returns: None if no rubric could be made; the group has then failed.
        """
        stage1 = None if isinstance(existing, Judged) else await existing
        trajectories = [member.trajectory for member in members]
        if merged := self.config.merge_proposals:
            known = existing if stage1 is None else stage1.judged
            proposals = [
                await self._ask(group, Proposals, messages=group.prompt, candidates=known, trajectories=trajectories)
            ]
        written = proposals if stage1 is None else [stage1, *proposals]
        if stage1 is not None and not any(each.ok for each in written):
            self._failed(group, "no rubric: stage1 and every proposal failed")
            return None
        if stage1 is None and merged:
            return await self._extended(existing, proposals[0])
        union = await self._ask(
            group,
            Union,
            messages=group.prompt,
            candidates=[each.judged for each in written],
            trajectories=trajectories,
            doubtful=[] if merged else [m.rollout for m, each in zip(members, proposals, strict=True) if not each.ok],
        )
        if stage1 is None:
            return await self._extended(existing, union)
        if not union.ok:
            self._failed(group, f"no rubric: {union.summary.error}")
            return None
        return union.judged

    async def _extended(self, carried: Any, added: Judgement) -> Judged[Rubric]:
        """The rubric carried over, with the added criteria, if any."""
        return Judged(value=(*carried.value, *((await resolve(added.judged)).value or ())))

    async def _plain_reward(self, group: Group, members: list[FinishedRollout]) -> Reference:
        """Advantages in the settings without a rubric: rewards are from the environment's evaluator, or random."""
        numbers = [member.rollout for member in members]
        trajectories = [member.trajectory for member in members]
        evaluations = None
        if self.config.reward == "outcome":
            evaluations = [member.evaluation for member in members]
            for number, verdict in zip(numbers, evaluations, strict=True):
                self.keep.outcome.remote(group.step, number, verdict)
        key = (self.seed, group.step, group.index)
        result = self.advantages.from_rewards.remote(group.name, numbers, trajectories, evaluations, key)
        return await self._credited(group, None, result)

    async def _credit(
        self, group: Group, reward: RewardSummary, member: FinishedRollout, rubric: Reference, score: Judgement
    ) -> Judgement | None:
        if not score.ok:
            return score  # There are no verdicts to attribute; the rollout is left out of the statistics.
        if self.config.skip_inert_credit_calls and member.rollout in reward.unanimous:
            return None
        asked = reward.surviving if self.config.credit_surviving_only else None
        return await self._ask(
            group,
            Credit,
            member,
            trajectory=member.trajectory,
            rubric=rubric,
            scores=score.judged,
            criteria=asked,
        )

    def _credit_matters(self, reward: RewardSummary) -> bool:
        useless = not reward.has_spread or not reward.surviving
        return self._cites and not (useless and self.config.skip_useless_credit_calls)

    async def _credited(self, group: Group, rubric: Reference | None, result: Sequence[Reference]) -> Reference:
        samples, advantages, step_tokens, summary = result
        with self.wait("advantages", group.name):
            group.advantage = await summary
        if self.config.rubric_visits is not None and self._dynamic and (value := (await resolve(rubric)).value):
            visits = self.carried.get(group.task_id, CarriedRubric()).visits + 1
            self.carried[group.task_id] = CarriedRubric(visits=visits, rubric=value)
        self.keep.group.remote(group.step, group.task_id, rubric, advantages, step_tokens, self._row(group))
        self.watch(group)
        return samples

    async def _ask(self, group: Group, phase: Phase, member: FinishedRollout | None = None, **given: Any) -> Judgement:
        """Ask the judge about a member or the whole group, and store the reply."""
        rollout = None if member is None else member.rollout
        context = CallContext(group=group.name, task_id=group.task_id, rollout=rollout)
        with self.wait(f"judge's {phase.name}", group.name if rollout is None else f"{group.name}/{rollout}"):
            judgement = await self.judges.ask(phase, context, **given)
        group.phases.append(judgement.summary)
        self.keep.judged.remote(group.step, group.task_id, rollout, phase.name, judgement.archived)
        self.watch(group)
        return judgement

    def _failed(self, group: Group, reason: str) -> None:
        group.reason = reason
        self.keep.group.remote(group.step, group.task_id, None, None, None, self._row(group))
        self.watch(group)

    def _row(self, group: Group) -> dict[str, Any]:
        scored = len(group.reward.scored) if group.reward else len(group.rollouts)
        return {
            "state": "failed" if group.reason else "credited",
            "rollouts": len(group.rollouts),
            "lost": self.config.group_size - len(group.rollouts),
            "unscored": len(group.rollouts) - scored,
            "credit_failures": sum(p.phase == Credit.name and p.error is not None for p in group.phases),
            "reason": group.reason,
        }

"""Measures held-out tasks: by the environment's evaluator or, if it has none, by the judge's pass rate.

The judge scores rollouts by criteria that it writes from the task alone (stage 1), or by the static rubric. These
criteria do not depend on the policy and are the same before and after training. Each rollout is scored twice to measure
how far the judge agrees with itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from rich.console import Console

from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.environments.base import make_environment
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Score, Stage1
from draco_ray.pipeline import Wait
from draco_ray.records import Criterion, Evaluation, Judged, JudgedRollout, Message, Task, lost_evaluation
from draco_ray.rollout.pool import RolloutPool
from draco_ray.rollout.worker import Evaluated
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import (
    judged_rates,
    read_evaluations,
    read_judged,
    scenario_goal_completion,
    task_goal_completion,
)
from draco_ray.training.progress import StepProgress

if TYPE_CHECKING:
    from draco_ray.training.session import Actors


Tell = Callable[[int, Mapping[str, float]], object]
"""Called with the step of the measured policy and its rates in [0, 1] by name."""


@dataclass(frozen=True)
class HeldOutTasks:
    """Base class of `HeldOutEvaluator` and `HeldOutJudgeEvaluator`, which measure the split ``data.eval_split``."""

    config: DracoConfig
    actors: Actors
    run: RunDirectory
    """Where results are stored."""
    progress: StepProgress
    """Shows the number of finished rollouts."""
    console: Console
    tell: Tell = lambda step, rates: None
    """Called after each measurement, in a thread."""
    wait: Wait = lambda kind, which: nullcontext()
    """A context manager entered while waiting (`draco_ray.pipeline.Pipeline`)."""

    def tasks(self) -> list[Task]:
        """The tasks of the split that are measured."""
        environment, data = make_environment(self.config.environment, self.config.data), self.config.data
        return [environment.task(task) for task in environment.tasks(data.eval_split)[: data.eval_tasks]]


class HeldOutEvaluator(HeldOutTasks):
    """Measures the split with the environment's evaluator."""

    async def measure(self, step: int, done: int) -> list[Evaluation] | None:
        """The evaluations of the policy after ``step``, measured or read from the run directory.

        Args:
            step: 0 is the untrained policy.
            done: number of steps whose updates the engines have loaded.

        Returns: None if the engines have a later policy.
        """
        if (known := read_evaluations(self.run).get((step, self.config.data.eval_split))) is not None:
            return known
        return await self._evaluate(step) if step >= done else None

    async def _evaluate(self, step: int) -> list[Evaluation]:
        config = self.config
        tasks, runs = self.tasks(), config.train.evaluation_runs
        workers = self.actors.evaluation_workers()
        self.progress.start(f"evaluating {config.data.eval_split}", rollouts=len(tasks) * runs)
        try:
            pool = self.actors.pool(workers)
            played = (
                self._rollout(pool, step, index, task, run) for run in range(runs) for index, task in enumerate(tasks)
            )
            evaluations = await asyncio.gather(*played)
        finally:
            self.progress.stop()
            await workers.stop()
        with self.wait("the run store", ""):
            await self.actors.store.evaluations.remote(step, config.data.eval_split, evaluations)
        tgc, sgc = task_goal_completion(evaluations), scenario_goal_completion(evaluations)
        with self.wait("the trackers", ""):
            await asyncio.to_thread(self.tell, step, {"tgc": tgc, "sgc": sgc})
        lost = sum(evaluation.lost for evaluation in evaluations)
        moment = "before" if step == 0 else f"after step {step}"
        self.console.print(
            f"{moment}: TGC {tgc:.1%} SGC {sgc:.1%} on {config.data.eval_split} ({len(tasks)} tasks x {runs})"
            + (f"; {lost} rollouts were lost and count as failures" if lost else "")
        )
        return evaluations

    async def _rollout(self, pool: RolloutPool, step: int, index: int, task: Task, run: int) -> Evaluation:
        """Play a task; a rollout that is lost counts as a failure."""
        group = f"evaluation{step}/{task.task_id}"
        with self.wait("rollout", f"{group}/{run}"):
            played = await pool.run(task.task_id, group, run, step=step, priority=index)
            self.progress.advance()
            if played.member is None:
                return lost_evaluation(task, run)
            self.actors.store.trajectory.remote(step, played.member.trajectory, evaluated=True)
            evaluated: Evaluated = await played.member.evaluation
            return evaluated.evaluation

    def report(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> None:
        """Print a line comparing before and after."""
        before, after, of = on_the_same_tasks(before, after)
        if not before or not after:
            return
        first, last = task_goal_completion(before), task_goal_completion(after)
        self.console.print(
            f"held-out TGC {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points){of}, setting "
            f"{self.config.setting}, seed {self.config.seed}"
        )


RolloutT = TypeVar("RolloutT", Evaluation, JudgedRollout)


def on_the_same_tasks(
    before: Sequence[RolloutT], after: Sequence[RolloutT]
) -> tuple[list[RolloutT], list[RolloutT], str]:
    """The rollouts of tasks that are in both, and a remark if some tasks are in only one.

    A resumed run may have had other held-out tasks when it began.
    """
    first, last = ({rollout.task_id for rollout in rollouts} for rollouts in (before, after))
    both = first & last
    of = "" if first == last else f" on the {len(both)} of {len(first | last)} tasks that were measured both times"
    return [each for each in before if each.task_id in both], [each for each in after if each.task_id in both], of


def is_complete(known: Sequence[JudgedRollout], tasks: Sequence[str], config: DracoConfig) -> bool:
    """Whether every rollout of these tasks has been judged; if the run was killed, only some may have been."""
    wanted = {(task, run) for task in tasks for run in range(config.train.evaluation_runs)}
    # `known` may also contain verdicts on tasks that are no longer held out.
    return wanted <= {(each.task_id, each.run) for each in known}


@dataclass(frozen=True, slots=True)
class UncachedScore(Score):
    """`Score` with a cache scope of its own, so that the reply to the first scoring is not reused."""

    def scope(self, config: JudgeConfig, group: str) -> str:
        """See `Question`."""
        return "again"


@dataclass(frozen=True, kw_only=True)
class HeldOutJudgeEvaluator(HeldOutTasks):
    """Measures the split by the judge's pass rate."""

    prompts: Callable[[Sequence[str]], Mapping[str, tuple[Message, ...]]]
    """Task ids -> the agent's prompt of each task, by task id."""
    static: Sequence[Criterion]
    """The rubric of every task; if empty, the judge writes one per task."""

    async def measure(self, step: int, done: int) -> list[JudgedRollout] | None:
        """The judged rollouts of the policy after ``step``; see `HeldOutEvaluator.measure`."""
        tasks, split = self.tasks(), self.config.data.eval_split
        known = read_judged(self.run).get((step, split), [])
        if step >= done and not is_complete(known, [task.task_id for task in tasks], self.config):
            return await self._judge(step, tasks)
        # An earlier policy can no longer be judged. Use its stored results, even if they are of other tasks.
        return known or None

    async def _judge(self, step: int, tasks: Sequence[Task]) -> list[JudgedRollout]:
        runs, split = self.config.train.evaluation_runs, self.config.data.eval_split
        prompts = self.prompts([task.task_id for task in tasks])
        # Judging needs no ground truth, so the training workers, which are idle now, play the rollouts.
        pool = self.actors.pool(self.actors.workers)
        self.progress.start(f"judging {split}", rollouts=len(tasks) * runs)
        try:
            found = await asyncio.gather(
                *(self._task(pool, step, index, task, prompts[task.task_id]) for index, task in enumerate(tasks))
            )
        finally:
            self.progress.stop()
        rollouts = [rollout for of_task in found for rollout in of_task]
        moment, rates = "before" if step == 0 else f"after step {step}", judged_rates(rollouts)
        if rates.pass_rate is not None:
            with self.wait("the trackers", ""):
                await asyncio.to_thread(self.tell, step, {"judged_pass_rate": rates.pass_rate.mean})
        self.console.print(f"{moment}: on {split}: {rates}")
        return rollouts

    async def _task(
        self, pool: RolloutPool, step: int, index: int, task: Task, prompt: tuple[Message, ...]
    ) -> list[JudgedRollout]:
        """Judge one task: write its rubric, and score its rollouts."""
        context = CallContext(group=f"heldout/{task.task_id}", task_id=task.task_id)
        rubric = asyncio.create_task(self._rubric(step, context, prompt))
        try:
            runs = range(self.config.train.evaluation_runs)
            return list(await asyncio.gather(*(self._rollout(pool, step, index, task, run, rubric) for run in runs)))
        finally:
            rubric.cancel()
            await asyncio.gather(rubric, return_exceptions=True)

    async def _rubric(self, step: int, context: CallContext, prompt: tuple[Message, ...]) -> ray.ObjectRef[Any]:
        if self.static:
            static: ray.ObjectRef[Any] = ray.put(Judged(value=tuple(self.static)))
            return static
        with self.wait(f"judge's {Stage1.name}", context.group):
            written = await self.actors.judges.ask(Stage1, context, messages=prompt)
        self.actors.store.heldout_calls.remote(step, f"{context.task_id}-stage1", written.archived)
        return written.judged

    async def _rollout(
        self,
        pool: RolloutPool,
        step: int,
        index: int,
        task: Task,
        run: int,
        writing: asyncio.Task[ray.ObjectRef[Any]],
    ) -> JudgedRollout:
        store, split = self.actors.store, self.config.data.eval_split
        which = f"heldout{step}/{task.task_id}/{run}"
        with self.wait("rollout", which):
            played = await pool.run(task.task_id, f"heldout{step}/{task.task_id}", run, step=step, priority=index)
        self.progress.advance()
        rubric, scores = await writing, []
        if played.member is not None:
            trajectory = played.member.trajectory
            store.trajectory.remote(step, trajectory, evaluated=True)
            context = CallContext(group=f"heldout{step}/{task.task_id}", task_id=task.task_id, rollout=run)
            asked = (
                self.actors.judges.ask(phase, context, trajectory=trajectory, rubric=rubric)
                for phase in (Score, UncachedScore)
            )
            with self.wait(f"judge's {Score.name}", which):
                scores = [judgement.archived for judgement in await asyncio.gather(*asked)]
        with self.wait("writing a rollout", which):
            found: JudgedRollout = await store.heldout.remote(step, split, task, run, rubric, *scores)
        return found

    def report(self, before: Sequence[JudgedRollout], after: Sequence[JudgedRollout]) -> None:
        """Print a line comparing before and after."""
        before, after, of = on_the_same_tasks(before, after)
        first, last = (judged_rates(rollouts).pass_rate for rollouts in (before, after))
        if first is None or last is None:
            return
        self.console.print(
            f"held-out judge's pass rate {first} -> {last}{of} (a stand-in, because there is no evaluator; intervals "
            f"over tasks), setting {self.config.setting}, seed {self.config.seed}",
        )

"""The stand-in for success where an environment has no evaluator: the judge's pass rate on held-out tasks.

A task's rollouts are scored by criteria that the judge writes from the task alone (stage 1), or by the static rubric:
they depend on no policy, and are the same before and after. Each rollout is scored twice, so that it shows how far the
judge agrees with itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from rich.console import Console

from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.environments.base import make_environment
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.pipeline import Wait
from draco_ray.records import Criterion, Judged, JudgedRollout, Message, Task
from draco_ray.rollout.pool import RolloutPool
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.judged import judged_rates, read_judged
from draco_ray.training.before_after import Tell, on_the_same_tasks
from draco_ray.training.progress import StepProgress

if TYPE_CHECKING:
    from draco_ray.training.actors import Actors


@dataclass(frozen=True, slots=True)
class ScoreAgain(Score):
    """The same question once more, to which no reply is kept from the first time."""

    def scope(self, config: JudgeConfig, group: str) -> str:
        """See `Question`."""
        return "again"


class JudgedBeforeAfter:
    """Judges the split ``data.eval_split`` where ``train.evaluate_before_after`` asks for it."""

    def __init__(
        self,
        config: DracoConfig,
        actors: Actors,
        run: RunDirectory,
        progress: StepProgress,
        console: Console,
        *,
        prompts: Callable[[Sequence[str]], Mapping[str, tuple[Message, ...]]],
        static: Sequence[Criterion],
        tell: Tell = lambda step, rates: None,
        wait: Wait = lambda kind, which: nullcontext(),
    ) -> None:
        """The first five and the last two are those of `BeforeAfter`.

        Args:
            prompts: the agent's prompts of tasks.
            static: the rubric of every task; empty: the judge writes one for each.
        """
        self._config, self._actors, self._run = config, actors, run
        self._progress, self._console, self._tell, self._wait = progress, console, tell, wait
        self._prompts, self._static = prompts, tuple(static)

    async def measure(self, step: int, done: int) -> list[JudgedRollout] | None:
        """What the judge says of the policy of ``step``; see `BeforeAfter.measure`."""
        if not self._config.train.evaluate_before_after:
            return None
        environment, split = make_environment(self._config.environment, self._config.data), self._config.data.eval_split
        tasks = [environment.task(task) for task in environment.tasks(split)[: self._config.data.eval_tasks]]
        known = read_judged(self._run).get((step, split), [])
        wanted = {(task.task_id, run) for task in tasks for run in range(self._config.train.evaluation_runs)}
        # A run that was killed meanwhile has left half of it.
        if step >= done and {(each.task_id, each.run) for each in known} != wanted:
            return await self._judge(step, tasks)
        # Of a policy that is gone there is what was asked then, of whichever tasks were held out.
        return known or None

    async def _judge(self, step: int, tasks: Sequence[Task]) -> list[JudgedRollout]:
        runs, split = self._config.train.evaluation_runs, self._config.data.eval_split
        prompts = self._prompts([task.task_id for task in tasks])
        # No ground truth is asked for: the workers that train are free, and will do.
        pool = self._actors.pool(self._actors.workers)
        self._progress.start(f"judging {split}", 0, len(tasks) * runs)
        try:
            found = await asyncio.gather(
                *(self._task(pool, step, index, task, prompts[task.task_id]) for index, task in enumerate(tasks))
            )
        finally:
            self._progress.stop()
        rollouts = [rollout for of_task in found for rollout in of_task]
        moment, rates = "before" if step == 0 else f"after step {step}", judged_rates(rollouts)
        if rates.pass_rate is not None:
            with self._wait("the trackers", ""):
                await asyncio.to_thread(self._tell, step, {"judged_pass_rate": rates.pass_rate.mean})
        self._console.print(f"{moment}: on {split}: {rates}")
        return rollouts

    async def _task(
        self, pool: RolloutPool, step: int, index: int, task: Task, prompt: tuple[Message, ...]
    ) -> list[JudgedRollout]:
        """One task: its rubric, and its rollouts by that."""
        context = CallContext(group=f"heldout/{task.task_id}", task_id=task.task_id)
        rubric = asyncio.create_task(self._rubric(step, context, prompt))
        try:
            runs = range(self._config.train.evaluation_runs)
            return list(await asyncio.gather(*(self._rollout(pool, step, index, task, run, rubric) for run in runs)))
        finally:
            rubric.cancel()
            await asyncio.gather(rubric, return_exceptions=True)

    async def _rubric(self, step: int, context: CallContext, prompt: tuple[Message, ...]) -> ray.ObjectRef[Any]:
        if self._static:
            static: ray.ObjectRef[Any] = ray.put(Judged(value=self._static))
            return static
        with self._wait(f"judge's {Stage1.name}", context.group):
            written = await self._actors.judges.ask(Stage1, context, messages=prompt)
        self._actors.store.heldout_calls.remote(step, f"{context.task_id}-stage1", written.archived)
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
        store, split = self._actors.store, self._config.data.eval_split
        which = f"heldout{step}/{task.task_id}/{run}"
        with self._wait("rollout", which):
            played = await pool.run(task.task_id, f"heldout{step}/{task.task_id}", run, step=step, priority=index)
        self._progress.advance()
        rubric, scores = await writing, []
        if played.member is not None:
            trajectory = played.member.trajectory
            store.evaluated_trajectory.remote(step, trajectory)
            context = CallContext(group=f"heldout{step}/{task.task_id}", task_id=task.task_id, rollout=run)
            asked = (
                self._actors.judges.ask(phase, context, trajectory=trajectory, rubric=rubric)
                for phase in (Score, ScoreAgain)
            )
            with self._wait(f"judge's {Score.name}", which):
                scores = [judgement.archived for judgement in await asyncio.gather(*asked)]
        with self._wait("writing of a rollout", which):
            found: JudgedRollout = await store.heldout.remote(step, split, task, run, rubric, *scores)
        return found

    def report(self, before: Sequence[JudgedRollout], after: Sequence[JudgedRollout]) -> None:
        """Print a line on what training changed."""
        before, after, of = on_the_same_tasks(before, after)
        first, last = (judged_rates(rollouts).pass_rate for rollouts in (before, after))
        if first is None or last is None:
            return
        self._console.print(
            f"held-out judge's pass rate {first} -> {last}{of} (a stand-in: there is no evaluator; intervals over "
            f"tasks), setting {self._config.setting}, seed {self._config.seed}",
        )

"""What the policy achieves on held-out tasks before the first and after the last step.

The environment's own evaluator judges it. The workers used here load ground truth and are separate from those that
train; they are gone before training goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

import ray
from rich.console import Console

from draco_ray.config.schema import DracoConfig
from draco_ray.environments.base import make_environment
from draco_ray.pipeline import Wait
from draco_ray.records import Evaluation, Task, Trajectory, lost_evaluation
from draco_ray.rollout.pool import RolloutPool
from draco_ray.rollout.worker import Evaluated
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations
from draco_ray.runs.goals import scenario_goal_completion, task_goal_completion
from draco_ray.training.progress import StepProgress

if TYPE_CHECKING:
    from draco_ray.training.actors import Actors

Tell = Callable[[int, Mapping[str, float]], object]
"""Is given the step of a policy that was measured, and its rates in [0, 1] by name."""


class BeforeAfter:
    """Evaluates the split ``data.eval_split`` where ``train.evaluate_before_after`` asks for it."""

    def __init__(
        self,
        config: DracoConfig,
        actors: Actors,
        run: RunDirectory,
        progress: StepProgress,
        console: Console,
        tell: Tell = lambda step, rates: None,
        wait: Wait = lambda kind, which: nullcontext(),
    ) -> None:
        """
        Args:
            config: the run's.
            actors: that play.
            run: where it is kept.
            progress: is told of what is played.
            console: to print on.
            tell: called after each measurement, in a thread.
            wait: entered while something is waited for (`draco_ray.pipeline.Pipeline`).
        """
        self._config, self._actors, self._run = config, actors, run
        self._progress, self._console, self._tell, self._wait = progress, console, tell, wait

    async def measure(self, step: int, done: int) -> list[Evaluation] | None:
        """What the policy of ``step`` achieves, measured or read from the run directory.

        Args:
            step: 0 is the untrained policy.
            done: steps whose updates the engines have.

        Returns: None if it is not asked for, or if that policy is gone.
        """
        if not self._config.train.evaluate_before_after:
            return None
        if (known := read_evaluations(self._run).get((step, self._config.data.eval_split))) is not None:
            return known
        return await self._evaluate(step) if step >= done else None

    async def _evaluate(self, step: int) -> list[Evaluation]:
        config = self._config
        environment = make_environment(config.environment, config.data)
        split = environment.tasks(config.data.eval_split)[: config.data.eval_tasks]
        tasks = [environment.task(task_id) for task_id in split]
        runs = config.train.evaluation_runs
        workers = self._actors.evaluation_workers()
        self._progress.start(f"evaluating {config.data.eval_split}", 0, len(tasks) * runs)
        try:
            pool = self._actors.pool(workers)
            store = self._actors.store
            evaluations = await evaluate_tasks(
                pool,
                tasks,
                runs,
                step=step,
                keep=lambda trajectory: store.evaluated_trajectory.remote(step, trajectory),
                done=self._progress.advance,
                wait=self._wait,
            )
        finally:
            self._progress.stop()
            await workers.stop()
        with self._wait("the run store", ""):
            await self._actors.store.evaluations.remote(step, config.data.eval_split, evaluations)
        tgc, sgc = task_goal_completion(evaluations), scenario_goal_completion(evaluations)
        with self._wait("the trackers", ""):
            await asyncio.to_thread(self._tell, step, {"tgc": tgc, "sgc": sgc})
        lost = sum(evaluation.lost for evaluation in evaluations)
        moment = "before" if step == 0 else f"after step {step}"
        self._console.print(
            f"{moment}: TGC {tgc:.1%} SGC {sgc:.1%} on {config.data.eval_split} ({len(tasks)} tasks x {runs})"
            + (f"; {lost} rollouts were lost and count as failures" if lost else "")
        )
        return evaluations

    def report(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> None:
        """Print a line on what training changed."""
        before, after, of = on_the_same_tasks(before, after)
        if not before or not after:
            return
        first, last = task_goal_completion(before), task_goal_completion(after)
        self._console.print(
            f"held-out TGC {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points){of}, setting "
            f"{self._config.setting}, seed {self._config.seed}"
        )


class OfTask(Protocol):
    """A held-out rollout."""

    @property
    def task_id(self) -> str:
        """The task's."""


RolloutT = TypeVar("RolloutT", bound=OfTask)


def on_the_same_tasks(
    before: Sequence[RolloutT], after: Sequence[RolloutT]
) -> tuple[list[RolloutT], list[RolloutT], str]:
    """The rollouts of tasks that both have, and which these are where that has to be said: a resumed run may have held
    out others when it began.
    """
    first, last = ({rollout.task_id for rollout in rollouts} for rollouts in (before, after))
    both = first & last
    of = "" if first == last else f" on the {len(both)} of {len(first | last)} tasks that were played both times"
    return [each for each in before if each.task_id in both], [each for each in after if each.task_id in both], of


async def evaluate_tasks(
    pool: RolloutPool,
    tasks: Sequence[Task],
    runs: int,
    *,
    step: int,
    keep: Callable[[ray.ObjectRef[Trajectory]], object],
    done: Callable[[], None] = lambda: None,
    wait: Wait = lambda kind, which: nullcontext(),
) -> list[Evaluation]:
    """Play every task ``runs`` times; a rollout that is lost counts as a failure.

    Args:
        pool: workers that load ground truth.
        step: the training step whose adapter is loaded; 0 is the untrained policy.
        keep: given the trajectory of every rollout that was not lost.
        done: called after every rollout.
        wait: as of `BeforeAfter`.
    """

    async def one(index: int, task: Task, run: int) -> Evaluation:
        group = f"evaluation{step}/{task.task_id}"
        with wait("rollout", f"{group}/{run}"):
            played = await pool.run(task.task_id, group, run, step=step, priority=index)
            done()
            if played.member is None:
                return lost_evaluation(task, run)
            keep(played.member.trajectory)
            evaluated: Evaluated = await played.member.evaluation
            return evaluated.evaluation

    work = [one(index, task, run) for run in range(runs) for index, task in enumerate(tasks)]
    return list(await asyncio.gather(*work))

"""Before and after: the current policy on held-out tasks, judged by the environment's own evaluator.

The workers used here load ground truth and are separate from those that train; they are gone before training goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import ray

from draco_ray.records import Evaluation, Task, Trajectory, lost_evaluation
from draco_ray.rollout.pool import RolloutPool
from draco_ray.rollout.worker import Evaluated


async def evaluate_tasks(
    pool: RolloutPool,
    tasks: Sequence[Task],
    runs: int,
    *,
    step: int,
    keep: Callable[[ray.ObjectRef[Trajectory]], object],
    done: Callable[[], None] = lambda: None,
) -> list[Evaluation]:
    """Play every task ``runs`` times; a rollout that is lost counts as a failure.

    Args:
        pool: workers that load ground truth.
        step: the training step whose adapter is loaded; 0 is the untrained policy.
        keep: given the trajectory of every rollout that was not lost.
        done: called after every rollout.
    """

    async def one(index: int, task: Task, run: int) -> Evaluation:
        played = await pool.run(task.task_id, f"evaluation{step}/{task.task_id}", run, step=step, priority=index)
        done()
        if played.member is None:
            return lost_evaluation(task, run)
        keep(played.member.trajectory)
        evaluated: Evaluated = await played.member.evaluation
        return evaluated.evaluation

    work = [one(index, task, run) for run in range(runs) for index, task in enumerate(tasks)]
    return list(await asyncio.gather(*work))

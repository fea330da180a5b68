"""Before and after: the current policy on held-out tasks, judged by AppWorld's own evaluator.

The workers used here load ground truth and are separate from those that train; they are gone before training goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from draco_ray.records import LOST, EpisodeEnd, Evaluation, Termination
from draco_ray.rollout.pool import RolloutPool


async def evaluate_tasks(
    pool: RolloutPool, tasks: Sequence[str], runs: int, *, step: int, done: Callable[[], None] = lambda: None
) -> list[Evaluation]:
    """Play every task ``runs`` times; a rollout that is lost counts as a failure.

    Args:
        pool: workers that load ground truth.
        step: the training step whose adapter is loaded; 0 is the untrained policy.
        done: called after every rollout.
    """

    async def one(index: int, task_id: str, run: int) -> Evaluation:
        member = await pool.run(task_id, f"evaluation{step}/{task_id}", run, step=step, priority=index)
        done()
        if member is None:
            return Evaluation(
                task_id=task_id,
                run=run,
                success=False,
                passed_tests=0,
                total_tests=0,
                turns=0,
                ended=EpisodeEnd.SERVER_ERROR,
                termination=Termination.SERVER_ERROR,
                failures=(LOST,),
            )
        evaluation: Evaluation = await member.evaluation
        return evaluation

    work = [one(index, task_id, run) for run in range(runs) for index, task_id in enumerate(tasks)]
    return list(await asyncio.gather(*work))

"""Drives the real rollout pool on the cluster of RAY_ADDRESS and prints what it saw, for `test_rollout_autoscaling`.

Workers, pool and Ray are real; the agent plays no world, it waits for a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from draco_ray.config.load import load_config
from draco_ray.environments.base import Environment, World
from draco_ray.records import Message, Task, Trajectory
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.pool import RolloutPool, RolloutWorkers
from draco_ray.rollout.worker import rollout_starter
from draco_ray.training.cluster import connect_ray
from draco_ray.workers.elastic import fixed_workers
from tests.support.autoscaling import added_nodes, lose_node, poll_until
from tests.support.small_run import a_trajectory

ROLLOUTS, SLOTS = 6, 3
IDLE_SECONDS = 2.0
"""Idle time after which a worker is removed, in the part that tests this."""


class Nothing(Environment):
    """Worlds in which nothing can be done."""

    def tasks(self, split: str) -> list[str]:
        """One task."""
        return ["t_1"]

    def task(self, task_id: str) -> Task:
        """A task that asks for nothing."""
        return Task(task_id=task_id, instruction="Wait.")

    async def open(self, task_id: str) -> World:
        """A world that has its task."""
        world: Any = _World(self.task(task_id))
        return world


class _World:
    def __init__(self, task: Task) -> None:
        self.task = task

    async def close(self) -> None:
        """Nothing was opened."""


class Waits:
    """An agent whose episode ends when the file exists that the policy names."""

    def __init__(self, policy: Any, config: Any, template: str) -> None:
        self._go: Path = policy

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """The task."""
        return (Message(role="user", content=task.instruction),)

    async def run(self, world: World, request: RolloutRequest) -> Trajectory:
        """Write this process's id to a file, then wait."""
        (self._go.parent / f"{request.rollout}.{request.attempt}").write_text(str(os.getpid()))
        while not self._go.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return replace(a_trajectory(1, request.task_id, request.rollout), attempt=request.attempt)


async def grow_and_shrink(workers: RolloutWorkers, again: RolloutWorkers, folder: Path) -> dict[str, Any]:
    """Play more rollouts than there are slots, lose a node during one, then play nothing."""
    workers.open()
    pool = RolloutPool(workers, fixed_workers(1, SLOTS), 1, seed=0)
    seen: dict[str, Any] = {}

    def alone(when: str) -> bool:
        # Record what the condition saw: a node that is no longer needed may still join, and leave.
        seen.update({f"up_{when}": workers.elastic.up, f"nodes_{when}": len(added_nodes())})
        return (seen[f"up_{when}"], seen[f"nodes_{when}"]) == (1, 0)

    await poll_until(lambda: alone("at_first"))
    playing = [
        asyncio.create_task(pool.run("t_1", "step1/t_1", rollout, step=1, priority=rollout))
        for rollout in range(ROLLOUTS)
    ]
    await poll_until(lambda: len(list(folder.glob("*.0"))) == SLOTS)
    seen |= {
        "most_up": workers.elastic.up,
        "waiting": pool.workers.elastic.waiting,
        "nodes": len(before := added_nodes()),
    }
    # The last worker is on an added node; a new worker plays its rollout again.
    process = int((folder / f"{SLOTS - 1}.0").read_text())
    lose_node(process)
    await poll_until(lambda: workers.elastic.up == SLOTS - 1)
    await poll_until(lambda: workers.elastic.up == SLOTS)
    seen["another_node"] = len(added_nodes() - before)
    (folder / "go").touch()
    played = await asyncio.gather(*playing)
    seen["rollouts"] = sorted(each.member.rollout for each in played if each.member is not None)
    seen["most_attempts"] = max(each.attempts for each in played)
    workers.elastic._idle_seconds = IDLE_SECONDS
    await poll_until(lambda: alone("at_last"))
    await workers.stop()
    # Like the workers of a later evaluation, which have the same names as those of an earlier one.
    again.open()
    await poll_until(lambda: again.elastic.up == 1)
    await again.stop()
    return seen | {"up_again": again.elastic.up}


def main(folder: Path) -> None:
    """Prints one JSON object."""
    here = "tests.support.rollout_autoscaling"
    config = load_config(
        "sandbox",
        [
            *(f"environment.use={here}:Nothing", f"agent.use={here}:Waits", f"environment.slots={SLOTS}"),
            *("environment.slots_per_worker=1", "environment.min_slots=1", "environment.cpus_per_worker=1"),
            # No worker may go before the rollouts end, however long a busy machine takes between two.
            "environment.idle_seconds=600",
            *("engine.cpus_per_engine=0", "learner.cpus_per_worker=0"),
        ],
    )
    connect_ray(config.updated(algorithm={"reward": "outcome"}))
    start = rollout_starter(
        lambda agent: [folder / "go"],  # type: ignore[list-item]
        agent=config.agent,
        environment=config.environment,
        data=config.data,
        ground_truth=False,
        run_name="autoscaling",
    )
    workers, again = (RolloutWorkers(start, config.environment) for _ in range(2))
    print(json.dumps(asyncio.run(grow_and_shrink(workers, again, folder))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

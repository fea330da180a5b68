"""AppWorld's evaluator once more, over the worlds that an evaluation's rollouts left, inside the jail.

AppWorld's own command executes the SQL of saved worlds wherever it is started; an evaluation directory may come from
anybody. Here each world is read, its statements checked and its tests run as they were after the rollout itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from draco_ray.config.file_names import file_name
from draco_ray.config.schema import DracoConfig
from draco_ray.environments.appworld.data_root import tasks_digest
from draco_ray.environments.appworld.saved_world import UnusableWorld, read_saved
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.appworld_outputs import outputs_folder
from draco_ray.lab.evaluation.results import EvaluationDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Reevaluated:
    """One rollout's world, evaluated again."""

    measurement: str
    run: int
    task_id: str
    recorded: bool
    """Whether the rollout's result says that it succeeded."""
    success: bool
    failures: tuple[str, ...]


async def reevaluate(directory: EvaluationDirectory, config: DracoConfig) -> list[Reevaluated]:
    """Evaluate every world that an evaluation's rollouts left, `environment.slots` at a time but no more than CPUs.

    Args:
        config: ``data.root`` and ``environment.*``; nothing of it is taken from the directory.
    Raises:
        ConfigError: ``data.root`` holds another world than the one evaluated, or the directory cannot be used.
        WorldError: it, or AppWorld's Python, cannot be used.
        EnvironmentCrashed: an evaluation was ended from outside.
    """
    root, plan = config.data.root.resolve(), directory.plan
    jobs = _recorded(directory)
    count = min(config.environment.slots, os.cpu_count() or 1, len(jobs))
    slots = [
        AppWorldSlot(config.environment, root, load_ground_truth=True, name=f"reevaluate-{index}")
        for index in range(count)
    ]
    if plan.world and plan.world != tasks_digest(root, list(plan.tasks)):
        raise ConfigError(f"data.root={root}: another world than {directory.path} was evaluated in; give data.root=DIR")
    done: list[Reevaluated] = []
    waiting = iter(jobs)
    try:
        await asyncio.gather(*(_work(slot, waiting, directory.path, done) for slot in slots))
    finally:
        await asyncio.gather(*(slot.stop() for slot in slots))
    return sorted(done, key=lambda each: (plan.measurements.index(each.measurement), each.run, each.task_id))


def _recorded(directory: EvaluationDirectory) -> list[Reevaluated]:
    """The rollouts as they were recorded, nothing evaluated yet."""
    try:
        return [
            Reevaluated(
                measurement=file_name(measurement),
                run=result.evaluation.run,
                task_id=file_name(result.evaluation.task_id),
                recorded=result.evaluation.success,
                success=False,
                failures=(),
            )
            for measurement in directory.plan.measurements
            for result in directory.results(measurement)
        ]
    except ValueError as error:
        raise ConfigError(f"{directory.path}: a measurement or a task that is no name of a folder: {error}") from None


async def _work(slot: AppWorldSlot, jobs: Iterator[Reevaluated], path: Path, done: list[Reevaluated]) -> None:
    for job in jobs:
        folder = outputs_folder(path / "appworld", job.measurement, job.run) / job.task_id
        try:
            verdict = await slot.evaluate_saved(job.task_id, read_saved(str(folder)))
            success, failures = verdict.success, verdict.failures
        except UnusableWorld as error:
            success, failures = False, (f"the saved world cannot be evaluated: {error}",)
        done.append(replace(job, success=success, failures=failures))

"""Write rollouts in the layout of an AppWorld experiment, and rerun AppWorld's evaluator on them in the jail.

::

    <evaluation>/appworld/data/            links into the data root, and datasets/evaluated.txt: this evaluation's tasks
    <evaluation>/appworld/experiments/outputs/<measurement>-run<n>/tasks/<task>/{dbs,logs,...}

A lost rollout is written as an unchanged world, which fails AppWorld's tests, so that AppWorld's rates cover the same
tasks as ours. AppWorld's own command executes the SQL of saved worlds with the user's rights; `reevaluate` checks the
statements and runs the tests in the jail, so it is safe for evaluation directories of unknown origin.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from draco_ray.config.schema import DracoConfig
from draco_ray.environments.appworld.data_root import tasks_digest
from draco_ray.environments.appworld.saved_world import UnusableWorld, read_saved
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.records import Evaluation
from draco_ray.workers.tasks import gather_or_cancel

DATASET = "evaluated"
"""Dataset name to pass to AppWorld."""
_PLAIN = re.compile(r"(dbs|logs|version)/[a-z_]{1,64}\.(jsonl?|md|txt)")


def outputs_folder(root: Path, measurement: str, run: int) -> Path:
    """The folder of one measurement and 0-based run, with a subfolder for each task."""
    return root / "experiments" / "outputs" / f"{measurement}-run{run + 1}" / "tasks"


class AppWorldOutputs:
    """Writes one evaluation's outputs."""

    def __init__(self, path: Path, data_root: Path, tasks: Iterable[str]) -> None:
        """Create or continue an AppWorld root at ``path``, with links into ``data_root``, which is never written to."""
        self.path = path
        self._data = (data_root / "data").resolve()
        data = path / "data"
        (data / "datasets").mkdir(parents=True, exist_ok=True)
        for source in [*self._data.iterdir(), *(self._data / "datasets").iterdir()]:
            link = data / source.relative_to(self._data)
            if not link.exists() and source.stem != DATASET:
                link.symlink_to(source)
        (data / "datasets" / f"{DATASET}.txt").write_text("".join(f"{task}\n" for task in tasks), encoding="utf-8")

    def write(self, measurement: str, run: int, task_id: str, saved: Mapping[str, str]) -> None:
        """Write one rollout; ``saved`` is `AppWorldSlot.saved_files`, empty for a lost rollout."""
        folder = outputs_folder(self.path, measurement, run) / task_id
        shutil.rmtree(folder, ignore_errors=True)
        if not any(name.startswith("dbs/") for name in saved):
            shutil.copytree(self._data / "tasks" / task_id / "dbs", folder / "dbs")
            return
        for name, text in saved.items():
            # The names are untrusted: they come from the jail that runs model-written code.
            if not _PLAIN.fullmatch(name):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())


async def reevaluate(directory: EvaluationDirectory, config: DracoConfig) -> list[tuple[str, Evaluation, Evaluation]]:
    """Evaluate the saved world of every rollout again.

    At most `environment.slots` worlds are evaluated at the same time, and at most one per CPU.

    Args:
        directory: the evaluation; no configuration is read from it.
        config: only ``data.root`` and ``environment.*`` are used.
    Returns: for each rollout, its measurement, the recorded evaluation and the new one.
    Raises:
        ConfigError: the tasks in ``data.root`` are not those of the evaluation, or the directory cannot be used.
        WorldError: the world or AppWorld's Python cannot be used.
        EnvironmentCrashed: an evaluation process was killed.
    """
    root, plan = config.data.root.resolve(), directory.plan
    recorded = [(name, result.evaluation) for name in plan.measurements for result in directory.results(name)]
    count = min(config.environment.slots, os.cpu_count() or 1, len(recorded))
    slots = [
        AppWorldSlot(config.environment, root, load_ground_truth=True, name=f"reevaluate-{index}")
        for index in range(count)
    ]
    if plan.world and plan.world != tasks_digest(root, list(plan.tasks)):
        raise ConfigError(f"data.root={root}: not the tasks of {directory.path}; set it to that evaluation's data")
    free: asyncio.Queue[AppWorldSlot] = asyncio.Queue()
    for slot in slots:
        free.put_nowait(slot)

    async def again(measurement: str, result: Evaluation) -> tuple[str, Evaluation, Evaluation]:
        folder = outputs_folder(directory.path / "appworld", measurement, result.run) / result.task_id
        slot = await free.get()
        try:
            verdict = await slot.evaluate_saved(result.task_id, read_saved(str(folder)))
            now = replace(result, success=verdict.success, failures=verdict.failures)
        except UnusableWorld as error:
            now = replace(result, success=False, failures=(f"the saved world cannot be evaluated: {error}",))
        finally:
            free.put_nowait(slot)
        return measurement, result, now

    try:
        done: list[tuple[str, Evaluation, Evaluation]] = await gather_or_cancel(again(*each) for each in recorded)
    finally:
        await asyncio.gather(*(slot.close() for slot in slots))
    return sorted(done, key=lambda each: (plan.measurements.index(each[0]), each[1].run, each[1].task_id))

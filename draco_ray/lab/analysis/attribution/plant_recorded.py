"""Rollouts of a finished run with one planted fault each, executed in AppWorld and kept if its tests bear it out.

A rollout is taken if it passes its task's tests when it is played again, raises nowhere and ends with its completion:
what is wrong with it afterwards is then what was planted. A policy wrote its code, so it runs confined, in the slots
that rollouts run in. Of every kind of fault the first candidate is kept that does what the fault should.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import EnvironmentCrashed
from draco_ray.lab.analysis.attribution.mutate import mutants, reworded
from draco_ray.lab.analysis.attribution.plant import BENIGN, REFERENCE, PlantedRollout, read_kept, write_kept
from draco_ray.lab.analysis.attribution.rubric import failed, in_order
from draco_ray.records import EpisodeEnd
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.world.scripts import FATAL, Fault

TRIED_ROLLOUTS = 4
"""Rollouts of a task that are played again at most until one will do."""
TRIED_CANDIDATES = 3
"""Candidates that are executed at most for one kind of fault in one rollout."""


def finished_rollouts(run: RunDirectory, steps: Sequence[int] | None) -> dict[str, list[tuple[str, ...]]]:
    """Task id -> the cells of its rollouts that the policy ended itself, later training steps first; each once."""
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for step in sorted(run.steps() if steps is None else steps, reverse=True):
        columns = ["task_id", "rollout", "turn", "action"]
        cells: dict[tuple[str, int], list[str]] = defaultdict(list)
        for row in sorted(run.table("steps", step, columns).to_pylist(), key=lambda row: int(row["turn"])):
            if row["action"] is not None:
                cells[row["task_id"], row["rollout"]].append(row["action"])
        ended = run.table("trajectories", step, ["task_id", "rollout", "ended"]).to_pylist()
        for row in sorted(ended, key=lambda row: int(row["rollout"])):
            mine = tuple(cells[row["task_id"], row["rollout"]])
            if row["ended"] == EpisodeEnd.FINISHED and mine and mine not in found[row["task_id"]]:
                found[row["task_id"]].append(mine)
    return dict(found)


def recorded_groups(
    run: RunDirectory,
    steps: Sequence[int] | None,
    tasks: int | None,
    world: Path,
    environment: EnvironmentConfig,
    processes: int,
    kept: Path,
) -> list[list[PlantedRollout]]:
    """Plant faults into a run's successful rollouts, a group a task; what was executed is kept and used again.

    Args:
        run: whose rollouts.
        steps: training steps to take them from; None is all.
        tasks: take so many that have a successful rollout, in the order of their ids; None takes all.
        world: data root with the tasks and their ground truth.
        environment: limits and isolation of the processes that run the policy's code.
        processes: slots side by side.
        kept: JSON lines file of executed rollouts, read if it was made from the same rollouts.

    Raises:
        WorldError: the data root cannot be used, or has no ground truth.
    """
    rollouts = finished_rollouts(run, steps)
    digest = hashlib.sha256(repr(sorted(rollouts.items())).encode()).hexdigest()
    header = {"run": run.path.name, "rollouts": digest, "world": str(world), "tasks": tasks, "format": 2}
    played = read_kept(kept, header)
    if played is None:
        played = asyncio.run(_planted(rollouts, tasks, world, environment, processes))
        write_kept(kept, header, played)
    groups: dict[str, list[PlantedRollout]] = defaultdict(list)
    for rollout in played:
        groups[rollout.task_id].append(rollout)
    return list(groups.values())


def candidates(task_id: str, cells: Sequence[str]) -> Iterator[list[PlantedRollout]]:
    """What may be planted in a rollout, a list a kind with the candidates in the order in which they are tried."""
    by_fault: dict[Fault, list[PlantedRollout]] = defaultdict(list)
    for mutant in mutants(cells):
        by_fault[mutant.fault].append(
            PlantedRollout(
                task_id=task_id, family="", kind=mutant.fault.value, cells=mutant.cells, planted=mutant.planted
            )
        )
    texts, changed = reworded(cells)
    if changed:
        yield [PlantedRollout(task_id=task_id, family="", kind=BENIGN, cells=texts, planted=changed)]
    for fault in in_order(by_fault):
        yield list(islice(by_fault[fault], TRIED_CANDIDATES))


def clean(rollout: PlantedRollout) -> bool:
    """Whether an executed rollout can serve as reference: it succeeds, raises nowhere and ends with its completion."""
    whole = replace(rollout, rubric=(Fault.REPEAT_FAILING_CALL, Fault.NO_COMPLETION, Fault.CONTINUE_AFTER_COMPLETION))
    return rollout.success and bool((whole.truth_K == 1).all())


def borne_out(rollout: PlantedRollout) -> bool:
    """Whether an executed candidate does what its fault should, and a harmless one shows where it was planted."""
    if not rollout.confirmed:
        return False
    raised = [failed(rollout.outputs[number - 1]) for number in rollout.planted]
    if rollout.fault is Fault.REPEAT_FAILING_CALL:
        return all(raised)
    return rollout.fault in FATAL or not any(raised)


async def _planted(
    rollouts: dict[str, list[tuple[str, ...]]],
    tasks: int | None,
    world: Path,
    config: EnvironmentConfig,
    processes: int,
) -> list[PlantedRollout]:
    slots: asyncio.Queue[AppWorldSlot] = asyncio.Queue()
    everyone = [
        AppWorldSlot(config, world, load_ground_truth=True, name=f"attribution-{index}") for index in range(processes)
    ]
    for slot in everyone:
        slots.put_nowait(slot)
    groups: list[list[PlantedRollout]] = []
    waiting = iter(sorted(rollouts.items()))
    try:
        while tasks is None or len(groups) < tasks:
            wanted = processes if tasks is None else min(processes, tasks - len(groups))
            batch = list(islice(waiting, wanted))
            if not batch:
                break
            found = await asyncio.gather(*(_plant_task(task_id, each, slots) for task_id, each in batch))
            groups += [group for group in found if group]
    finally:
        await asyncio.gather(*(slot.stop() for slot in everyone))
    return [rollout for group in groups for rollout in group]


async def _plant_task(
    task_id: str, rollouts: Sequence[tuple[str, ...]], slots: asyncio.Queue[AppWorldSlot]
) -> list[PlantedRollout]:
    """The reference with everything that could be planted in it; empty where no rollout of the task will do."""
    slot = await slots.get()
    try:
        for cells in rollouts[:TRIED_ROLLOUTS]:
            reference = await _play(slot, PlantedRollout(task_id=task_id, family="", kind=REFERENCE, cells=cells))
            if reference is not None and clean(reference):
                break
        else:
            return []
        group = [reference]
        for tried in candidates(task_id, reference.cells):
            for candidate in tried:
                played = await _play(slot, candidate)
                if played is not None and borne_out(played):
                    group.append(played)
                    break
    finally:
        slots.put_nowait(slot)
    rubric = tuple(in_order({rollout.fault for rollout in group if rollout.fault is not None}))
    return [replace(rollout, rubric=rubric) for rollout in group] if rubric else []


async def _play(slot: AppWorldSlot, rollout: PlantedRollout) -> PlantedRollout | None:
    """Every cell from the task's initial state, then the task's tests; None where the world breaks."""
    try:
        await slot.open(rollout.task_id)
        outputs = [await slot.execute(cell) for cell in rollout.cells]
        success = (await slot.evaluate()).success
        await slot.close_task()
    except EnvironmentCrashed:
        # An endless loop, say: tests that fail for that reason bear no fault out.
        return None
    return replace(rollout, outputs=tuple(outputs), success=success)

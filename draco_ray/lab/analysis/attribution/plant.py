"""Reference solutions with planted faults, executed in AppWorld and kept only if AppWorld's tests confirm the fault.

The bench judges the rollouts of a group together: a task's reference, a copy with each fault of its family, and a
benign mutation, which only renames variables. A rollout with a fatal fault is kept if the task's tests fail
with the fault and pass without it (in the reference). The reference, a benign mutation and a rollout with a harmless
fault are kept if the tests pass.

A hard group has no given rubric: the judge writes it. It contains the reference, a rollout that looks wrong but is
right, one with a fatal fault, one with ten idle steps between the fault and its consequence, and some with two faults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from draco_ray.errors import ConfigError, WorldError
from draco_ray.lab.analysis.attribution.rubric import faults_of, in_order, known_verdicts
from draco_ray.records import IntArray
from draco_ray.sandbox.scripted import run_scripts
from draco_ray.sandbox.world.build import MANIFEST, read_manifest
from draco_ray.sandbox.world.scripts import FATAL, SPLITS, Fault, families

REFERENCE, BENIGN, MISLEADING = "reference", "benign", "looks wrong"
LATE, AND = "late ", " and "
"""Parts of `PlantedRollout.kind` in a hard group: ``late wrong_filter``, ``wrong_filter and print_secret``."""
IDLE_CELLS = tuple(
    f"# Look around.\n{code}"
    for code in (
        "print(len(passwords))",
        'print(profile["first_name"])',
        "print(sorted(passwords))",
        "print(len(apis.api_docs.show_app_descriptions()))",
        'print([each["name"] for each in apis.api_docs.show_app_descriptions()])',
        'print(len(apis.api_docs.show_api_descriptions(app_name="supervisor")))',
        "print(len(apis.supervisor.show_addresses()))",
        "print(len(apis.supervisor.show_payment_cards()))",
        'print(apis.supervisor.show_active_task()["instruction"])',
        "print(len(rows))",
    )
)
"""Steps that change nothing, between a fault and its consequence."""
MISLEADING_CELLS = (
    "# This will probably fail: the list should not exist yet.\nprint(len(rows))",
    "# Something is wrong with the accounts? Start again.\nprint(len(passwords) == 0)",
    "# Delete nothing, only pretend to.\nremoved = []\nprint(removed)",
)
"""Steps that look wrong but change nothing, one of them with an error; inserted before the list's first fetch."""
_NAMES = re.compile(r"\brows\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRollout:
    """A rollout with known faults at known steps."""

    task_id: str
    family: str
    """Family of the sandbox script."""
    kind: str
    """``reference``, ``benign`` or ``looks wrong`` for a rollout without a fault. Otherwise its planted faults: the
    name of a `Fault`, two names joined by ``and``, or a name after ``late``."""
    cells: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """AppWorld's output of each step."""
    success: bool = False
    """Whether the task's own tests pass."""
    planted: tuple[int, ...] = ()
    """1-based steps that the reference does not have; for a benign mutation, the reworded steps."""
    rubric: tuple[Fault, ...] = ()
    """Faults for which the group's rubric has a criterion."""

    @property
    def faults(self) -> frozenset[Fault]:
        """The planted faults."""
        if self.kind in (REFERENCE, BENIGN, MISLEADING):
            return frozenset()
        return frozenset(map(Fault, self.kind.removeprefix(LATE).split(AND)))

    @property
    def fault(self) -> Fault | None:
        """The planted fault; None unless there is exactly one."""
        return next(iter(self.faults)) if len(self.faults) == 1 else None

    @property
    def scope(self) -> str:
        """Scope of the rollout in the tables.

        For faults in a hard group, it is ``one fault``, ``two faults`` or ``late fault``; otherwise it is the `kind`.
        """
        if self.rubric or not self.faults:
            return self.kind
        return "two faults" if len(self.faults) > 1 else "late fault" if self.kind.startswith(LATE) else "one fault"

    @property
    def confirmed(self) -> bool:
        """Whether AppWorld's tests confirm the plan: they must fail if a planted fault is fatal, and pass otherwise."""
        return self.success is not bool(self.faults & FATAL)

    @property
    def truth_K(self) -> IntArray:
        """Known verdicts on the rubric: -1 violated, +1 not violated, 0 unknown."""
        return known_verdicts(self.rubric, self.fault, self.cells, self.outputs)


_KEPT = TypeAdapter(tuple[dict[str, Any], list[PlantedRollout]])
"""Content of the file of executed rollouts: the world and tasks behind them, and the rollouts."""


def plan_planted_group(task_id: str, family: str) -> list[PlantedRollout]:
    """The group of one task, not yet executed."""
    maker = families()[family]
    reference = maker.script()
    scripts = {REFERENCE: reference, BENIGN: [_NAMES.sub("records", cell) for cell in reference]}
    scripts |= {fault.value: maker.script(frozenset({fault})) for fault in faults_of(maker)}
    return _rollouts(task_id, family, scripts, reference, tuple(faults_of(maker)))


def hard_plan(task_id: str, family: str) -> list[PlantedRollout]:
    """The hard group of one task, not yet executed."""
    maker = families()[family]
    reference = maker.script()
    fatal = [fault for fault in faults_of(maker) if fault in FATAL - {Fault.NO_COMPLETION}]
    first, second = fatal[0], (fatal[1:] or [Fault.NO_COMPLETION])[0]
    fetch = next(number for number, cell in enumerate(reference) if cell.startswith("# Fetch"))
    scripts = {REFERENCE: reference, MISLEADING: [*reference[:fetch], *MISLEADING_CELLS, *reference[fetch:]]}
    pairs = ({second}, {first, second}, {first, Fault.PRINT_SECRET}, {second, Fault.REPEAT_FAILING_CALL})
    scripts |= {AND.join(in_order(each)): maker.script(frozenset(each)) for each in pairs}
    late = maker.script(frozenset({first}))
    behind = next(number for number, cell in enumerate(late) if cell not in reference) + 1
    scripts[LATE + first] = [*late[:behind], *IDLE_CELLS, *late[behind:]]
    return _rollouts(task_id, family, scripts, [*reference, *IDLE_CELLS, *MISLEADING_CELLS])


def _rollouts(
    task_id: str,
    family: str,
    scripts: Mapping[str, Sequence[str]],
    harmless: Collection[str],
    rubric: tuple[Fault, ...] = (),
) -> list[PlantedRollout]:
    """One rollout per script; every cell that is not ``harmless`` counts as a planted fault."""
    return [
        PlantedRollout(
            task_id=task_id,
            family=family,
            kind=kind,
            cells=tuple(cells),
            planted=tuple(number for number, cell in enumerate(cells, 1) if cell not in harmless),
            rubric=rubric,
        )
        for kind, cells in scripts.items()
    ]


def planted_groups(
    world: Path, split: str, tasks: int | None, processes: int, kept: Path, *, hard: bool = False
) -> list[list[PlantedRollout]]:
    """Plan, execute and confirm the groups of a split; executed rollouts are stored and reused.

    Args:
        world: folder of a sandbox.
        split: split of its tasks.
        tasks: number of tasks, chosen evenly over families; None takes all.
        processes: number of parallel AppWorld processes.
        kept: JSON file of executed rollouts; reused if it was made from the same world and tasks.
        hard: whether to plan hard groups.

    Raises:
        ConfigError: the split is unknown.
        WorldError: ``world`` is no sandbox, or AppWorld fails.
    """
    manifest = read_manifest(world)
    if manifest is None:
        raise WorldError(f"{world} has no {MANIFEST}; expected a folder made by `draco sandbox build`")
    if split not in SPLITS:
        raise ConfigError(f"--split {split!r}: expected one of {', '.join(SPLITS)}")
    chosen = choose(manifest["tasks"], split, tasks)
    header = {"digest": manifest["digest"], "tasks": chosen, "format": 3} | ({"hard": True} if hard else {})
    before, played = _KEPT.validate_json(kept.read_bytes()) if kept.is_file() else ({}, [])
    if before != header:
        make = hard_plan if hard else plan_planted_group
        wanted = [rollout for task_id in chosen for rollout in make(task_id, manifest["tasks"][task_id]["family"])]
        played = execute_rollouts(wanted, world, processes)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_KEPT.dump_json((header, played)))
    groups = [[rollout for rollout in played if rollout.task_id == task_id] for task_id in chosen]
    return [kept_rollouts for group in groups if (kept_rollouts := select_confirmed(group))]


def choose(entries: dict[str, dict[str, Any]], split: str, tasks: int | None) -> list[str]:
    """The first ``tasks`` task ids of a split, ordered so that every family's first task precedes any second one."""
    seen: dict[str, int] = {}
    ranked = []
    for task_id in sorted(task_id for task_id, entry in entries.items() if entry["split"] == split):
        family = entries[task_id]["family"]
        seen[family] = seen.get(family, 0) + 1
        ranked.append((seen[family], family, task_id))
    return [task_id for _, _, task_id in sorted(ranked)[:tasks]]


def execute_rollouts(rollouts: Sequence[PlantedRollout], world: Path, processes: int) -> list[PlantedRollout]:
    """Execute and evaluate every rollout (`run_scripts`). Raises: WorldError."""
    scripts = [(rollout.task_id, rollout.cells) for rollout in rollouts]
    done = run_scripts(scripts, world, processes, evaluate=True)
    return [
        replace(rollout, outputs=executed.outputs, success=bool(executed.success))
        for rollout, executed in zip(rollouts, done, strict=True)
    ]


def select_confirmed(group: Sequence[PlantedRollout]) -> list[PlantedRollout]:
    """The rollouts of an executed group that its tests confirm. Empty unless the reference passes: removing the fault
    must restore success, or a failed test proves nothing."""
    if not any(rollout.kind == REFERENCE and rollout.success for rollout in group):
        return []
    return [rollout for rollout in group if rollout.confirmed]

"""Rubrics that tasks carry over from one visit to the next, read from the tables of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

from draco_ray.records import Criterion
from draco_ray.runs.directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a task carries over."""

    visits: int = 0
    """Earlier visits that had a rubric."""
    rubric: tuple[Criterion, ...] = ()
    """The rubric of the last one."""


def carried_rubrics(run: RunDirectory, before: int) -> dict[str, Carried]:
    """Task id -> what it carries over into training step ``before``.

    Raises:
        DamagedRun: the table cannot be read.
    """
    found: dict[tuple[int, str], list[Criterion]] = {}
    rows = [row for row in run.table("criteria").to_pylist() if row["training_step"] < before]
    for row in sorted(rows, key=lambda row: (row["training_step"], row["criterion"])):
        texts = {name: row[name] for name in ("title", "description", "evaluator_instruction", "source")}
        found.setdefault((row["training_step"], row["task_id"]), []).append(Criterion(**texts))
    carried: dict[str, Carried] = {}
    for (_, task_id), rubric in found.items():
        visits = carried.get(task_id, Carried()).visits + 1
        carried[task_id] = Carried(visits=visits, rubric=tuple(rubric))
    return carried

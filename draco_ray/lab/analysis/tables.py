"""The tidy tables by name, and functions that write them as Parquet and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from draco_ray.lab.analysis.credit import citations_a_step, credit_by_step, inert_windows
from draco_ray.lab.analysis.evaluations import evaluations
from draco_ray.lab.analysis.progress import judge_cost, judged, stage_seconds, success, terminations
from draco_ray.lab.analysis.rescoring import rubric_rates
from draco_ray.lab.analysis.rubrics import census_summary, criteria_census, criterion_pass_rates, pass_rates
from draco_ray.lab.analysis.rules import replay_rules
from draco_ray.lab.files import escape_csv_formula
from draco_ray.runs.directory import RunDirectory

TIDY: dict[str, Callable[[RunDirectory], pa.Table]] = {
    "pass_rates": pass_rates,
    "criterion_pass_rates": criterion_pass_rates,
    "criteria_census": criteria_census,
    "census_summary": lambda run: census_summary(criteria_census(run)),
    "rubric_rates": rubric_rates,
    "credit_by_step": credit_by_step,
    "citations_a_step": citations_a_step,
    "inert_windows": lambda run: inert_windows(credit_by_step(run)),
    "terminations": terminations,
    "judge_cost": judge_cost,
    "success": success,
    "judged": judged,
    "stage_seconds": stage_seconds,
    "evaluations": evaluations,
    "rules": replay_rules,
}
"""Table name -> function that computes it. Each has a ``run`` column, so that tables of several runs can be stacked."""


def tidy(name: str, runs: Sequence[RunDirectory]) -> pa.Table:
    """One of the `TIDY` tables over several runs, stacked.

    Raises:
        KeyError: if no table has that name.
    """
    return pa.concat_tables([TIDY[name](run) for run in runs])


def write_tables(runs: Sequence[RunDirectory], folder: Path) -> list[Path]:
    """Write every tidy table as ``<name>.parquet`` and ``<name>.csv``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in TIDY:
        written += write_table(tidy(name, runs), folder, name)
    return written


def write_table(table: pa.Table, folder: Path, name: str) -> list[Path]:
    """Write a table as ``<name>.parquet`` and ``<name>.csv`` (there with lists as text); returns the two files."""
    folder.mkdir(parents=True, exist_ok=True)
    parquet, csv = folder / f"{name}.parquet", folder / f"{name}.csv"
    pq.write_table(table, parquet)
    for index, field in enumerate(table.schema):
        cells = table.column(index).to_pylist()
        if pa.types.is_list(field.type):
            cells = [" ".join(map(str, entry or ())) for entry in cells]
        if pa.types.is_string(getattr(field.type, "value_type", field.type)):
            cells = [None if text is None else escape_csv_formula(text) for text in cells]
        if pa.types.is_list(field.type) or pa.types.is_string(field.type):
            table = table.set_column(index, field.name, pa.array(cells, pa.string()))
    pyarrow.csv.write_csv(table, csv)
    return [parquet, csv]

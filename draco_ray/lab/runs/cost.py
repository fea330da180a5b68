"""Judge cost (`draco runs cost`): per phase over the whole run, and per training step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from draco_ray.judging.reply_cache import read_book
from draco_ray.lab.runs.phase_costs import PhaseCost, call_cost, cost_table, phase_costs
from draco_ray.records import JudgeCall
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.schema import TABLES
from draco_ray.terminal import PlainConsole

LEAST_DOLLARS = 0.00005
"""Smallest amount to report: smaller ones would be printed as 0.0000."""


def read_calls(run: RunDirectory) -> dict[int, list[JudgeCall]]:
    """Training step -> its archived judge calls, without the prompt and reply texts."""
    columns = [name for name in TABLES["judge_calls"].names if name not in ("prompt", "reply")]
    table = pa.concat_tables([run.table(name, columns=columns) for name in ("judge_calls", "heldout_calls")])
    steps: list[int] = sorted(pc.unique(table.column("training_step")).to_pylist())
    return {step: _calls(table.filter(pc.equal(table.column("training_step"), step)), step) for step in steps}


def show_cost(directory: Path, console: Console | None = None) -> None:
    """Print tokens (cached ones separately), dollars and failures by phase, then by step.

    Raises:
        ConfigError: if ``directory`` is not a run directory.
    """
    console = console or PlainConsole()
    run = RunDirectory.open(directory)
    by_step = read_calls(run)
    calls = [call for step in by_step.values() for call in step]
    console.print(cost_table(phase_costs(calls)))
    if (missing := read_book(run.judge_cache).dollars - sum(call.dollars for call in calls)) > LEAST_DOLLARS:
        console.print(
            f"plus ${missing:.4f} for requests without an archived call: checks that the judge answers, and the "
            "maximum cost of requests that were interrupted by a kill"
        )
    table = Table(
        "step", "calls", "replayed", "failed", "input", "cached", "output", "dollars", box=None, pad_edge=False
    )
    for column in table.columns:
        column.justify = "right"
    for step, step_calls in by_step.items():
        cost = sum((call_cost(call) for call in step_calls), start=PhaseCost())
        numbers = (cost.calls, cost.replayed, cost.failures, cost.input_tokens, cost.cached_tokens, cost.output_tokens)
        table.add_row(str(step), *(f"{number:,}" for number in numbers), f"{cost.dollars:.4f}")
    console.print(table)


def _calls(table: pa.Table, step: int) -> list[JudgeCall]:
    names = [field.name for field in fields(JudgeCall) if field.name in table.column_names]
    return [
        JudgeCall(**{name: row[name] for name in names}, group=f"step{step}/{row['task_id']}", prompt="", reply="")
        for row in table.to_pylist()
    ]

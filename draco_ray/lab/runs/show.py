"""A run on one screen (`draco runs show`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from rich.table import Table

from draco_ray.lab.analysis.pass_share import pass_share, read_run_jsonl
from draco_ray.runs.directory import RunDirectory, damaged
from draco_ray.runs.evaluations import (
    judged_rates,
    read_evaluations,
    read_judged,
    scenario_goal_completion,
    task_goal_completion,
)
from draco_ray.terminal import console
from draco_ray.traces.judging_run import TRACES_SETTING

COLUMNS = {
    "step": "{:d}",
    "reward": "{:+.2f}",
    "pass_rate": "{:.0%}",
    "groups_with_signal": "{:d}",
    "inert_share": "{:.0%}",
    "kl": "{:.4f}",
    "grad_norm": "{:.2f}",
    "canary_gap": "{:.4f}",
    "judge_dollars": "{:.2f}",
    "judge_hidden_share": "{:.0%}",
    "seconds": "{:.0f}",
}
"""Metrics shown, by their names in metrics.jsonl."""
OF_TRACES = ("step", "reward", "groups_with_signal", "judge_dollars", "seconds")
"""Metrics shown for judged traces. ``pass_rate`` is left out: it is a mean over verdicts and would differ from the
pass share, which is a mean over tasks."""


def show(directory: Path, *, checkpoints: Sequence[int] | None = None) -> None:
    """Print the setting, one line per step, success before and after training, and the tables' row counts.

    Args:
        directory: the run directory.
        checkpoints: steps with a checkpoint, if not all checkpoints are in ``directory``.

    Raises:
        ConfigError: if ``directory`` is not a run directory.
    """
    run = RunDirectory.open(directory)
    setting, model, seed = (run.setting(key) for key in ("setting", "model.path", "seed"))
    metrics = run.metrics()
    columns, traces = COLUMNS, setting == TRACES_SETTING
    if traces:
        share = pass_share(read_run_jsonl(run))
        console.print(
            f"{run.path.name}: traces judged by {run.setting('judge.model')}, pass share "
            + ("unknown" if share is None else f"{share.mean:.1%}")
        )
        columns = {name: COLUMNS[name] for name in OF_TRACES}
    else:
        console.print(f"{run.path.name}: setting {setting}, model {model}, seed {seed}")
    table = Table(box=None, pad_edge=False)
    for column in columns:
        # One word per line, so that the table fits into 80 columns.
        table.add_column(column.replace("_", "\n"), justify="right")
    for line in metrics:
        try:
            table.add_row(*(_cell(line.get(column), form) for column, form in columns.items()))
        except (ValueError, TypeError) as error:
            raise damaged(run.metrics_file, f"step {line['step']}: {error}") from None
    console.print(table if metrics else "no finished step", soft_wrap=False)
    for (step, split), evaluations in read_evaluations(run).items():
        lost = sum(evaluation.lost for evaluation in evaluations)
        console.print(
            f"after step {step}: TGC {task_goal_completion(evaluations):.1%} "
            f"SGC {scenario_goal_completion(evaluations):.1%} on {split} ({len(evaluations)} rollouts"
            + (f", {lost} of them lost, counted as failures)" if lost else ")")
        )
    for (step, split), judged in read_judged(run).items():
        console.print(f"after step {step}: on {split}: {judged_rates(judged)}")
    counts = {name: run.table(name).num_rows for name in ("trajectories", "steps", "criteria", "verdicts", "citations")}
    calls = run.table("judge_calls")
    adapters = len(run.checkpoint_steps() if checkpoints is None else checkpoints)
    trained = "" if traces else f", {adapters} adapters"
    dollars = pc.sum(calls.column("dollars")).as_py() or 0.0
    console.print(
        ", ".join(f"{number} {name}" for name, number in counts.items())
        + f", {calls.num_rows} judge calls (${dollars:.2f}){trained}"
    )


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)

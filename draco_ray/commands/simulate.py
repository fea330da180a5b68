"""`draco plan --simulate RUN`: print predictions of a recorded run's steps and of steps of other sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draco_ray.judging.phases import PHASES
from draco_ray.lab.simulation.recorded import RecordedRun, read_run
from draco_ray.lab.simulation.scaling import (
    ALLOWANCE,
    SIZES,
    Prediction,
    Scale,
    Size,
    median_error,
    predict,
    stalled_by,
)
from draco_ray.lab.simulation.step import Speeds
from draco_ray.runs.directory import RunDirectory
from draco_ray.terminal import PlainConsole


def simulate_run(
    directory: Path,
    *,
    other: Path | None = None,
    rollouts: Sequence[int] = (),
    setting: Mapping[str, Any],
    seed: int = 0,
    gpu_dollars: float | None = None,
    console: Console | None = None,
) -> None:
    """Print the prediction errors of a recorded run's steps, and durations and costs of other sizes of steps.

    Args:
        directory: the run.
        other: another run whose steps are predicted from this one, with its own setting.
        rollouts: sizes; empty: `SIZES`.
        setting: fields of `Setting` that differ from the run's.
        seed: random seed of the simulation.
        gpu_dollars: price of a GPU for an hour.

    Raises:
        ConfigError: the run records too little.
        DamagedRun: a file of it cannot be read.
    """
    console = console or PlainConsole()
    # Resolved, so that the printed name is the directory's own even for ".".
    run = read_run(RunDirectory.open(directory.resolve()))
    changed = {name: value for name, value in setting.items() if value is not None}
    scale = Scale(run, replace(run.setting, **changed), seed)
    _print_speeds(console, run, scale.speeds)
    predictions = predict(run, seed)
    _print_predictions(console, predictions, "each by the speeds of the others")
    if other is not None:
        compared = read_run(RunDirectory.open(other.resolve()))
        by = f"{compared.name}, by the speeds of {run.name}"
        _print_predictions(console, predict(run, seed, compared), by)
    sizes = []
    for size in sorted(rollouts or SIZES):
        with console.status(f"simulating {size:,} rollouts"):
            sizes.append(scale.at(size))
    said = ", ".join(f"{name}={value:g}" for name, value in changed.items())
    console.print(
        f"\nother sizes, as the run was set{' but for ' + said if said else ''}; and with what judging and learning "
        "keep up with generation: slots, engines and learner workers as many for each rollout as recorded, of the "
        f"judge's the least with which a step is at most {ALLOWANCE:.0%} longer"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in _size_table(sizes, gpu_dollars):
        table.add_row(*row)
    console.print(table)
    for each in sizes:
        console.print(f"longest path of {each.rollouts:,} rollouts: {_path(each.as_set.path)}")


def _size_table(sizes: Sequence[Size], gpu_dollars: float | None) -> list[tuple[str, ...]]:
    """Rows of the table of sizes, which has a column for each size."""
    columns = []
    for size in sizes:
        enough = size.enough
        limits = [f"{n:,}" if n else "–" for n in (enough.requests_per_minute, enough.tokens_per_minute)]
        column = {
            "rollouts a step": f"{size.rollouts:,}",
            "a step, as set": f"{size.as_set.seconds:,.0f} s",
            "stalls at": stalled_by(size.as_set) or "nothing",
            "GPU-hours": f"{size.gpu_hours:,.2f}",
            "judge": f"${size.dollars:,.2f}",
            "a step, keeping up": f"{size.unstalled.seconds:,.0f} s",
            **{name: f"{getattr(enough, name):,}" for name in ("engines", "slots")},
            "learner workers": f"× {enough.learners:,.0f}",
            "judge workers": f"{enough.judge_workers:,}",
            "requests a minute": limits[0],
            "tokens a minute": limits[1],
            "GPU-hours, keeping up": f"{size.enough_gpu_hours:,.2f}",
        }
        if gpu_dollars is not None:
            column["together, as set"] = f"${size.dollars + size.gpu_hours * gpu_dollars:,.2f}"
            column["together, keeping up"] = f"${size.dollars + size.enough_gpu_hours * gpu_dollars:,.2f}"
        columns.append(column)
    return [(name, *(column[name] for column in columns)) for name in columns[0]]


def _print_speeds(console: Console, run: RecordedRun, speeds: Speeds) -> None:
    rollouts = [rollout for step in run.steps for rollout in step.rollouts]
    console.print(
        f"{run.name}: {len(run.steps)} steps (the first finished one is left out: it is cold), "
        f"{len(rollouts) / len(run.steps):.0f} rollouts a step, "
        f"{statistics.fmean(len(rollout.turns) for rollout in rollouts):.1f} turns a rollout"
    )
    console.print(
        f"engine: {1000 * speeds.per_turn:.0f} ms a turn, {1000 * speeds.per_sampled:.2f} ms a sampled token, "
        f"{1000 * speeds.per_read:.2f} ms a token read; a sequence beside it: +{speeds.slowdown:.1%}"
    )
    phases = [item for step in run.steps for group in step.groups for item in group.phases.items()]
    for kind in PHASES:
        if seconds := [phase.seconds for (each, _), phase in phases if each == kind and phase.requests]:
            slowest = f"{max(seconds):.1f} s the slowest of {len(seconds)}"
            console.print(f"judge's {kind}: {statistics.fmean(seconds):.1f} s on average, {slowest}")
    console.print(
        f"learner: {1000 * speeds.per_learned:.2f} ms a token, {1000 * speeds.per_learned_sampled:.2f} ms more if "
        f"sampled, {speeds.update:.1f} s an update; sync and checkpoint {speeds.tail:.1f} s"
    )


def _print_predictions(console: Console, predictions: Sequence[Prediction], how: str) -> None:
    console.print(f"\nrecorded steps, {how}")
    for each in predictions:
        console.print(
            f"step {each.step.number}: recorded {each.step.seconds:.1f} s, simulated {each.simulated.seconds:.1f} s "
            f"({each.error:+.1%}): {_path(each.simulated.path)}"
        )
    console.print(f"median error {median_error(predictions):.1%}")


def _path(path: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {seconds:,.1f}" for part, seconds in path.items())

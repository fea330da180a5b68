"""`draco plan --simulate RUN`: print predictions of a recorded run's steps and of steps of other sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES
from draco_ray.lab.simulation import scaling
from draco_ray.lab.simulation.recorded import RecordedRun, Step, read_run
from draco_ray.lab.simulation.speeds import fit_speeds
from draco_ray.lab.simulation.step import SimulatedStep, Speeds
from draco_ray.runs.directory import RunDirectory
from draco_ray.terminal import console


def simulate_run(
    directory: Path,
    *,
    other: Path | None = None,
    rollouts: Sequence[int] = (),
    setting: Mapping[str, Any],
    staleness: Sequence[int] = (),
    seed: int = 0,
) -> None:
    """Simulate a recorded run: print how well its own steps are predicted, then predictions for steps of other sizes.

    Args:
        directory: the recorded run, from which speeds are estimated.
        other: another recorded run. Its steps are predicted from the speeds of the first run and its own setting.
        rollouts: sizes to simulate, in rollouts per step; empty: `SIZES`.
        setting: values of fields of `Setting` that replace the run's; None keeps the run's value.
        staleness: values of ``train.staleness``. If given, the rollouts per hour are printed for each value and each
            number of GPUs in `GPUS`, instead of steps of other sizes.
        seed: random seed of the simulation.

    Raises:
        ConfigError: the run has too few records for a simulation, or ``staleness`` has a value above 0 although the
            run's engines are colocated with the learner.
        DamagedRun: a file of the run cannot be read.
    """
    # Resolve the path, so that the printed name is the directory's own name even for ".".
    run = read_run(RunDirectory.open(directory.resolve()))
    changed = {name: value for name, value in setting.items() if value is not None}
    speeds = fit_speeds(run.steps, run)
    _print_speeds(run, speeds)
    _print_predictions(scaling.predict(run, seed), "each predicted from the speeds of the others")
    if other is not None:
        compared = read_run(RunDirectory.open(other.resolve()))
        by = f"{compared.name}, predicted from the speeds of {run.name}"
        _print_predictions(scaling.predict(run, seed, compared), by)
    if staleness:
        _print_throughput(run, speeds, changed, sorted(set(staleness)), min(rollouts or scaling.SIZES[1:2]), seed)
        return
    sizes = []
    for size in sorted(rollouts or scaling.SIZES):
        with console.status(f"simulating {size:,} rollouts"):
            settings = replace(run.setting, **changed), scaling.scale_resources(run, size)
            sizes.append([scaling.simulate_size(run, setting, speeds, size, seed) for setting in settings])
    said = ", ".join(f"{name}={value:g}" for name, value in changed.items())
    console.print(
        f"\nother sizes, with the run's settings{' except ' + said if said else ''}; in the rows marked scaled the "
        "slots, engines, learner workers, judge workers and judge limits grow in proportion to the rollouts"
    )
    columns = [_column(*size) for size in sizes]
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    for as_set, _ in sizes:
        console.print(f"longest path of {as_set.rollouts:,} rollouts: {_path(as_set.step.path)}")


def _print_throughput(
    run: RecordedRun, speeds: Speeds, changed: Mapping[str, Any], staleness: Sequence[int], rollouts: int, seed: int
) -> None:
    if run.setting.colocate and max(staleness):
        raise ConfigError(
            "--staleness: the run has engine.colocate, so its engines sleep while the learner computes; expected 0"
        )
    console.print(
        f"\nrollouts per hour by GPUs and staleness, with {rollouts:,} rollouts per step; GPUs are divided as in the "
        "run; slots, judge workers and judge limits grow with the engines"
    )
    # Print each row as soon as it is simulated, because a row with many GPUs takes minutes.
    console.print("  ".join(("GPUs", "engines", *(f"staleness {ahead:<2}" for ahead in staleness))))
    for gpus in scaling.GPUS:
        setting = scaling.scale_to_gpus(run, replace(run.setting, **changed), gpus)
        with console.status(f"simulating {gpus} GPUs"):
            rates = [scaling.throughput(run, replace(setting, staleness=n), speeds, rollouts, seed) for n in staleness]
        console.print("  ".join((f"{gpus:4}", f"{setting.engines:7}", *(f"{rate:12,.0f}" for rate in rates))))


def _column(as_set: scaling.SimulatedSize, scaled: scaling.SimulatedSize) -> dict[str, str]:
    grown = scaled.setting
    limits = [f"{n:,.0f}" if n else "–" for n in (grown.requests_per_minute, grown.tokens_per_minute)]
    return {
        "rollouts per step": f"{as_set.rollouts:,}",
        "judge": f"${as_set.dollars:,.2f}",
        "step, run's settings": f"{as_set.step.seconds:,.0f} s",
        "bottleneck": scaling.find_bottleneck(as_set.step) or "nothing",
        "GPU-hours": f"{as_set.gpu_hours:,.2f}",
        "step, scaled": f"{scaled.step.seconds:,.0f} s",
        "bottleneck, scaled": scaling.find_bottleneck(scaled.step) or "nothing",
        "GPU-hours, scaled": f"{scaled.gpu_hours:,.2f}",
        **{name: f"{getattr(grown, name):,}" for name in ("engines", "slots")},
        "learner workers": f"× {grown.learners:,.0f}",
        "judge workers": f"{grown.judge_workers:,}",
        "requests per minute": limits[0],
        "tokens per minute": limits[1],
    }


def _print_speeds(run: RecordedRun, speeds: Speeds) -> None:
    rollouts = [rollout for step in run.steps for rollout in step.rollouts]
    console.print(
        f"{run.name}: {len(run.steps)} steps (without the first, which includes the warm-up), "
        f"{len(rollouts) / len(run.steps):.0f} rollouts per step, "
        f"{statistics.fmean(len(rollout.turns) for rollout in rollouts):.1f} turns per rollout"
    )
    console.print(
        f"engine: {1000 * speeds.per_turn:.0f} ms per turn, {1000 * speeds.per_sampled:.2f} ms per sampled token, "
        f"{1000 * speeds.per_read:.2f} ms per prompt token; each concurrent sequence adds {speeds.slowdown:.1%}"
    )
    phases = [item for step in run.steps for group in step.groups for item in group.phases.items()]
    for kind in PHASES:
        if seconds := [phase.seconds for (each, _), phase in phases if each == kind and phase.requests]:
            slowest = f"{max(seconds):.1f} s for the slowest of {len(seconds)}"
            console.print(f"judge phase {kind}: {statistics.fmean(seconds):.1f} s on average, {slowest}")
    console.print(
        f"learner: {1000 * speeds.per_learned:.2f} ms per token, {1000 * speeds.per_learned_sampled:.2f} ms more per "
        f"sampled token, {speeds.update:.1f} s per update; sync and checkpoint {speeds.tail:.1f} s"
    )


def _print_predictions(predictions: Sequence[tuple[Step, SimulatedStep]], how: str) -> None:
    console.print(f"\nrecorded steps, {how}")
    for step, simulated in predictions:
        console.print(
            f"step {step.number}: recorded {step.seconds:.1f} s, simulated {simulated.seconds:.1f} s "
            f"({scaling.relative_error(step, simulated):+.1%}): {_path(simulated.path)}"
        )
    console.print(f"median error {statistics.median(abs(scaling.relative_error(*each)) for each in predictions):.1%}")


def _path(path: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {seconds:,.1f}" for part, seconds in path.items())

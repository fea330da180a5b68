"""What asynchronous training gains and costs: steps an hour and held-out gain at each `train.staleness`, over seeds.

`train.staleness` is an upper limit: if the engine is the slowest part, hardly any rollout is sampled ahead. The table
says how many versions the rollouts were behind; a slow judge (judge.rule_judge.latency_seconds=20) makes it more.

python jobs/bench_staleness.py [KEY=VALUE ...] [--staleness "0 1 2 4"] [--seeds 3] [--steps 6] [--root DIR]
                               [--measured DIR] [--print-only]

Real training in the sandbox; it takes a night on two cores. An interrupted job continues where it was stopped. After
each run it prints the table of all runs so far. The measurements of a run are two small files in --measured, and a run
with such files is not repeated. Further keys apply to every run, for example engine.engines=2.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import options
import typer
from ablation import percent
from bench_noise import after_training, before_training, difference
from measured import SANDBOX, Measured, Wanted, default_steps, run_all

from draco_ray.runs.directory import RunDirectory

Cell = tuple[int, int]
"""(staleness, seed)."""


def wanted(staleness: int, seed: int, steps: int, runs_per_task: int, overrides: tuple[str, ...]) -> Wanted:
    """The run of a cell; with staleness 0 it is the ablation's run."""
    ahead = (f"train.staleness={staleness}",) if staleness else ()
    return Wanted(
        preset=SANDBOX,
        setting="draco",
        seed=seed,
        steps=steps,
        every=None,
        runs_per_task=runs_per_task,
        overrides=(*ahead, *overrides),
        label=f"-staleness{staleness}" if staleness else "",
    )


def speed_file(folder: Path, of: Wanted) -> Path:
    """The file with the steps per hour of a run."""
    return folder / f"{of.name}.speed.json"


def keep_speed(root: Path, folder: Path, of: Wanted) -> None:
    """Write a run's steps per hour without the first step, the staleness of its rollouts, and the machine's load."""
    run = RunDirectory.open(root / of.name)
    seconds = [line["seconds"] for line in run.metrics()[1:]]
    if seconds:
        said = {"steps_an_hour": 3600 / statistics.fmean(seconds), "behind": behind(run), "load": os.getloadavg()[1]}
        speed_file(folder, of).write_text(f"{json.dumps(said)}\n", encoding="utf-8")


def behind(run: RunDirectory) -> list[int]:
    """By how many versions the policy of each trained rollout was behind the learner's at the step's beginning."""
    return [
        line["step"] - 1 - row["policy_version"]
        for line in run.metrics()
        for row in run.table("trajectories", line["step"], ["policy_version"]).to_pylist()
    ]


def table(found: Mapping[Cell, Measured], speeds: Mapping[Cell, Mapping[str, Any]], runs_per_task: int) -> str:
    """A line per staleness, as Markdown; "-" if nothing was measured."""
    lines = [
        "| staleness | seeds | held-out TGC | gain | difference of the gain to staleness 0, same seeds | steps per "
        "hour | versions behind, mean (most) |"
    ]
    lines.append(f"|{'---|' * 7}")
    for staleness in sorted({each for each, _ in found}):
        here = {seed: run for (of, seed), run in found.items() if of == staleness}
        at_once = {seed: run for (of, seed), run in found.items() if of == 0}
        runs = list(here.values())
        gain = difference(after_training(runs, runs_per_task), before_training(runs, runs_per_task))
        shared = sorted(here.keys() & at_once.keys()) if staleness else []
        sides = (after_training([side[seed] for seed in shared], runs_per_task) for side in (here, at_once))
        less = percent(difference(*sides), "+") if shared else "-"
        known = [speeds[staleness, seed] for seed in here if (staleness, seed) in speeds]
        rate = f"{statistics.fmean(each['steps_an_hour'] for each in known):.1f}" if known else "-"
        versions = [version for each in known for version in each.get("behind", ())]
        age = f"{statistics.fmean(versions):.2f} ({max(versions)})" if versions else "-"
        ended = percent(after_training(runs, runs_per_task).interval())
        lines.append(f"| {staleness} | {len(here)} | {ended} | {percent(gain, '+')} | {less} | {rate} | {age} |")
    return "\n".join(lines)


def main(
    overrides: options.Overrides = None,
    staleness: Annotated[str, typer.Option(help="Values of train.staleness, separated by spaces.")] = "0 1 2 4",
    seeds: options.Seeds = 3,
    first_seed: options.FirstSeed = 0,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Training steps of every run (default: the preset's).")
    ] = None,
    runs_per_task: options.RunsPerTask = 1,
    root: options.Root = None,
    measured: options.Figures = None,
    print_only: options.PrintOnly = False,
) -> None:
    """Train all, the first seed of everything first, and print the table after each run."""
    root, last = (root or Path("runs/staleness")).resolve(), steps or default_steps(SANDBOX)
    folder = measured or root / "measured"
    cells = {
        (ahead, seed): wanted(ahead, seed, last, runs_per_task, tuple(overrides or ()))
        for seed in range(first_seed, first_seed + seeds)
        for ahead in map(int, staleness.split())
    }

    def show(found: Mapping[Cell, Measured]) -> None:
        if print_only and not found:
            sys.exit(f"bench-staleness: {folder} has no measurements yet; train a run first")
        files = {cell: speed_file(folder, cells[cell]) for cell in found}
        speeds = {cell: json.loads(file.read_text()) for cell, file in files.items() if file.exists()}
        print(f"\n{table(found, speeds, runs_per_task)}", flush=True)

    run_all(cells, root, folder, show, print_only=print_only, made=lambda run: keep_speed(root, folder, run))


if __name__ == "__main__":
    typer.run(main)

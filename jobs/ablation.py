"""Train every setting of the ablation, follow each run on held-out tasks, and print tables as Markdown.

python jobs/ablation.py [--steps 10] [--seeds 5] [--first-seed 0] [--every 2] [--settings "draco no-credit"]
                        [--runs-per-task 3] [--preset PRESET] [--root DIR] [--measured DIR] [--print-only]

A run plays the held-out tasks before training, every --every steps and after the last step. An interrupted job
continues where it was stopped. After each run all results so far are printed: the settings after their last step and at
equal judge spend, and learning curves, which are also `curves.csv` and `curves.png` in --measured. The measurements of
a run are a small file there, and a run with such a file is not repeated, so the work can be split over nights and
machines. All runs of a seed start from the same starter policy; other seeds may start from another one. `--print-only`
runs nothing.

Equal spend: the judge's tokens at reference prices, summed over the steps of a run. For each seed the budget is the
total of the cheapest setting with a judge; every other setting is compared at its last evaluated step within the
budget. The spend of each is printed; a smaller ``--every`` brings them closer. Settings without a judge are compared at
their last step.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import options
import typer
from measured import REFERENCE_JUDGE, Measured, Spend, Wanted, default_steps, of_preset, run_all

from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.evaluation.measures import (
    MOST_K,
    Seeds,
    comparison_measures,
    differences,
    holm,
    lost_rollouts,
    pass_k_measure,
    turns_played,
)

SETTINGS = "draco no-credit static-credit static outcome random"
Runs = Mapping[str, Mapping[int, Measured]]
"""Setting -> seed -> its run, if there is one."""


def budgets(runs: Runs) -> dict[int, float]:
    """Seed -> budget in dollars: the total spend of the cheapest setting with a judge."""
    found: dict[int, float] = {}
    for of_setting in runs.values():
        for seed, measured in of_setting.items():
            spent = measured.spent[measured.last].dollars
            if spent:
                found[seed] = min(spent, found.get(seed, spent))
    return found


def percent(interval: Interval, sign: str = "") -> str:
    """``61.5 [52.0, 70.1]``, in %."""
    mean, low, high = (f"{100 * value:{sign}.1f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def row(name: str, seeds: Seeds, runs_per_task: int, cost: str) -> str:
    """One line of the table of results."""
    ks = range(1, min(runs_per_task, MOST_K) + 1)
    rates = [
        pass_k_measure(seeds, runs_per_task, k, scenarios=True, whole=whole) for whole in (False, True) for k in ks
    ]
    played = turns_played(seeds)
    lost = f"{lost_rollouts(seeds)} of {sum(len(part) for seed in seeds for part in seed)}"
    mean_turns = f"{fmean(played):.1f}" if played else "-"
    cells = [name, *(percent(each.interval()) for each in rates), mean_turns, lost, cost]
    return f"| {' | '.join(cells)} |"


def print_differences(runs: Runs, chosen: Mapping[str, Mapping[int, int]], runs_per_task: int) -> None:
    """Print each other setting minus the first, for every measure, over their common seeds, as Markdown."""
    first, *others = chosen
    found = {}
    for name in others:
        if both := chosen[first].keys() & chosen[name].keys():
            pair = {each: {seed: chosen[each][seed] for seed in sorted(both)} for each in (name, first)}
            one, other = (comparison_measures(seeds, runs_per_task) for seeds in evaluated(runs, pair).values())
            found[name] = len(both), differences(one, other)
    if not found:
        return
    adjusted = iter(holm([p_value for _, of_one in found.values() for _, p_value in of_one.values()]))
    measures = list(next(iter(found.values()))[1])
    print(f"\n| Against {first} | {' | '.join(measures)} | Seeds |\n|{'---|' * (2 + len(measures))}")
    for name, (seeds, of_one) in found.items():
        cells = []
        for what, (interval, _) in of_one.items():
            shown = turns(interval) if what == "turns" else percent(interval, "+")
            cells.append(f"{shown}, p {next(adjusted):.4f}")
        print(f"| {name} | {' | '.join(cells)} | {seeds} |")


def turns(interval: Interval) -> str:
    """``-0.4 [-0.9, +0.1]``; the mean alone if the interval is unbounded."""
    if not math.isfinite(interval.low):
        return f"{interval.mean:+.1f}"
    return f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def evaluated(runs: Runs, chosen: Mapping[str, Mapping[int, int]]) -> dict[str, Seeds]:
    """Setting -> evaluations of its seeds at the steps ``chosen`` (setting -> seed -> step)."""
    return {
        setting: [[runs[setting][seed].evaluations[step]] for seed, step in steps.items()]
        for setting, steps in chosen.items()
        if steps
    }


def print_results(title: str, runs: Runs, chosen: Mapping[str, Mapping[int, int]], runs_per_task: int) -> None:
    """Print a table of settings, each at its seeds' chosen steps, and the differences to the first."""
    found = evaluated(runs, chosen)
    if not found:
        return
    ks = range(1, min(runs_per_task, MOST_K) + 1)
    columns = ["Setting", *(f"TGC p^{k}" for k in ks), *(f"SGC p^{k}" for k in ks), "Turns", "Lost", "Seeds", "Steps"]
    columns.append("Judge tokens and cost per run")
    print(f"\n## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, seeds in found.items():
        steps = chosen[name]
        spent = sum((runs[name][seed].spent[step] for seed, step in steps.items()), start=Spend())
        cost = f"{spent.tokens / len(steps) / 1e6:.2f}M, ${spent.dollars / len(steps):.2f}"
        said = " or ".join(map(str, sorted(set(steps.values()))))
        print(row(name, seeds, runs_per_task, f"{len(steps)} | {said} | {cost}"))
    for name in (each for each in chosen if each not in found):
        print(f"| {name} | not run yet |{' |' * (len(columns) - 2)}")
    print_differences(runs, {name: chosen[name] for name in found}, runs_per_task)


def print_curves(runs: Runs, runs_per_task: int) -> list[list[str | int | float]]:
    """Print TGC by step as Markdown; returns rows of setting, step, seeds, TGC, low, high and dollars of the judge."""
    steps = sorted({step for of_setting in runs.values() for each in of_setting.values() for step in each.evaluations})
    print(
        f"\n## Held-out TGC by training step\n\n| Setting | {' | '.join(map(str, steps))} |\n"
        f"|{'---|' * (1 + len(steps))}"
    )
    rows: list[list[str | int | float]] = []
    for name, of_setting in runs.items():
        cells = []
        for step in steps:
            here = [each for each in of_setting.values() if step in each.evaluations]
            if not here:
                cells.append("-")
                continue
            tgc = pass_k_measure([[each.evaluations[step]] for each in here], runs_per_task, scenarios=True).interval()
            dollars = sum(each.spent[step].dollars for each in here) / len(here)
            rows.append([name, step, len(here), tgc.mean, tgc.low, tgc.high, dollars])
            cells.append(percent(tgc))
        print(f"| {name} | {' | '.join(cells)} |")
    return rows


def write_curves(root: Path, rows: Sequence[Sequence[str | int | float]]) -> None:
    """Write the learning curves, by step and by judge cost, to ``curves.csv`` and ``curves.png``."""
    with (root / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["setting", "step", "seeds", "tgc", "low", "high", "judge_dollars"])
        writer.writerows(rows)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_step, by_cost = figure.subplots(1, 2, sharey=True)
    for name in dict.fromkeys(each[0] for each in rows):
        of_setting = [each[1:] for each in rows if each[0] == name]
        steps, _, tgc, low, high, dollars = zip(*of_setting, strict=True)
        (line,) = by_step.plot(steps, tgc, marker="o", label=name)
        by_step.fill_between(steps, low, high, color=line.get_color(), alpha=0.12)
        by_cost.plot(dollars, tgc, marker="o", color=line.get_color())
    by_step.set(xlabel="training step", ylabel="held-out TGC (band: 95 % interval)", ylim=(0, 1))
    by_cost.set(xlabel=f"judge cost at {REFERENCE_JUDGE}'s prices, mean over seeds ($)")
    figure.legend(loc="outside right center")
    figure.savefig(root / "curves.png", dpi=150)


def print_all(runs: Runs, root: Path, runs_per_task: int) -> None:
    """Print all tables and write the curves of the runs so far."""
    known = {name: of_setting for name, of_setting in runs.items() if of_setting}
    if not known:
        print("no setting has been run yet")
        return
    print_results(
        f"Before training, {runs_per_task} runs per task",
        known,
        {next(iter(known)): dict.fromkeys(next(iter(known.values())), 0)},
        runs_per_task,
    )
    last = {name: {seed: each.last for seed, each in of_setting.items()} for name, of_setting in runs.items()}
    print_results("After the last step", runs, last, runs_per_task)
    allowed = budgets(runs)
    equal = {
        name: {seed: each.within(allowed[seed]) for seed, each in of_setting.items() if seed in allowed}
        for name, of_setting in runs.items()
    }
    print_results("At the same judge spend", runs, equal, runs_per_task)
    write_curves(root, print_curves(known, runs_per_task))
    policies: dict[str, set[int]] = {}
    for of_setting in known.values():
        for seed, each in of_setting.items():
            policies.setdefault(each.policy, set()).add(seed)
    if len(policies) > 1:
        told = "; ".join(f"{policy}: {', '.join(map(str, sorted(seeds)))}" for policy, seeds in policies.items())
        print(f"\nStarter policies, with the seeds that began from each: {told}.")
    print(
        "\nIn %, except turns, with 95 % intervals over scenarios and, if there are several, training seeds; means "
        "over seeds; differences over common seeds, p after Holm's correction. Lost rollouts count as failures; "
        "intervals cover every result they could have had. The judge is the offline rule judge; dollars are its "
        f"tokens at {REFERENCE_JUDGE}'s reference prices. At the same spend: for each seed the last evaluated step at "
        "which a run had spent at most as much as the cheapest setting with a judge spent in total. Curves: "
        f"{root / 'curves.csv'}, {root / 'curves.png'}"
    )


def main(
    steps: options.Steps = None,
    seeds: options.Seeds = 5,
    first_seed: options.FirstSeed = 0,
    settings: Annotated[str, typer.Option(help="Settings to train, separated by spaces.")] = SETTINGS,
    every: Annotated[
        int, typer.Option(min=1, help="Training steps between two evaluations; the first is before training.")
    ] = 2,
    runs_per_task: options.RunsPerTask = 3,
    preset: Annotated[
        str, typer.Option(help="A preset of a sandbox, or a YAML file; it must use the rule judge.")
    ] = "sandbox",
    root: options.Root = None,
    measured: options.Figures = None,
    print_only: options.PrintOnly = False,
    overrides: options.Overrides = None,
) -> None:
    """Train and evaluate all, the first seed of every setting first; print tables and curves after each run."""
    root = (root or Path(f"runs/ablation{of_preset(preset)}")).resolve()
    last, folder = steps or default_steps(preset), measured or root / "measured"
    names = settings.split()
    cells = {
        (name, seed): Wanted(
            preset=preset,
            setting=name,
            seed=seed,
            steps=last,
            every=every,
            runs_per_task=runs_per_task,
            overrides=tuple(overrides or ()),
        )
        for seed in range(first_seed, first_seed + seeds)
        for name in names
    }

    def show(found: Mapping[tuple[str, int], Measured]) -> None:
        runs = {name: {seed: run for (of, seed), run in found.items() if of == name} for name in names}
        print_all(runs, folder, runs_per_task)

    run_all(cells, root, folder, show, print_only=print_only)


if __name__ == "__main__":
    typer.run(main)

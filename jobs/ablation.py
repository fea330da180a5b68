"""Train every setting of the ablation on the sandbox and print the paper's result table for them, as Markdown.

python jobs/ablation.py [--steps 10] [--seeds 3] [--settings "draco no-credit"] [--runs-per-task 3] [--root DIR]
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from draco_ray.config.schema import DracoConfig, Price
from draco_ray.judging.pricing import price_of
from draco_ray.lab.evaluation.comparison import holm
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.evaluation.summary import Summary, differences, summarise
from draco_ray.lab.runs.cost import read_calls
from draco_ray.records import Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations

SETTINGS = "draco no-credit static-credit static outcome random"
REFERENCE_JUDGE = "gpt-5.4"
"""The rule judge costs nothing: its tokens are priced as those of the paper's judge."""


def train(
    root: Path, setting: str, seed: int, steps: int, runs: int, overrides: Sequence[str], label: str = ""
) -> RunDirectory:
    """One finished run; one that is there already, with the same words, is taken as it is, or continued.

    Args:
        root: where runs are.
        setting: of the ablation.
        seed: of the run.
        steps: training steps.
        runs: evaluation rollouts per task, before and after.
        overrides: further words of ``draco train``.
        label: of these overrides, for the run's name.
    """
    name = f"{setting}{label}-seed{seed}-steps{steps}-runs{runs}"
    words = [
        f"seed={seed}",
        f"train.steps={steps}",
        f"train.evaluation_runs={runs}",
        "train.evaluate_before_after=true",
    ]
    words += [*overrides, f"run.root={root}", f"run.name={name}"]
    marker = root / name / "ablation.yaml"
    if marker.is_file() and yaml.safe_load(marker.read_text(encoding="utf-8")) == words:
        return RunDirectory.open(root / name)
    command = [sys.executable, "-m", "draco_ray.cli", "train", "sandbox", "--setting", setting, *words]
    if (root / name / "config.yaml").is_file():
        command += ["--resume", str(root / name)]
    print(f"ablation: draco {' '.join(command[3:])}", file=sys.stderr, flush=True)
    process = subprocess.run(command, stdout=sys.stderr, check=False)
    if process.returncode:
        sys.exit(f"ablation: {name} failed with exit code {process.returncode}; start again to go on from there")
    # Written last, so that an interrupted run is never taken for a finished one.
    marker.write_text(yaml.safe_dump(words), encoding="utf-8")
    return RunDirectory.open(root / name)


def judge_cost(run: RunDirectory, price: Price) -> tuple[int, float]:
    """Judge tokens of a run, in and out, and their dollars at ``price``."""
    calls = [call for step in read_calls(run).values() for call in step if call.requests]
    tokens_in = sum(call.input_tokens for call in calls)
    cached = sum(call.cached_tokens for call in calls)
    tokens_out = sum(call.output_tokens for call in calls)
    return tokens_in + tokens_out, price_of(price, tokens_in, cached, tokens_out)


def percent(interval: Interval, sign: str = "") -> str:
    """``61.5 [52.0, 70.1]``, in %."""
    mean, low, high = (f"{100 * value:{sign}.1f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def row(name: str, summary: Summary, cost: str) -> str:
    """One line of the table of results."""
    lost = f"{summary.lost} of {summary.rollouts}"
    cells = [name, *map(percent, summary.tgc), *map(percent, summary.sgc), f"{summary.turns:.1f}", lost, cost]
    return f"| {' | '.join(cells)} |"


def print_differences(first: str, summaries: Mapping[str, Summary]) -> None:
    """Every other setting minus ``first``, in each measure, as Markdown."""
    found = {name: differences(each, summaries[first]) for name, each in summaries.items() if name != first}
    if not found:
        return
    adjusted = iter(holm([p_value for of_one in found.values() for _, p_value in of_one.values()]))
    names = list(summaries[first].measures)
    print(f"\n| Against {first} | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for name, of_one in found.items():
        cells = []
        for measure, (interval, _) in of_one.items():
            shown = turns(interval) if measure == "turns" else percent(interval, "+")
            cells.append(f"{shown}, p {next(adjusted):.4f}")
        print(f"| {name} | {' | '.join(cells)} |")


def turns(interval: Interval) -> str:
    """``-0.4 [-0.9, +0.1]``; the mean alone where nothing bounds it."""
    if not math.isfinite(interval.low):
        return f"{interval.mean:+.1f}"
    return f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of every run.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per setting.")] = 3,
    settings: Annotated[str, typer.Option(help="Settings to train, separated by spaces.")] = SETTINGS,
    runs_per_task: Annotated[int, typer.Option(min=1, help="Evaluation rollouts per task: n of pass^k.")] = 3,
    root: Annotated[Path, typer.Option(help="Where the runs go; finished ones there are not trained again.")] = Path(
        "runs/ablation"
    ),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Further config keys, for every run.")
    ] = None,
) -> None:
    """Train, evaluate before and after on held-out tasks, and print the table."""
    price = DracoConfig().judge.prices[REFERENCE_JUDGE]
    names = settings.split()
    base: list[list[Evaluation]] = []
    after: dict[str, list[list[Evaluation]]] = {name: [] for name in names}
    costs: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    split = ""
    for seed in range(seeds):
        for name in names:
            run = train(root.resolve(), name, seed, steps, runs_per_task, overrides or [])
            evaluations = read_evaluations(run)
            (_, split), last = min(evaluations), max(evaluations)
            base.append(evaluations[min(evaluations)])
            after[name].append(evaluations[last])
            costs[name].append(judge_cost(run, price))

    summaries = {name: summarise([[each] for each in measured], runs_per_task) for name, measured in after.items()}
    first = summaries[names[0]]
    ks = range(1, len(first.tgc) + 1)
    print(f"## {steps} steps, {seeds} seeds, {first.tasks} tasks of the sandbox's {split} x {runs_per_task} runs\n")
    columns = ["Setting", *(f"TGC p^{k}" for k in ks), *(f"SGC p^{k}" for k in ks)]
    columns += ["Turns", "Lost", "Judge tokens and cost a run"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    print(row("before training", summarise([base], runs_per_task), "-"))
    for name in names:
        tokens = sum(tokens for tokens, _ in costs[name]) / seeds
        dollars = sum(dollars for _, dollars in costs[name]) / seeds
        print(row(name, summaries[name], f"{tokens / 1e6:.2f}M, ${dollars:.2f}"))
    print_differences(names[0], summaries)
    over = "over training seeds and scenarios" if seeds > 1 else "over scenarios"
    alone = "" if seeds > 1 else " One training seed: nothing here speaks of training again."
    print(
        f"\nIn % (turns apart), with 95 % intervals {over}; means over seeds; p after Holm's correction.{alone} Lost "
        f"rollouts count as failures; intervals span what they would have been. The judge is the offline rule judge; "
        f"dollars are its tokens at {REFERENCE_JUDGE}'s reference prices."
    )


if __name__ == "__main__":
    typer.run(main)

"""How wrong may a judge be? Train on the sandbox with a rule judge that is wrong in known shares, print what is left.

python jobs/bench_noise.py [--settings "draco no-credit"] [--seeds 3] [--steps 10] [--root DIR] [--print-only]

Every kind of error alone, in growing shares, and the shares of the paper's self-judge. A night's work on two cores: it
goes on where it was stopped, and prints its table after each run from what there is; `--print-only` runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from ablation import SANDBOX, default_steps, done, percent, run_name, train, train_words

from draco_ray.lab.evaluation.summary import Summary, differences, summarise
from draco_ray.records import Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations

NOISES: dict[str, Mapping[str, float]] = {
    "none": {},
    "false pass 30 %, false fail 1 %": {"false_pass": 0.304, "false_fail": 0.013},
    **{f"false pass {share:.0%}": {"false_pass": share} for share in (0.1, 0.3, 0.6)},
    **{f"false fail {share:.0%}": {"false_fail": share} for share in (0.1, 0.3, 0.6)},
    **{f"wrong step {share:.0%}": {"wrong_step": share} for share in (0.2, 0.4, 1.0)},
    **{f"missed criterion {share:.0%}": {"missed_criterion": share} for share in (0.3, 0.6)},
}
"""What is wrong, by name; the second is what the paper's self-judge got wrong of the frontier judge's verdicts."""
Cell = tuple[str, str, int]
"""(noise, setting, seed)."""


def words(noise: Mapping[str, float]) -> list[str]:
    """``draco train``'s words for it."""
    return [f"judge.rule_judge.{name}={share:g}" for name, share in noise.items()]


def label(noise: Mapping[str, float]) -> str:
    """Part of the run's name.

    >>> label({"false_pass": 0.3})
    '-false_pass0.3'
    """
    return "".join(f"-{name}{share:g}" for name, share in noise.items())


def ends(run: RunDirectory) -> tuple[list[Evaluation], list[Evaluation]]:
    """Its evaluations before the first and after the last step."""
    found = read_evaluations(run)
    return found[min(found)], found[max(found)]


def table(found: Mapping[Cell, RunDirectory], settings: list[str], runs_per_task: int) -> str:
    """A row a noise, a column a setting: TGC after training and what it gained, as Markdown.

    The last column is the first setting's TGC minus the second's, over the seeds that both have.
    """
    two = settings[:2] if len(settings) > 1 else []
    headers = [*(f"{name}: TGC, gain, seeds" for name in settings), *([" - ".join(two)] if two else [])]
    lines = [f"| Judge | {' | '.join(headers)} |", "|---|" + "---|" * len(headers)]
    for noise in NOISES:
        of_noise = {
            name: {seed: ends(run) for (of, each, seed), run in found.items() if (of, each) == (noise, name)}
            for name in settings
        }
        cells = [_cell(list(of_noise[name].values()), runs_per_task) for name in settings]
        if two:
            first, second = (of_noise[name] for name in two)
            both = sorted(first.keys() & second.keys())
            sides = [[[side[seed][1]] for seed in both] for side in (first, second)]
            cells.append(gain(*(summarise(side, runs_per_task) for side in sides)) if both else "not run yet")
        lines.append(f"| {noise} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(measured: list[tuple[list[Evaluation], list[Evaluation]]], runs_per_task: int) -> str:
    if not measured:
        return "not run yet"
    before, after = (summarise([[each] for each in side], runs_per_task) for side in zip(*measured, strict=True))
    return f"{percent(after.tgc[0])}, {gain(after, before)}, {len(measured)}"


def gain(after: Summary, before: Summary) -> str:
    """The first less the second, in points of TGC, paired by task."""
    interval, _ = next(iter(differences(after, before).values()))
    return percent(interval, "+")


def main(
    settings: Annotated[str, typer.Option(help="Settings to train, separated by spaces.")] = "draco no-credit",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of every run; the preset's.")] = None,
    runs_per_task: Annotated[int, typer.Option(min=1, help="Evaluation rollouts per task.")] = 1,
    preset: Annotated[Literal["sandbox", "sandbox-hard"], typer.Option(help="Which sandbox.")] = "sandbox",
    root: Annotated[
        Path | None, typer.Option(help="Where the runs go; finished ones there are not trained again.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print-only", help="Print what there is, run nothing.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Further config keys, for every run.")
    ] = None,
) -> None:
    """Train all, the first seed of everything first, and print the table after each run."""
    root, names = (root or Path(f"runs/noise{preset.removeprefix(SANDBOX)}")).resolve(), settings.split()
    last = steps or default_steps(preset)
    found: dict[Cell, RunDirectory] = {}
    waiting: list[tuple[Cell, list[str]]] = []
    for seed in range(seeds):
        for noise, shares in NOISES.items():
            for name in names:
                more = [*words(shares), *(overrides or [])]
                run = run_name(name, seed, last, runs_per_task, label(shares), preset)
                if done(root / run / "ablation.yaml", train_words(root, run, seed, last, runs_per_task, more)):
                    found[noise, name, seed] = RunDirectory.open(root / run)
                else:
                    waiting.append(((noise, name, seed), more))
    print(table(found, names, runs_per_task), flush=True)
    for cell, more in [] if print_only else waiting:
        noise, name, seed = cell
        found[cell] = train(root, name, seed, last, runs_per_task, more, label(NOISES[noise]), preset)
        print(f"\n{table(found, names, runs_per_task)}", flush=True)
    print(
        "\nIn %, with 95 % intervals over scenarios and, from two seeds on, training seeds; the last column is paired "
        "by task. The judge is the offline rule judge, wrong in these shares of its verdicts, citations or criteria; "
        "nothing else changes."
    )


if __name__ == "__main__":
    typer.run(main)

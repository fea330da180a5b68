"""How wrong may a judge be? Train on the sandbox with a rule judge that is wrong in known shares, print what is left.

python jobs/bench_noise.py [--settings "draco no-credit"] [--noises "none,wrong step 40%"] [--seeds 3]
                           [--steps 10] [--root DIR] [--measured DIR] [--print-only]

Every kind of error alone, in growing shares, and the shares of the paper's self-judge. A night's work on two cores: it
goes on where it was stopped, and prints its table after each run from what there is; what was measured of a run is a
small file in --measured, and a run whose file is there is not run again. `--print-only` runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from ablation import percent
from measured import SANDBOX, Measured, Wanted, default_steps, of_one_policy

from draco_ray.algorithm.rules import find_rule
from draco_ray.config.load import load_config
from draco_ray.lab.evaluation.summary import Summary, differences, summarise

NOISES: dict[str, Mapping[str, float]] = {
    "none": {},
    "false pass 30% and false fail 1%": {"false_pass": 0.304, "false_fail": 0.013},
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


def noticed(noise: Mapping[str, float], preset: str, setting: str) -> Mapping[str, float]:
    """What of it a setting can notice: one that makes no credit call gets no step named, and so no wrong one."""
    if find_rule(load_config(preset, setting=setting).algorithm.rule).cites:
        return noise
    return {name: share for name, share in noise.items() if name != "wrong_step"}


def table(found: Mapping[Cell, Measured], noises: list[str], settings: list[str], runs_per_task: int) -> str:
    """A row a noise, a column a setting: TGC after training and what it gained, as Markdown.

    The last column is the first setting's TGC minus the second's, over the seeds that both have.
    """
    two = settings[:2] if len(settings) > 1 else []
    headers = [*(f"{name}: TGC, gain, seeds" for name in settings), *([" - ".join(two)] if two else [])]
    lines = [f"| Judge | {' | '.join(headers)} |", "|---|" + "---|" * len(headers)]
    for noise in noises:
        of_noise = {
            name: {seed: run for (of, each, seed), run in found.items() if (of, each) == (noise, name)}
            for name in settings
        }
        cells = [_cell(list(of_noise[name].values()), runs_per_task) for name in settings]
        if two:
            first, second = (of_noise[name] for name in two)
            both = sorted(first.keys() & second.keys())
            sides = (after_training([side[seed] for seed in both], runs_per_task) for side in (first, second))
            cells.append(gain(*sides) if both else "not run yet")
        lines.append(f"| {noise} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(runs: list[Measured], runs_per_task: int) -> str:
    if not runs:
        return "not run yet"
    before = summarise([[run.evaluations[0]] for run in runs], runs_per_task)
    after = after_training(runs, runs_per_task)
    return f"{percent(after.tgc[0])}, {gain(after, before)}, {len(runs)}"


def after_training(runs: list[Measured], runs_per_task: int) -> Summary:
    """Runs of one setting and noise after their last step."""
    return summarise([[run.evaluations[run.last]] for run in runs], runs_per_task)


def gain(after: Summary, before: Summary) -> str:
    """The first less the second, in points of TGC, paired by task."""
    interval, _ = next(iter(differences(after, before).values()))
    return percent(interval, "+")


def main(
    settings: Annotated[str, typer.Option(help="Settings to train, separated by spaces.")] = "draco no-credit",
    noises: Annotated[str, typer.Option(help="Names of judges to train with, separated by commas.")] = ",".join(NOISES),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of every run; the preset's.")] = None,
    runs_per_task: Annotated[int, typer.Option(min=1, help="Evaluation rollouts per task.")] = 1,
    preset: Annotated[Literal["sandbox", "sandbox-hard"], typer.Option(help="Which sandbox.")] = "sandbox",
    root: Annotated[Path | None, typer.Option(help="Where the runs go; interrupted ones there are continued.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Where figures of finished runs are, a file each; ROOT/measured.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print-only", help="Print what there is, run nothing.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Further config keys, for every run.")
    ] = None,
) -> None:
    """Train all, the first seed of everything first, and print the table after each run."""
    root, names = (root or Path(f"runs/noise{preset.removeprefix(SANDBOX)}")).resolve(), settings.split()
    last, measured = steps or default_steps(preset), measured or root / "measured"
    chosen = noises.split(",")
    if unknown := [each for each in chosen if each not in NOISES]:
        sys.exit(f"bench-noise: no noise {unknown[0]!r}, expected some of {', '.join(NOISES)}")
    found: dict[Cell, Measured] = {}
    waiting: dict[Cell, Wanted] = {}
    for seed in range(seeds):
        for noise in chosen:
            for name in names:
                errors = noticed(NOISES[noise], preset, name)
                wanted = Wanted(
                    preset=preset,
                    setting=name,
                    seed=seed,
                    steps=last,
                    every=None,
                    runs_per_task=runs_per_task,
                    overrides=(*words(errors), *(overrides or ())),
                    label=label(errors),
                )
                if known := wanted.known(measured):
                    found[noise, name, seed] = known
                else:
                    waiting[noise, name, seed] = wanted
    known_runs = [(seed, measured) for (_, _, seed), measured in found.items()]
    possible = of_one_policy(known_runs, [] if print_only else waiting.values())
    print(table(found, chosen, names, runs_per_task), flush=True)
    for cell, wanted in waiting.items():
        if wanted not in possible:
            continue
        # Several noises of which it notices nothing are one run.
        found[cell] = wanted.known(measured) or wanted.make(root, measured)
        print(f"\n{table(found, chosen, names, runs_per_task)}", flush=True)
    print(
        "\nIn %, with 95 % intervals over scenarios and, from two seeds on, training seeds; the last column is paired "
        "by task. The judge is the offline rule judge, wrong in these shares of its verdicts, citations or criteria; "
        "nothing else changes."
    )


if __name__ == "__main__":
    typer.run(main)

"""How wrong may a judge be? Train in the sandbox with a rule judge of known error rates; print how much gain is left.

python jobs/bench_noise.py [--settings "draco no-credit"] [--noises "none,wrong step 40%"] [--seeds 3]
                           [--first-seed 0] [--steps 10] [--held-out] [--root DIR] [--measured DIR] [--print-only]
python jobs/bench_noise.py --settings "draco calibrated no-credit" --seeds 6
                           --noises "none,GPT-5.2-Thinking,Qwen3-30B-Thinking,Llama-3.3-70B"

Each kind of error alone, at growing rates, and the rates of real judges: of the paper's self-judge, and of a strong, a
medium and a weak judge. With these three the setting `calibrated` mixes the paper's rule with no credit according to
the judge's reliability. It takes a night on two cores. An interrupted job continues where it was stopped. After each
run it prints the table of all runs so far, also as `noise.csv` and `noise.png` in --measured. The measurements of a run
are a small file there, and a run with such a file is not repeated. `--print-only` runs nothing.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import options
import typer
from ablation import percent
from bench_hacks_sandbox import HELD_OUT, held_out_judge, write_watched
from measured import SANDBOX, Measured, Wanted, default_steps, run_all

from draco_ray.algorithm.rules import find_rule
from draco_ray.config.load import load_config
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.evaluation.measures import Measure, pass_k_measure
from draco_ray.lab.evaluation.measures import difference as paired_difference

NOISES: dict[str, Mapping[str, float]] = {
    "none": {},
    "false pass 30% and false fail 1%": {"false_pass": 0.304, "false_fail": 0.013},
    **{f"false pass {share:.0%}": {"false_pass": share} for share in (0.1, 0.3, 0.6)},
    **{f"false fail {share:.0%}": {"false_fail": share} for share in (0.1, 0.3, 0.6)},
    **{f"wrong step {share:.0%}": {"wrong_step": share} for share in (0.2, 0.4, 1.0)},
    **{f"missed criterion {share:.0%}": {"missed_criterion": share} for share in (0.3, 0.6)},
    # `draco attribution-bench --labels FILE` prints these and the reliabilities, with the labels of AgentProcessBench
    # (arXiv 2603.14465; GPT-5.2-Thinking (medium), Qwen3-30B-A3B-Thinking-2507, Llama-3.3-70B-Instruct).
    "GPT-5.2-Thinking": {"false_pass": 0.423, "false_fail": 0.048, "wrong_step": 0.047},
    "Qwen3-30B-Thinking": {"false_pass": 0.615, "false_fail": 0.110, "wrong_step": 0.135},
    "Llama-3.3-70B": {"false_pass": 0.904, "false_fail": 0.021, "wrong_step": 0.286},
}
"""Name -> error rates; the second are those of the paper's self-judge, compared with the frontier judge."""
RELIABILITY = {"none": 1.0, "GPT-5.2-Thinking": 0.970, "Qwen3-30B-Thinking": 0.778, "Llama-3.3-70B": 0.0}
"""`algorithm.reliability` of a judge, for the setting `CALIBRATED`: error-free, strong, medium and weak."""
CALIBRATED = "calibrated"
AGAINST = "Against an error-free judge"
Cell = tuple[str, str, int]
"""(noise, setting, seed)."""


def words(noise: Mapping[str, float]) -> list[str]:
    """Overrides of ``draco train`` for a noise."""
    return [f"judge.rule_judge.{name}={share:g}" for name, share in noise.items()]


def label(noise: Mapping[str, float]) -> str:
    """Part of the run's name.

    >>> label({"false_pass": 0.3})
    '-false_pass0.3'
    """
    return "".join(f"-{name}{share:g}" for name, share in noise.items())


def rule_words(setting: str, noise: str) -> tuple[str, tuple[str, ...], str]:
    """A setting under a judge: the ablation's setting, further overrides, and their part of the run's name.

    >>> rule_words("calibrated", "Qwen3-30B-Thinking")
    ('draco', ('algorithm.rule=draco_calibrated', 'algorithm.reliability=0.778'), '-calibrated0.778')
    >>> rule_words("calibrated", "Llama-3.3-70B")  # the same rule as without credit, so the same run
    ('no-credit', (), '')
    """
    if setting != CALIBRATED:
        return setting, (), ""
    trusted = RELIABILITY[noise]
    if trusted in (0.0, 1.0):
        return "draco" if trusted else "no-credit", (), ""
    overrides = ("algorithm.rule=draco_calibrated", f"algorithm.reliability={trusted:g}")
    return "draco", overrides, f"-{CALIBRATED}{trusted:g}"


def noticed(noise: Mapping[str, float], preset: str, setting: str) -> Mapping[str, float]:
    """The part of a noise that affects a setting: without credit calls no step is cited, so none is wrong."""
    if find_rule(load_config(preset, setting=setting).algorithm.rule).cites:
        return noise
    return {name: share for name, share in noise.items() if name != "wrong_step"}


@dataclass(frozen=True)
class Left:
    """What was left of the gain under one judge, in one setting, over the seeds that were run."""

    noise: str
    setting: str
    seeds: int
    tgc: Interval
    """TGC after training."""
    gain: Interval
    kept: float | None
    """Gain / gain under an error-free judge, over common seeds; None without such seeds or gain."""
    against_right: Interval | None
    """TGC minus TGC under an error-free judge, paired by task, over common seeds."""


def what_is_left(found: Mapping[Cell, Measured], noises: list[str], settings: list[str], runs: int) -> list[Left]:
    """A line per noise and setting that was run, in this order. ``runs``: evaluation rollouts per task."""
    lines = []
    for noise in noises:
        for setting in settings:
            here, right = of_setting(found, noise, setting), of_setting(found, "none", setting)
            if not here or (noise != "none" and here == {seed: right.get(seed) for seed in here}):
                continue  # Not run, or the noise does not affect this setting.
            shared = [] if noise == "none" else sorted(here.keys() & right.keys())
            kept, against = None, None
            if shared:
                after = after_training([here[seed] for seed in shared], runs)
                after_right = after_training([right[seed] for seed in shared], runs)
                against = difference(after, after_right)
                whole = difference(after_right, before_training([right[seed] for seed in shared], runs)).mean
                gained = difference(after, before_training([here[seed] for seed in shared], runs)).mean
                kept = gained / whole if whole > 0 else None
            ended = after_training(list(here.values()), runs)
            gain = difference(ended, before_training(list(here.values()), runs))
            lines.append(Left(noise, setting, len(here), ended.interval(), gain, kept, against))
    return lines


def of_setting(found: Mapping[Cell, Measured], noise: str, setting: str) -> dict[int, Measured]:
    """Seed -> run of this noise and setting."""
    return {seed: run for (of, name, seed), run in found.items() if (of, name) == (noise, setting)}


def print_table(found: Mapping[Cell, Measured], noises: list[str], settings: list[str], runs: int) -> list[Left]:
    """Print what is left of the gain, which is returned, and each setting's TGC minus the last one's, as Markdown."""
    lines = what_is_left(found, noises, settings, runs)
    print(f"\n| Judge | Setting | Seeds | TGC | Gain | Kept | {AGAINST} |\n|{'---|' * 7}")
    for each in lines:
        kept = "-" if each.kept is None else f"{each.kept:.0%}"
        against = "-" if each.against_right is None else percent(each.against_right, "+")
        cells = [each.setting, str(each.seeds), percent(each.tgc), percent(each.gain, "+"), kept, against]
        print(f"| {each.noise} | {' | '.join(cells)} |")
    run = {(noise, setting) for noise, setting, _ in found}
    missing = [f"{noise} ({setting})" for noise in noises for setting in settings if (noise, setting) not in run]
    if missing:
        print(f"\nNot run yet: {', '.join(missing)}.")
    *others, last = settings
    for setting in others:
        print(f"\n| Judge | {setting} - {last} | Seeds |\n|---|---|---|")
        for noise in noises:
            one, other = of_setting(found, noise, setting), of_setting(found, noise, last)
            if both := sorted(one.keys() & other.keys()):
                sides = (after_training([side[seed] for seed in both], runs) for side in (one, other))
                print(f"| {noise} | {percent(difference(*sides), '+')} | {len(both)} |")
    sys.stdout.flush()
    return lines


def write_plot(root: Path, lines: Sequence[Left]) -> None:
    """Write ``noise.csv`` and ``noise.png``, if there is a run."""
    if not lines:
        return
    with (root / "noise.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["judge", "setting", "seeds", "tgc", "gain", "low", "high", "kept"])
        for each in lines:
            gain = (each.gain.mean, each.gain.low, each.gain.high)
            writer.writerow([each.noise, each.setting, each.seeds, each.tgc.mean, *gain, each.kept])
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(each.noise for each in lines))
    settings = list(dict.fromkeys(each.setting for each in lines))
    figure = Figure(figsize=(9, 1.5 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, setting in enumerate(settings):
        here = [each for each in lines if each.setting == setting]
        # Offset the settings so that their points do not overlap.
        at = [names.index(each.noise) + 0.24 * (place - (len(settings) - 1) / 2) for each in here]
        means = [100 * each.gain.mean for each in here]
        below = [mean - 100 * each.gain.low for mean, each in zip(means, here, strict=True)]
        above = [100 * each.gain.high - mean for mean, each in zip(means, here, strict=True)]
        axes.errorbar(means, at, xerr=[below, above], fmt="o", capsize=3, label=setting)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlabel="gain of held-out TGC by training, in points (bar: 95 % interval)", title="A judge with errors")
    figure.legend(loc="outside right upper")
    figure.savefig(root / "noise.png", dpi=150)


def after_training(runs: list[Measured], runs_per_task: int) -> Measure:
    """TGC of the runs of one setting and noise after their last step."""
    return pass_k_measure([[run.evaluations[run.last]] for run in runs], runs_per_task, scenarios=True)


def before_training(runs: list[Measured], runs_per_task: int) -> Measure:
    """TGC of these runs before their first step."""
    return pass_k_measure([[run.evaluations[0]] for run in runs], runs_per_task, scenarios=True)


def difference(first: Measure, second: Measure) -> Interval:
    """TGC of the first minus TGC of the second, paired by task."""
    return paired_difference(first, second)[0]


def main(
    settings: Annotated[str, typer.Option(help="Settings to train, separated by spaces.")] = "draco no-credit",
    noises: Annotated[str, typer.Option(help="Names of judges to train with, separated by commas.")] = ",".join(NOISES),
    seeds: options.Seeds = 3,
    first_seed: options.FirstSeed = 0,
    steps: options.Steps = None,
    runs_per_task: options.RunsPerTask = 1,
    held_out: Annotated[bool, typer.Option("--held-out", help="Watch the runs with a held-out judge.")] = False,
    preset: Annotated[Literal["sandbox", "sandbox-hard"], typer.Option(help="Sandbox to train in.")] = "sandbox",
    root: options.Root = None,
    measured: options.Figures = None,
    print_only: options.PrintOnly = False,
    overrides: options.Overrides = None,
) -> None:
    """Train all, the first seed of everything first, and print the table after each run."""
    root, names = (root or Path(f"runs/noise{preset.removeprefix(SANDBOX)}")).resolve(), settings.split()
    last, folder = steps or default_steps(preset), measured or root / "measured"
    chosen = noises.split(",")
    if unknown := [each for each in chosen if each not in NOISES]:
        sys.exit(f"bench-noise: unknown judge {unknown[0]!r}; expected some of {', '.join(NOISES)}")
    if CALIBRATED in names and (unknown := [each for each in chosen if each not in RELIABILITY]):
        sys.exit(
            f"bench-noise: setting {CALIBRATED}: judge {unknown[0]!r} has no measured reliability; set --noises to "
            f"some of {', '.join(RELIABILITY)}"
        )

    def wanted(noise: str, name: str, seed: int) -> Wanted:
        setting, rule, rule_label = rule_words(name, noise)
        errors = noticed(NOISES[noise], preset, setting)
        return Wanted(
            preset=preset,
            setting=setting,
            seed=seed,
            steps=last,
            every=None,
            runs_per_task=runs_per_task,
            overrides=(*rule, *words(errors), *(HELD_OUT if held_out else ()), *(overrides or ())),
            label=rule_label + label(errors),
        )

    def show(found: Mapping[Cell, Measured]) -> None:
        write_plot(folder, print_table(found, chosen, names, runs_per_task))

    def made(run: Wanted) -> None:
        if held_out:
            write_watched(folder, run, root)

    seed_range = range(first_seed, first_seed + seeds)
    cells = {
        (noise, name, seed): wanted(noise, name, seed) for seed in seed_range for noise in chosen for name in names
    }
    with held_out_judge() if held_out and not print_only else nullcontext():
        run_all(cells, root, folder, show, print_only=print_only, made=made)
    print(
        "\nIn %, with 95 % intervals over scenarios and, from two seeds on, training seeds; differences are paired by "
        "task. Kept: share of the gain under an error-free judge, over common seeds. The judge is the offline rule "
        "judge with errors in these shares of its verdicts, citations or criteria; `calibrated` also sets "
        "algorithm.reliability. Plot: "
        f"{folder / 'noise.csv'}, {folder / 'noise.png'}"
    )


if __name__ == "__main__":
    typer.run(main)

"""Print how often evaluations' 95 % intervals contain the true value, and their width, compared with other methods.

python jobs/bench_intervals.py [--repeats 1000] [--only rates|differences|seeds|agreement]

Each line simulates evaluations of scenarios of three tasks, three runs each, from known rates: a logistic model with
effects of scenario, task, checkpoint and training seed. The truth is the mean over 100,000 scenarios (or seeds) of the
same model. Coverage below 93 is marked.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer
from scipy.special import expit, stdtrit

from draco_ray.lab.analysis.agreement import agreement, agreement_intervals, contingency
from draco_ray.lab.evaluation.intervals import ClusteredMean, clustered_mean, rate_difference, rate_interval
from draco_ray.lab.evaluation.measures import pass_hat_k
from draco_ray.records import BoolArray, FloatArray, IntArray

SCENARIOS = (15, 56, 139)
"""Numbers of scenarios: the sandbox's held-out splits, AppWorld's test_normal and test_challenge."""
TASKS, RUNS = 3, 3
TRUTH = 100_000
RESAMPLES = 600
LEVEL = 0.95
MARKED = 0.93
"""Coverage below which a line is marked."""
OURS = "ours"
JUDGMENTS = 30
"""Judgments per group: five criteria, six rollouts."""
GRADERS = (("seldom differ", -4.0, 1.0), ("differ", -2.0, 1.0), ("differ by group", -2.0, 3.0))
"""Name, log-odds of a difference, and their spread over groups."""
_ROUNDING = 1e-9
SUMMARY: list[tuple[str, str, Sequence[str], dict[int, list[list[float]]]]] = []
"""Printed tables: title, clusters, methods, and the coverage of each method by number of clusters."""


@dataclass(frozen=True, slots=True)
class Design:
    """A population of scenarios, and what is evaluated of it. Effects are standard deviations of log-odds."""

    name: str
    center: float
    """Log-odds of the typical task."""
    scenario: float
    task: float
    checkpoint: float = 0.4
    """Effect of a checkpoint on a task."""
    checkpoints: int = 1
    seed: float = 0.0
    """Effect of a training seed on all tasks."""


DESIGNS = (
    Design("nearly never", -5, 0.5, 0.5),
    Design("seldom", -3, 1.5, 1.0),
    Design("half, alike", 0, 0.5, 0.5),
    Design("half, unlike", 0, 2.0, 1.0),
    Design("half, all or nothing", 0, 8.0, 2.0),
    Design("most, 3 checkpoints", 1.5, 2.0, 1.0, checkpoints=3),
    Design("often", 4, 1.5, 1.0),
    Design("nearly always", 6, 1.0, 0.5),
)
PAIRS = (
    (Design("equal, half", 0, 1.5, 1.0), 0.0),
    (Design("equal, nearly deterministic", 0, 6.0, 4.0, checkpoint=0.05), 0.0),
    (Design("equal, nearly never", -5, 0.5, 0.5), 0.0),
    (Design("equal, nearly always", 6, 1.0, 0.5), 0.0),
    (Design("half and more", 0, 1.5, 1.0), 0.8),
    (Design("often and nearly always", 4, 1.0, 1.0), 1.0),
    (Design("never and always", -6, 0.5, 0.5), 12.0),
)
SEEDED = tuple(
    Design(f"{name}, seed effect {effect:g}", center, 1.5, 1.0, seed=effect)
    for name, center in (("half", 0.0), ("most", 2.0))
    for effect in (0.0, 0.15, 0.4)
)
METRICS = (("TGC p^1", 1, False), ("SGC p^1", 1, True), ("TGC p^3", 3, False), ("SGC p^3", 3, True))
Bounds = tuple[float, float]


def population(random: np.random.Generator, design: Design, scenarios: int) -> FloatArray:
    """Log-odds of the tasks of this many scenarios, shape (scenarios, tasks)."""
    scenario_S1 = random.normal(0, design.scenario, (scenarios, 1))
    return np.asarray(design.center + scenario_S1 + random.normal(0, design.task, (scenarios, TASKS)))


def play(random: np.random.Generator, design: Design, task_ST: FloatArray, seeds: int = 1) -> BoolArray:
    """Outcomes of every run, shape (seeds, scenarios, tasks, checkpoints, runs)."""
    each = random.normal(0, design.checkpoint, (seeds, *task_ST.shape, design.checkpoints, 1))
    seed_G = random.normal(0, design.seed, (seeds, 1, 1, 1, 1))
    chance = expit(task_ST[None, :, :, None, None] + seed_G + each)
    return np.asarray(random.random((*each.shape[:-1], RUNS)) < chance)


def truth_of(design: Design, k: int, whole: bool, shift: float = 0.0) -> float:
    """The true pass^k, over all possible scenarios and training seeds."""
    random = np.random.default_rng(1)
    # Draw a training seed for each scenario: the mean is the same, and needs fewer draws.
    task_ST = population(random, replace(design, scenario=math.hypot(design.scenario, design.seed)), TRUTH)
    return float(values(play(random, replace(design, seed=0.0), task_ST + shift), k, whole).mean())


def values(outcome: BoolArray, k: int, whole: bool) -> FloatArray:
    """pass^k of each task, or of each whole scenario: shape (seeds, scenarios, tasks or 1), mean over checkpoints."""
    solved = (outcome.all(axis=2, keepdims=True) if whole else outcome).sum(axis=-1)
    table = np.array([pass_hat_k(count, RUNS, k) for count in range(RUNS + 1)])
    return np.asarray(table[solved].mean(axis=-1))


def percentile(value_S: FloatArray, random: np.random.Generator) -> Bounds:
    """Bootstrap of whole scenarios, percentiles of the means."""
    means = value_S[random.integers(0, len(value_S), (RESAMPLES, len(value_S)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def student(value_S: FloatArray) -> Bounds:
    """Mean of scenarios and Student's quantile."""
    half = stdtrit(len(value_S) - 1, (1 + LEVEL) / 2) * value_S.std(ddof=1) / math.sqrt(len(value_S))
    return float(value_S.mean() - half), float(value_S.mean() + half)


def wilson(value_S: FloatArray) -> Bounds:
    """Wilson's interval at the effective number of trials, with Student's quantile."""
    many, mean = len(value_S), float(value_S.mean())
    variance = float(value_S.var(ddof=1)) / many
    trials = mean * (1 - mean) / variance if variance > 0 else float(many)
    quantile = float(stdtrit(many - 1, (1 + LEVEL) / 2))
    center = (mean + quantile**2 / (2 * trials)) / (1 + quantile**2 / trials)
    root = math.sqrt(mean * (1 - mean) / trials + quantile**2 / (4 * trials**2))
    half = quantile / (1 + quantile**2 / trials) * root
    return center - half, center + half


def rates(repeats: int) -> None:
    """One setting, one training seed."""
    heading(
        f"Rates of one setting, {repeats} simulated evaluations per line", ("percentile", "Student", "Wilson", OURS)
    )
    for scenarios, design in itertools.product(SCENARIOS, DESIGNS):
        random = np.random.default_rng(scenarios)
        drawn = [play(random, design, population(random, design, scenarios)) for _ in range(repeats)]
        for name, k, whole in METRICS:
            found: list[list[Bounds]] = []
            for outcome in drawn:
                value_GST = values(outcome, k, whole)
                value_S = value_GST[0].mean(axis=1)
                ours = rate_interval(mean_of(value_GST, design))
                found.append([percentile(value_S, random), student(value_S), wilson(value_S), (ours.low, ours.high)])
            line(scenarios, design.name, name, truth_of(design, k, whole), found)


def differences(repeats: int) -> None:
    """Two settings on the same scenarios, one training seed each."""
    heading(f"Paired differences, {repeats} simulated pairs per line", ("percentile", "Student", OURS))
    for scenarios, (design, shift) in itertools.product(SCENARIOS, PAIRS):
        random = np.random.default_rng(scenarios)
        drawn = []
        for _ in range(repeats):
            task_ST = population(random, design, scenarios)
            drawn.append((play(random, design, task_ST + shift), play(random, design, task_ST)))
        for name, k, whole in METRICS:
            truth = truth_of(design, k, whole, shift) - truth_of(design, k, whole)
            found: list[list[Bounds]] = []
            for pair in drawn:
                one, other = (values(outcome, k, whole) for outcome in pair)
                value_S = (one - other)[0].mean(axis=1)
                ours = rate_difference(mean_of(one, design), mean_of(other, design))
                found.append([percentile(value_S, random), student(value_S), (ours.low, ours.high)])
            line(scenarios, design.name, name, truth, found)


def seeds(repeats: int) -> None:
    """Several training seeds of one setting: the interval should cover differences between trainings, too."""
    for many in (2, 3, 5):
        heading(f"{many} training seeds, {repeats} simulated evaluations per line", ("scenarios only", OURS))
        for scenarios, design in itertools.product(SCENARIOS, SEEDED):
            random = np.random.default_rng(scenarios)
            drawn = [play(random, design, population(random, design, scenarios), many) for _ in range(repeats)]
            for name, k, whole in (METRICS[0], METRICS[3]):
                found: list[list[Bounds]] = []
                for outcome in drawn:
                    value_GST = values(outcome, k, whole)
                    pooled = rate_interval(mean_of(value_GST.mean(axis=0, keepdims=True), design))
                    ours = rate_interval(mean_of(value_GST, design))
                    found.append([(pooled.low, pooled.high), (ours.low, ours.high)])
                line(scenarios, design.name, name, truth_of(design, k, whole), found)


def judges(repeats: int) -> None:
    """Two graders of the same criteria, judgments in groups (a task's rollouts), as `draco agreement` compares them."""
    heading(f"Agreement of two judges, {repeats} simulated runs per line", ("ours",), "groups")
    for groups, (name, slip, spread) in itertools.product(SCENARIOS, GRADERS):
        random = np.random.default_rng(groups)
        whole = grades(np.random.default_rng(1), slip, spread, TRUTH // 4).sum(axis=0)
        truth = agreement(whole)
        found: dict[str, list[list[Bounds]]] = {measure: [] for measure in ("agreement", "kappa", "ac1", "false_pass")}
        for _ in range(repeats):
            bounds = agreement_intervals(list(grades(random, slip, spread, groups)))
            for measure, rows in found.items():
                rows.append([bounds[measure]])
        for measure, rows in found.items():
            line(groups, name, measure, truth[measure], rows)


def grades(random: np.random.Generator, slip: float, spread: float, groups: int) -> IntArray:
    """A `contingency` of each group: the reference passes most, the other slips at log-odds ``slip``."""
    group_C1 = random.normal(0, spread, (groups, 1))
    reference_CJ = random.random((groups, JUDGMENTS)) < expit(1.0 + random.normal(0, 1.0, (groups, 1)))
    slips_CJ = random.random((groups, JUDGMENTS)) < expit(slip + group_C1)
    other_CJ = reference_CJ ^ slips_CJ
    return np.stack(
        [
            contingency(np.where(mine, 1, -1), np.where(theirs, 1, -1))
            for mine, theirs in zip(reference_CJ, other_CJ, strict=True)
        ]
    )


def mean_of(value_GST: FloatArray, design: Design) -> ClusteredMean:
    """The mean of values of shape (seeds, scenarios, tasks), computed as for evaluations."""
    _, scenarios, tasks = value_GST.shape
    names = [f"{scenario}_{task}" for scenario in range(scenarios) for task in range(tasks)]
    by_seed = [dict(zip(names, value_ST.ravel().tolist(), strict=True)) for value_ST in value_GST]
    return clustered_mean(
        by_seed, lambda task: task.rsplit("_", 1)[0], trials=value_GST.size * RUNS * design.checkpoints
    )


def heading(title: str, methods: Sequence[str], clusters: str = "scenarios") -> None:
    """Begin a table."""
    SUMMARY.append((title, clusters, methods, {}))
    columns = [clusters, "population", "measure", "truth", *(f"{method}: coverage in % (width)" for method in methods)]
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def line(scenarios: int, population_name: str, name: str, truth: float, found: Sequence[Sequence[Bounds]]) -> None:
    """Print a line: for each method the share of intervals that contain the truth, and their mean width in points."""
    cells = [str(scenarios), population_name, name, f"{100 * truth:.1f}"]
    held_by = SUMMARY[-1][-1].setdefault(scenarios, [])
    held_by.append([])
    for bounds in zip(*found, strict=True):
        low, high = np.array(bounds).T
        held = float(np.mean((low <= truth + _ROUNDING) & (truth <= high + _ROUNDING)))
        held_by[-1].append(held)
        mark = "" if held >= MARKED else " !"
        cells.append(f"{100 * held:.1f}{mark} ({100 * float(np.mean(high - low)):.1f})")
    print(f"| {' | '.join(cells)} |", flush=True)


def summary() -> None:
    """Print the lowest and the mean coverage of each table, by number of clusters."""
    print("\n### Lowest (mean) share of intervals that contain the true value, over the lines of each table, in %\n")
    print("| table | clusters | percentile | Student | Wilson | scenarios only | ours |\n|---|---|---|---|---|---|---|")
    for title, clusters, methods, held in SUMMARY:
        for many, rows in held.items():
            of = dict(zip(methods, zip(*rows, strict=True), strict=True))
            cells = [
                f"{100 * min(of[method]):.1f} ({100 * float(np.mean(of[method])):.1f})" if method in of else ""
                for method in ("percentile", "Student", "Wilson", "scenarios only", OURS)
            ]
            print(f"| {title.partition(',')[0]} | {many} {clusters} | {' | '.join(cells)} |")


BENCHES: dict[str, Callable[[int], None]] = {
    "rates": rates,
    "differences": differences,
    "seeds": seeds,
    "agreement": judges,
}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Number of simulated evaluations per line.")] = 1000,
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(BENCHES)}; all by default.")] = None,
) -> None:
    """Print the coverage tables; takes some minutes."""
    print(f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, bench in BENCHES.items():
        if only in (None, name):
            bench(repeats)
    summary()


if __name__ == "__main__":
    typer.run(main)

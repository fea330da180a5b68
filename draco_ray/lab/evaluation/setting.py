"""One setting on one split, as the paper's tables report it: rates, their spread, turns, terminations and costs.

Protocol (Section "Evaluation"): the mean over the measurements (the last three epoch checkpoints), with the sample
standard deviation (n - 1) across them. For a policy with one measurement, the spread is across independent runs, and
only for p^1 and turns, which a single run has. Several training seeds of a setting are averaged, with the standard
deviation across seeds. Intervals are over scenarios, and over seeds if there are several
(`draco_ray.lab.evaluation.measures`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from draco_ray.config import plain_yaml
from draco_ray.lab.evaluation import measures
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.evaluation.measures import MOST_K, Estimator, Measure, Seeds, pass_at_k, pass_hat_k
from draco_ray.lab.evaluation.rendering import Cell
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan, RolloutResult, role_costs, sum_or_none
from draco_ray.records import Evaluation, Termination, Usage
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations
from draco_ray.sandbox.world.build import MANIFEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """Tasks of one difficulty."""

    tasks: int
    tgc: Cell
    sgc: Cell | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """Results of a setting on one split. Rates are shares in [0, 1]; index 0 is k = 1."""

    label: str
    plan: EvaluationPlan
    tgc: tuple[Cell, ...]
    """pass^k of tasks; the success rate (SR) of benchmarks without scenarios."""
    sgc: tuple[Cell, ...]
    """pass^k of scenarios; empty if the benchmark has no scenarios."""
    tgc_at: tuple[Cell, ...]
    """pass@k of tasks."""
    sgc_at: tuple[Cell, ...]
    turns: Cell | None
    """Mean turns of the rollouts that were not lost; None if all were lost."""
    difficulty: Mapping[int, Stratum]
    terminations: Mapping[Termination, float] | None
    """Share of rollouts by termination mode; None if the mode of any rollout was not recorded."""
    usage: Usage
    """Usage of one pass over the split; dollars are None if unknown for any rollout."""
    measures: Mapping[str, Measure]
    """Measures for comparing settings, by name (`draco_ray.lab.evaluation.measures.comparison_measures`)."""
    rollouts: int
    """Number of planned rollouts, including lost ones."""
    lost: int
    """Number of lost rollouts: every attempt crashed. They count as failures; intervals also allow for success."""
    seeds: int = 1
    """Number of training seeds."""
    role_dollars: Mapping[str, float | None] | None = None
    """Dollars of one pass by role (agent, user simulator, judge), None for a role of unknown price; None if there is
    only the policy."""

    @property
    def pass_dollars(self) -> float | None:
        """Dollars of one pass, all roles together."""
        return self.usage.dollars if self.role_dollars is None else sum_or_none(self.role_dollars.values())

    @property
    def clusters(self) -> int:
        """Number of scenarios, or of tasks if there are no scenarios."""
        return self.measures["TGC p^1" if self.plan.scenarios else "SR p^1"].at_worst.clusters

    @property
    def dollars_per_task(self) -> float | None:
        """Mean dollars of one rollout, all roles together."""
        return None if self.pass_dollars is None else self.pass_dollars / len(self.plan.tasks)


def read_seeds(directories: Sequence[EvaluationDirectory], label: str | None = None) -> SplitResult:
    """Aggregate the finished evaluations of one setting, one for each training seed, on the same tasks.

    Raises:
        ConfigError: rollouts are missing.
    """
    seeds = [list(directory.complete_results().values()) for directory in directories]
    result = aggregate(directories[0].plan, seeds, label)
    return replace(result, role_dollars=_role_dollars(directories))


def aggregate(
    plan: EvaluationPlan, seeds: Sequence[Sequence[Sequence[RolloutResult]]], label: str | None = None
) -> SplitResult:
    """Rates, spreads and costs of a setting.

    Args:
        plan: the plan, the same for every seed.
        seeds: every rollout of each measurement of each training seed.
        label: the row's name; None uses the plan's label.
    """
    evaluations = [[[result.evaluation for result in part] for part in seed] for seed in seeds]
    results = [result for seed in seeds for part in seed for result in part]
    modes = Counter(result.evaluation.termination for result in results)
    strata = {}
    for level in sorted({level for level in plan.tasks.values() if level is not None}):
        inside = [
            [[each for each in part if plan.tasks[each.task_id] == level] for part in seed] for seed in evaluations
        ]
        strata[level] = Stratum(
            tasks=sum(difficulty == level for difficulty in plan.tasks.values()),
            tgc=_rate(plan, inside, 1),
            sgc=_rate(plan, inside, 1, whole=True) if plan.scenarios else None,
        )
    ks = range(1, min(plan.runs, MOST_K) + 1)
    scenario_ks = ks if plan.scenarios else range(0)
    return SplitResult(
        label=label or plan.label,
        plan=plan,
        tgc=tuple(_rate(plan, evaluations, k) for k in ks),
        sgc=tuple(_rate(plan, evaluations, k, whole=True) for k in scenario_ks),
        tgc_at=tuple(_rate(plan, evaluations, k, estimator=pass_at_k) for k in ks),
        sgc_at=tuple(_rate(plan, evaluations, k, whole=True, estimator=pass_at_k) for k in scenario_ks),
        turns=_turns(plan, evaluations),
        difficulty=strata,
        terminations=None if modes[None] else {mode: modes[mode] / len(results) for mode in Termination},
        usage=_per_pass([result.usage for result in results], plan.runs * sum(map(len, seeds))),
        measures=measures.comparison_measures(evaluations, plan.runs, scenarios=plan.scenarios),
        rollouts=len(results),
        lost=measures.lost_rollouts(evaluations),
        seeds=len(seeds),
    )


def describe_run_gain(run: RunDirectory) -> str | None:
    """`describe_gain` of a run, in one line; None if it was not evaluated before and after on the same tasks."""
    found = read_evaluations(run)
    (first, split), (last, _) = min(found, default=(0, "")), max(found, default=(0, ""))
    if first == last or (last, split) not in found:
        return None
    before, after = found[first, split], found[last, split]
    if {(each.task_id, each.run) for each in before} != {(each.task_id, each.run) for each in after}:
        # The run was resumed with other tasks or another number of runs, so the evaluations cannot be paired.
        return None
    root = Path(plain_yaml.load(run.config_text())["data"]["root"])
    world = " of a generated world" if (root / MANIFEST).is_file() else ""
    return f"on {split}{world}, {describe_gain(before, after, max(each.run for each in before) + 1)}"


def describe_gain(before: Sequence[Evaluation], after: Sequence[Evaluation], runs: int) -> str:
    """A line with the 95 % intervals of TGC before and after training and of their difference."""
    first, last = (measures.pass_k_measure([[each]], runs, scenarios=True) for each in (before, after))
    gain, _ = measures.difference(last, first)
    if first.at_worst.clusters == 1:
        return "only one scenario, so no interval"
    line = (
        f"95 % intervals over {first.at_worst.clusters} scenarios: before {_percents(first.interval())}, "
        f"after {_percents(last.interval())}, difference {_percents(gain, '+')} points"
    )
    if lost := measures.lost_rollouts([[before], [after]]):
        many = len(before) + len(after)
        line += (
            f"; {lost} of {many} rollouts were lost: they count as failures, and the intervals cover every result they "
            "could have had"
        )
    return f"{line}; one training seed"


def _percents(interval: Interval, sign: str = "") -> str:
    return f"[{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def _rate(
    plan: EvaluationPlan, seeds: Seeds, k: int, *, whole: bool = False, estimator: Estimator = pass_hat_k
) -> Cell:
    def of(part: Seeds, runs: int) -> Measure:
        return measures.pass_k_measure(part, runs, k, scenarios=plan.scenarios, whole=whole, estimator=estimator)

    # pass^k for k >= 2 is a joint statistic of all runs; it is undefined for a single run.
    std = _std(seeds, plan.runs, lambda part, runs: of(part, runs).mean if k <= runs else None)
    interval = of(seeds, plan.runs).interval()
    return _cell(interval, std)


def _turns(plan: EvaluationPlan, seeds: Seeds) -> Cell | None:
    """Mean turns over all rollouts with at least one turn; None if there is no such rollout.

    The interval is symmetric about this mean, and as wide as the interval of the mean over tasks (`measures.turns`).
    """
    if not (played := measures.turns_played(seeds)):
        return None
    std = _std(seeds, plan.runs, lambda part, _: fmean(found) if (found := measures.turns_played(part)) else None)
    mean, measure = fmean(played), measures.turns(seeds, scenarios=plan.scenarios)
    interval = Interval(mean, -math.inf, math.inf) if measure is None else measure.interval()
    half = (interval.high - interval.low) / 2
    return _cell(Interval(mean, mean - half, mean + half), std)


def _cell(interval: Interval, std: float | None) -> Cell:
    low, high = (bound if math.isfinite(bound) else None for bound in (interval.low, interval.high))
    return Cell(interval.mean, std, low, high)


def _std(seeds: Seeds, runs: int, value: Callable[[Seeds, int], float | None]) -> float | None:
    """Sample standard deviation across seeds, checkpoints of a single seed, or runs of a single checkpoint."""
    parts: list[Sequence[Sequence[Evaluation]]] = list(seeds) if len(seeds) > 1 else [[each] for each in seeds[0]]
    if len(parts) == 1:
        of_run = ([replace(each, run=0) for each in seeds[0][0] if each.run == run] for run in range(runs))
        parts, runs = [[each] for each in of_run], 1
    found = [number for part in parts if (number := value([part], runs)) is not None]
    return stdev(found) if len(found) > 1 else None


def _role_dollars(directories: Sequence[EvaluationDirectory]) -> dict[str, float | None] | None:
    """Dollars of one pass by role; None if any measurement has no roles."""
    found = [(directory.plan, role_costs(directory)) for directory in directories]
    if not all(set(plan.measurements) <= costs.keys() for plan, costs in found):
        return None
    measured = [costs[name] for plan, costs in found for name in plan.measurements]
    passes = sum(plan.runs * len(plan.measurements) for plan, _ in found)
    roles = dict.fromkeys(role for each in measured for role in each)
    totals = {role: sum_or_none(each[role].dollars if role in each else None for each in measured) for role in roles}
    return {role: None if total is None else total / passes for role, total in totals.items()}


def _per_pass(usages: Sequence[Usage], passes: int) -> Usage:
    usage = sum(usages, start=Usage())
    unknown = any(each.dollars is None and each != Usage() for each in usages)
    counts = ("calls", "requests", "input_tokens", "cached_tokens", "output_tokens")
    return Usage(
        **{name: round(getattr(usage, name) / passes) for name in counts},
        dollars=None if usage.dollars is None or unknown else usage.dollars / passes,
    )

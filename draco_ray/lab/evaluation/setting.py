"""One setting on one split, as the paper's tables report it: rates, their spread, turns, terminations and costs.

Protocol (Section "Evaluation"): the mean over the measurements (the last three epoch checkpoints), with the sample
standard deviation (n - 1) across them. A policy with one measurement has its spread across independent runs instead,
and only where a single run has a value: p^1 and turns. Several training seeds of a setting are averaged, with the
standard deviation across seeds. Intervals are over scenarios, and over seeds where there are several
(`draco_ray.lab.evaluation.measures`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from draco_ray.lab.evaluation import measures
from draco_ray.lab.evaluation.consistency import Estimator, pass_at_k, pass_hat_k
from draco_ray.lab.evaluation.measures import Measure
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan, RolloutResult
from draco_ray.lab.evaluation.role_costs import role_costs
from draco_ray.records import Evaluation, Termination, Usage

MOST_K = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its spread and interval, in the units of the mean; None where there is none."""

    mean: float
    std: float | None = None
    """Sample standard deviation across seeds, checkpoints of a single seed, or runs of a single checkpoint."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """Tasks of one difficulty."""

    tasks: int
    tgc: Estimate
    sgc: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """How a setting fares on one split. Rates are shares in [0, 1]; index 0 is k = 1."""

    label: str
    plan: Plan
    tgc: tuple[Estimate, ...]
    """pass^k of tasks; the success rate (SR) of benchmarks without scenarios."""
    sgc: tuple[Estimate, ...]
    """pass^k of scenarios; empty where there are none."""
    tgc_at: tuple[Estimate, ...]
    """pass@k of tasks."""
    sgc_at: tuple[Estimate, ...]
    turns: Estimate | None
    """Of the rollouts that were played; one that never began has none. None where none was."""
    difficulty: Mapping[int, Stratum]
    terminations: Mapping[Termination, float] | None
    """Share of rollouts by termination mode; None where the mode of some was not recorded."""
    usage: Usage
    """Per pass: one run over the split. Its dollars are known where those of every rollout are."""
    measures: Mapping[str, Measure]
    """What settings are compared in, by name: ``TGC p^1``, ``TGC p^3``, ``SGC p^1``, ``SGC p^3``, ``turns``."""
    rollouts: int
    """All there should be, lost ones included."""
    lost: int
    """Rollouts whose every attempt crashed: they count as failures, and intervals allow for what they would have
    been."""
    seeds: int = 1
    """Training seeds."""
    role_dollars: Mapping[str, float | None] | None = None
    """Dollars of one pass by role, where a conversation has several (agent, user simulator, judge), None for a role
    whose price is not known; None where there is only the policy."""

    @property
    def pass_dollars(self) -> float | None:
        """Dollars of one pass, of all roles together."""
        if self.role_dollars is None:
            return self.usage.dollars
        known = [dollars for dollars in self.role_dollars.values() if dollars is not None]
        return sum(known) if len(known) == len(self.role_dollars) else None

    @property
    def clusters(self) -> int:
        """Scenarios, or tasks where there are none."""
        return self.measures["TGC p^1" if self.plan.scenarios else "SR p^1"].at_worst.clusters

    @property
    def dollars_per_task(self) -> float | None:
        """Dollars of one rollout, on average, of all roles together."""
        return None if self.pass_dollars is None else self.pass_dollars / len(self.plan.tasks)


def read_split(directory: EvaluationDirectory, label: str | None = None) -> SplitResult:
    """Aggregate a finished evaluation.

    Raises:
        ConfigError: rollouts are missing.
    """
    return read_seeds([directory], label)


def read_seeds(directories: Sequence[EvaluationDirectory], label: str | None = None) -> SplitResult:
    """Aggregate the finished evaluations of one setting, each of another training seed, on the same tasks.

    Raises:
        ConfigError: rollouts are missing.
    """
    seeds = [list(directory.complete_results().values()) for directory in directories]
    result = aggregate_seeds(directories[0].plan, seeds, label)
    return replace(result, role_dollars=_role_dollars(directories))


def aggregate(plan: Plan, measurements: Sequence[Sequence[RolloutResult]], label: str | None = None) -> SplitResult:
    """Rates, spreads and costs of complete measurements of one training seed; see `aggregate_seeds`."""
    return aggregate_seeds(plan, [measurements], label)


def aggregate_seeds(
    plan: Plan, seeds: Sequence[Sequence[Sequence[RolloutResult]]], label: str | None = None
) -> SplitResult:
    """Rates, spreads and costs of a setting.

    Args:
        plan: what was evaluated, the same for every seed.
        seeds: every rollout of each measurement of each training seed.
        label: the row's name; None is the plan's.
    """
    evaluations = [[[result.evaluation for result in each] for each in seed] for seed in seeds]
    results = [result for seed in seeds for measurement in seed for result in measurement]
    passes = plan.runs * sum(len(seed) for seed in seeds)
    modes = Counter(result.evaluation.termination for result in results)
    strata = {}
    for level in sorted({level for level in plan.tasks.values() if level is not None}):
        tasks = {task for task, difficulty in plan.tasks.items() if difficulty == level}
        inside = [[[each for each in part if each.task_id in tasks] for part in seed] for seed in evaluations]
        strata[level] = Stratum(
            tasks=len(tasks),
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
        usage=_per_pass([result.usage for result in results], passes),
        measures=compared_measures(evaluations, plan.runs, scenarios=plan.scenarios),
        rollouts=len(results),
        lost=measures.lost_rollouts(evaluations),
        seeds=len(seeds),
    )


def compared_measures(seeds: measures.Seeds, runs: int, *, scenarios: bool = True) -> dict[str, Measure]:
    """What settings are compared in: rates at p^1 and at the largest k, and turns where any rollout was played."""
    ks = dict.fromkeys((1, min(runs, MOST_K)))
    task = "TGC" if scenarios else "SR"
    found: dict[str, Measure | None] = {f"{task} p^{k}": measures.rate(seeds, runs, k, scenarios=scenarios) for k in ks}
    if scenarios:
        found |= {f"SGC p^{k}": measures.rate(seeds, runs, k, whole=True) for k in ks}
    found["turns"] = measures.turns(seeds, scenarios=scenarios)
    return {name: measure for name, measure in found.items() if measure is not None}


def _rate(
    plan: Plan, seeds: measures.Seeds, k: int, *, whole: bool = False, estimator: Estimator = pass_hat_k
) -> Estimate:
    def of(part: measures.Seeds, runs: int) -> Measure:
        return measures.rate(part, runs, k, scenarios=plan.scenarios, whole=whole, estimator=estimator)

    measure = of(seeds, plan.runs)
    if len(_parts(seeds)) > 1:
        spread = [of([part], plan.runs).mean for part in _parts(seeds)]
    else:
        # pass^k for k >= 2 is a joint statistic of all runs: a single run has none.
        spread = [of([[each]], 1).mean for each in _single_runs(seeds[0][0], plan.runs)] if k == 1 else []
    return _estimate(measure, spread)


def _turns(plan: Plan, seeds: measures.Seeds) -> Estimate | None:
    """Mean over the rollouts that began; the interval around it is as wide as that of the mean over tasks."""
    if not (played := measures.turns_played(seeds)):
        return None
    parts = _parts(seeds) if len(_parts(seeds)) > 1 else [[each] for each in _single_runs(seeds[0][0], plan.runs)]
    # A run or seed of which nothing was played has no mean.
    spread = [fmean(found) for part in parts if (found := measures.turns_played([part]))]
    mean = fmean(played)
    measure = measures.turns(seeds, scenarios=plan.scenarios)
    if measure is None or not math.isfinite((interval := measure.interval()).high):
        return Estimate(mean=mean, std=_std(spread))
    half = (interval.high - interval.low) / 2
    return Estimate(mean=mean, std=_std(spread), low=mean - half, high=mean + half)


def _estimate(measure: Measure, spread: Sequence[float]) -> Estimate:
    interval = measure.interval()
    bounded = math.isfinite(interval.high)
    return Estimate(
        mean=interval.mean,
        std=_std(spread),
        low=interval.low if bounded else None,
        high=interval.high if bounded else None,
    )


def _parts(seeds: measures.Seeds) -> list[Sequence[Sequence[Evaluation]]]:
    """What a spread is across: seeds, or the measurements of a single one."""
    return list(seeds) if len(seeds) > 1 else [[measurement] for measurement in seeds[0]]


def _single_runs(measurement: Sequence[Evaluation], runs: int) -> list[list[Evaluation]]:
    return [[replace(each, run=0) for each in measurement if each.run == run] for run in range(runs)]


def _role_dollars(directories: Sequence[EvaluationDirectory]) -> dict[str, float | None] | None:
    """Of one pass; None where any measurement has no roles."""
    found = [(directory.plan, role_costs(directory)) for directory in directories]
    if not all(plan.measurements and set(plan.measurements) <= costs.keys() for plan, costs in found):
        return None
    measured = [costs[name] for plan, costs in found for name in plan.measurements]
    passes = sum(plan.runs * len(plan.measurements) for plan, _ in found)
    dollars: dict[str, float | None] = {}
    for role in dict.fromkeys(role for each in measured for role in each):
        known = [each[role].dollars for each in measured if role in each]
        paid = [each for each in known if each is not None]
        dollars[role] = sum(paid) / passes if len(paid) == len(measured) else None
    return dollars


def _per_pass(usages: Sequence[Usage], passes: int) -> Usage:
    usage = sum(usages, start=Usage())
    unknown = any(each.dollars is None and each != Usage() for each in usages)
    return Usage(
        calls=round(usage.calls / passes),
        requests=round(usage.requests / passes),
        input_tokens=round(usage.input_tokens / passes),
        cached_tokens=round(usage.cached_tokens / passes),
        output_tokens=round(usage.output_tokens / passes),
        dollars=None if usage.dollars is None or unknown else usage.dollars / passes,
    )


def _std(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None

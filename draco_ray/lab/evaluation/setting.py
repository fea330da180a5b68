"""One setting on one split, as the paper's tables report it: rates, their spread, turns, terminations and costs.

Protocol (Section "Evaluation"): the mean over the measurements (the last three epoch checkpoints), with the sample
standard deviation (n - 1) across them. A policy with one measurement has its spread across independent runs instead,
and only where a single run has a value: p^1 and turns. Intervals are bootstrapped over scenarios.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from draco_ray.lab.evaluation.consistency import (
    Estimator,
    mean_by_key,
    pass_at_k,
    pass_hat_k,
    scenario_of,
    scenario_values,
    task_values,
)
from draco_ray.lab.evaluation.intervals import clustered_bootstrap
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan, RolloutResult, Usage
from draco_ray.records import EpisodeEnd, Evaluation

MOST_K = 3
Values = Callable[[Sequence[Evaluation], int, int, Estimator], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its spread and interval, in the units of the mean; None where there is none."""

    mean: float
    std: float | None = None
    """Sample standard deviation across checkpoints, or across runs of a single one."""
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
    turns: Estimate
    """Of the rollouts that were played; one that never began has none."""
    difficulty: Mapping[int, Stratum]
    ended: Mapping[EpisodeEnd, float]
    """Share of rollouts by the way they ended."""
    usage: Usage
    """Per pass: one run over the split."""
    task_success: Mapping[str, float]
    """p^1 by task, mean over measurements, for paired comparisons."""

    def cluster(self, task_id: str) -> str:
        """What a task is resampled with: its scenario, or itself where there are none."""
        return scenario_of(task_id) if self.plan.scenarios else task_id

    @property
    def dollars_per_task(self) -> float | None:
        """Of one rollout, on average."""
        return None if self.usage.dollars is None else self.usage.dollars / len(self.plan.tasks)


def read_split(directory: EvaluationDirectory, label: str | None = None) -> SplitResult:
    """Aggregate a finished evaluation.

    Raises:
        ConfigError: rollouts are missing.
    """
    return aggregate(directory.plan, list(directory.complete_results().values()), label)


def aggregate(plan: Plan, measurements: Sequence[Sequence[RolloutResult]], label: str | None = None) -> SplitResult:
    """Rates, spreads and costs of complete measurements.

    Args:
        plan: what was evaluated.
        measurements: every rollout of each measurement.
        label: the row's name; None is the plan's.
    """
    evaluations = [[result.evaluation for result in measurement] for measurement in measurements]
    results = [result for measurement in measurements for result in measurement]
    by_run = [
        [each for measurement in evaluations for each in measurement if each.run == run] for run in range(plan.runs)
    ]
    passes = len(measurements) * plan.runs
    ended = Counter(result.evaluation.ended for result in results)
    strata = {}
    for level in sorted({level for level in plan.tasks.values() if level is not None}):
        tasks = {task for task, difficulty in plan.tasks.items() if difficulty == level}
        inside = [[each for each in measurement if each.task_id in tasks] for measurement in evaluations]
        strata[level] = Stratum(
            tasks=len(tasks),
            tgc=_rate(plan, inside, 1, task_values, scenario_of),
            sgc=_rate(plan, inside, 1, scenario_values, str) if plan.scenarios else None,
        )
    cluster = scenario_of if plan.scenarios else str
    ks = range(1, min(plan.runs, MOST_K) + 1)
    scenario_ks = ks if plan.scenarios else range(0)
    return SplitResult(
        label=label or plan.label,
        plan=plan,
        tgc=tuple(_rate(plan, evaluations, k, task_values, cluster) for k in ks),
        sgc=tuple(_rate(plan, evaluations, k, scenario_values, str) for k in scenario_ks),
        tgc_at=tuple(_rate(plan, evaluations, k, task_values, cluster, pass_at_k) for k in ks),
        sgc_at=tuple(_rate(plan, evaluations, k, scenario_values, str, pass_at_k) for k in scenario_ks),
        turns=_turns(evaluations if len(evaluations) > 1 else by_run, evaluations),
        difficulty=strata,
        ended={mode: ended[mode] / len(results) for mode in EpisodeEnd},
        usage=_per_pass(sum((result.usage for result in results), start=Usage()), passes),
        task_success=mean_by_key([task_values(measurement, plan.runs, 1) for measurement in evaluations]),
    )


def _rate(
    plan: Plan,
    measurements: Sequence[Sequence[Evaluation]],
    k: int,
    values: Values,
    cluster: Callable[[str], str],
    estimator: Estimator = pass_hat_k,
) -> Estimate:
    each = [values(measurement, plan.runs, k, estimator) for measurement in measurements]
    interval = clustered_bootstrap(mean_by_key(each), cluster)
    bounded = interval.high != float("inf")
    spread = each
    if len(each) == 1:
        # pass^k for k >= 2 is a joint statistic of all runs: a single run has none.
        runs = range(plan.runs if k == 1 else 0)
        spread = [values(_one_run(measurements[0], run), 1, 1, estimator) for run in runs]
    return Estimate(
        mean=interval.mean,
        std=_std([sum(of_one.values()) / len(of_one) for of_one in spread]),
        low=interval.low if bounded else None,
        high=interval.high if bounded else None,
    )


def _one_run(measurement: Sequence[Evaluation], run: int) -> list[Evaluation]:
    return [
        Evaluation(
            task_id=each.task_id,
            run=0,
            success=each.success,
            passed_tests=each.passed_tests,
            total_tests=each.total_tests,
            turns=each.turns,
            ended=each.ended,
        )
        for each in measurement
        if each.run == run
    ]


def _turns(parts: Sequence[Sequence[Evaluation]], measurements: Sequence[Sequence[Evaluation]]) -> Estimate:
    means = [_mean([each.turns for each in part if each.turns]) for part in parts]
    return Estimate(
        mean=_mean([each.turns for measurement in measurements for each in measurement if each.turns]), std=_std(means)
    )


def _per_pass(usage: Usage, passes: int) -> Usage:
    return Usage(
        calls=round(usage.calls / passes),
        requests=round(usage.requests / passes),
        input_tokens=round(usage.input_tokens / passes),
        cached_tokens=round(usage.cached_tokens / passes),
        output_tokens=round(usage.output_tokens / passes),
        dollars=None if usage.dollars is None else usage.dollars / passes,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _std(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None

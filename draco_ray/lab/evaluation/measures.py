"""What is measured of a setting (TGC and SGC at pass^k and pass@k, turns), with intervals, and two settings compared.

A rollout that was lost (its world or endpoint crashed, every time) counts as a failure, as the paper counts it. What it
would have been nobody knows: intervals reach from all lost rollouts failed to all of them solved, and a difference is
no better founded than under the worst of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draco_ray.lab.evaluation.consistency import (
    Estimator,
    mean_by_key,
    pass_hat_k,
    scenario_values,
    scenarios_of,
    task_values,
)
from draco_ray.lab.evaluation.intervals import (
    ClusteredMean,
    Interval,
    clustered_mean,
    mean_difference,
    mean_interval,
    paired_variance,
    rate_difference,
    rate_interval,
    student_p_value,
)
from draco_ray.records import Evaluation

Seeds = Sequence[Sequence[Sequence[Evaluation]]]
"""Evaluated rollouts of each measurement (checkpoint) of each training seed, all of the same tasks."""
PERMUTATIONS = 9_999
"""Assignments of signs that are drawn; where there are no more, all are taken (up to 13 scenarios)."""
_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number of a setting on one split: values by task or scenario, and how to read them."""

    failed: tuple[Mapping[str, float], ...]
    """For each training seed, the value of each task (or scenario), lost rollouts taken for failures."""
    solved: tuple[Mapping[str, float], ...]
    """The same, lost rollouts taken for successes."""
    cluster: Callable[[str], str]
    """Task -> what it is drawn with."""
    trials: float
    """Rollouts (for SGC runs of whole scenarios) behind it, lost ones included."""
    rate: bool = True
    """In [0, 1]; else a mean without bounds."""

    @property
    def mean(self) -> float:
        """The mean over tasks and seeds; lost rollouts count as failures."""
        return self.at_worst.mean

    @property
    def at_worst(self) -> ClusteredMean:
        """The mean with lost rollouts as failures."""
        return clustered_mean(self.failed, self.cluster, trials=self.trials)

    @property
    def at_best(self) -> ClusteredMean:
        """The mean with lost rollouts as successes."""
        return clustered_mean(self.solved, self.cluster, trials=self.trials)

    def interval(self) -> Interval:
        """95 %, over scenarios and training seeds, whatever the lost rollouts would have been."""
        if not self.rate:
            return mean_interval(self.at_worst)
        worst, best = rate_interval(self.at_worst), rate_interval(self.at_best)
        return Interval(worst.mean, worst.low, best.high)


def rate(
    seeds: Seeds,
    runs: int,
    k: int = 1,
    *,
    scenarios: bool = False,
    whole: bool = False,
    estimator: Estimator = pass_hat_k,
) -> Measure:
    """pass^k (or pass@k) of tasks, or of whole scenarios.

    Args:
        seeds: evaluated rollouts, ``runs`` of each task in each measurement.
        runs: n of pass^k.
        k: trials.
        scenarios: tasks of a scenario are drawn together.
        whole: SGC, a scenario is solved where all its tasks are.
        estimator: which of the two.

    Raises:
        ValueError: nothing was evaluated, or the measurements are not of the same tasks.
    """
    values = scenario_values if whole else task_values

    def of(evaluated: Seeds) -> tuple[Mapping[str, float], ...]:
        return tuple(mean_by_key([values(each, runs, k, estimator) for each in seed]) for seed in evaluated)

    failed = of(seeds)
    lost = any(each.lost for seed in seeds for measurement in seed for each in measurement)
    if not failed or not failed[0]:
        raise ValueError("nothing was evaluated")
    return Measure(
        failed=failed,
        solved=of([[_as_solved(each) for each in seed] for seed in seeds]) if lost else failed,
        cluster=_scenario(seeds) if scenarios and not whole else str,
        trials=len(failed[0]) * runs * sum(len(seed) for seed in seeds),
    )


def turns(seeds: Seeds, *, scenarios: bool = False) -> Measure | None:
    """Turns of the rollouts that were played, by task; None where none was."""
    by_seed = []
    for seed in seeds:
        played: dict[str, list[int]] = {}
        for each in (each for measurement in seed for each in measurement if each.turns):
            played.setdefault(each.task_id, []).append(each.turns)
        by_seed.append({task: float(np.mean(found)) for task, found in played.items()})
    return _of_common_tasks(by_seed, _scenario(seeds) if scenarios else str)


def turns_played(seeds: Seeds) -> list[int]:
    """Turns of every rollout that was played."""
    return [each.turns for seed in seeds for measurement in seed for each in measurement if each.turns]


def lost_rollouts(seeds: Seeds) -> int:
    """How many were lost."""
    return sum(each.lost for seed in seeds for measurement in seed for each in measurement)


def difference(one: Measure, other: Measure) -> tuple[Interval, float]:
    """``one`` minus ``other``, paired by task: its interval, and the two-sided p-value that it is 0.

    Both hold whatever the lost rollouts would have been. The p-value is the permutation test's over scenarios, and not
    below Student's over scenarios and seeds where a setting has several seeds.

    Raises:
        ValueError: they are not of the same tasks.
    """
    if one.rate and (apart := one.failed[0].keys() ^ other.failed[0].keys()):
        raise ValueError(f"{len(apart)} tasks are in one of the two only")
    if not one.rate:
        one, other = _on_common_tasks(one, other)
        return mean_difference(one.at_worst, other.at_worst), _p_value(one, other)
    low = rate_difference(one.at_worst, other.at_best)
    high = rate_difference(one.at_best, other.at_worst)
    interval = Interval(one.mean - other.mean, low.low, high.high)
    if one.failed == one.solved and other.failed == other.solved:
        return interval, _p_value(one, other)
    if low.mean <= 0 <= high.mean:
        return interval, 1.0
    worst = _p_value(one, replace(other, failed=other.solved)), _p_value(replace(one, failed=one.solved), other)
    return interval, max(worst)


def permutation_p_value(
    differences: Mapping[str, float], cluster: Callable[[str], str], *, permutations: int = PERMUTATIONS, seed: int = 0
) -> float:
    """Two-sided p-value of a mean paired difference under sign changes of whole clusters.

    Exact where there are no more than ``permutations`` assignments of signs; else from random ones, the observed one
    counted among them, so that it is never 0.

    Raises:
        ValueError: there are no differences.
    """
    from scipy.stats import permutation_test

    if not differences:
        raise ValueError("no differences to test")
    sums: dict[str, float] = {}
    for key, value in differences.items():
        sums[cluster(key)] = sums.get(cluster(key), 0.0) + value
    # Equal sums must come out as ties, whatever the order of addition.
    sum_C = np.round(list(sums.values()), _DIGITS)
    # One cluster has two assignments of signs, both as far from 0 as each other.
    if len(sum_C) < 2 or not sum_C.any():
        return 1.0
    found = permutation_test(
        (sum_C,),
        lambda values, axis: np.round(np.sum(values, axis=axis), _DIGITS),
        permutation_type="samples",
        vectorized=True,
        n_resamples=permutations,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def _p_value(one: Measure, other: Measure) -> float:
    first, second = mean_by_key(one.failed), mean_by_key(other.failed)
    by_scenario = permutation_p_value({task: first[task] - second[task] for task in first}, one.cluster)
    if max(len(one.failed), len(other.failed)) == 1:
        return by_scenario
    variance, degrees = paired_variance(one.at_worst, other.at_worst)
    return max(by_scenario, student_p_value(one.mean - other.mean, variance, degrees))


def _scenario(seeds: Seeds) -> Callable[[str], str]:
    """Task -> its scenario."""
    return scenarios_of(each for seed in seeds for measurement in seed for each in measurement).__getitem__


def _as_solved(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return [replace(each, success=True) if each.lost else each for each in evaluations]


def _of_common_tasks(seeds: Sequence[Mapping[str, float]], cluster: Callable[[str], str]) -> Measure | None:
    common = [task for task in seeds[0] if all(task in values for values in seeds)] if seeds else []
    if not common:
        return None
    values = tuple({task: seed[task] for task in common} for seed in seeds)
    return Measure(failed=values, solved=values, cluster=cluster, trials=len(common), rate=False)


def _on_common_tasks(one: Measure, other: Measure) -> tuple[Measure, Measure]:
    """Turns of the tasks that were played in both."""
    both = _of_common_tasks([*one.failed, *other.failed], one.cluster)
    if both is None:
        raise ValueError("no task was played in both")
    many = len(one.failed)
    return (
        replace(both, failed=both.failed[:many], solved=both.failed[:many]),
        replace(both, failed=both.failed[many:], solved=both.failed[many:]),
    )

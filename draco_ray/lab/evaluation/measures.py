"""Measures of evaluations: TGC and SGC at pass^k and pass@k, and turns, with intervals; comparison of two settings.

Section "Metrics": pass^k is the chance that all of k trials succeed (p^k), pass@k that at least one does. Both are
estimated without bias from n >= k runs of which c succeeded, as the share of the k-subsets of the runs that qualify.
A scenario succeeds in a run if all of its tasks do, and p^k of SGC is pass^k of scenarios.

A lost rollout (its world or endpoint crashed in every attempt) counts as a failure, as in the paper. Its true outcome
is unknown: an interval covers both extremes, all lost rollouts failed and all of them solved, and the p-value of a
difference is the larger one of these two cases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

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

Estimator = Callable[[int, int, int], float]
Seeds = Sequence[Sequence[Sequence[Evaluation]]]
"""Evaluated rollouts, first by training seed, then by measurement (checkpoint); all cover the same tasks."""
MOST_K = 3
"""Largest k of pass^k that is reported."""
PERMUTATIONS = 9_999
"""Random sign assignments in the permutation test; if fewer exist (up to 13 scenarios), all are used."""
_DIGITS = 9


def pass_hat_k(successes: int, runs: int, k: int) -> float:
    """pass^k = C(c, k) / C(n, k): the share of k-subsets of the n runs in which all k succeeded.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    _check(successes, runs, k)
    return comb(successes, k) / comb(runs, k)


def pass_at_k(successes: int, runs: int, k: int) -> float:
    """pass@k = 1 - C(n - c, k) / C(n, k): the share of k-subsets of the n runs in which at least one succeeded.

    Raises:
        ValueError: as `pass_hat_k`.
    """
    _check(successes, runs, k)
    return (comb(runs, k) - comb(runs - successes, k)) / comb(runs, k)


def _check(successes: int, runs: int, k: int) -> None:
    if not 0 <= successes <= runs:
        raise ValueError(f"the number of successes is {successes}, but must be from 0 to the number of runs, {runs}")
    if not 1 <= k <= runs:
        raise ValueError(f"k = {k} trials cannot be drawn from {runs} runs")


def pass_k_by_task(
    evaluations: Iterable[Evaluation], runs: int, k: int, estimator: Estimator = pass_hat_k, *, whole: bool = False
) -> dict[str, float]:
    """Task id -> pass^k (or pass@k) over its ``runs`` runs; a missing run counts as failed.

    Args:
        evaluations: one for each task and run.
        runs: n of pass^k.
        k: number of trials.
        estimator: `pass_hat_k` or `pass_at_k`.
        whole: estimate by scenario instead (SGC); a scenario succeeds in a run if all its tasks do.

    Raises:
        ValueError: a run occurs twice or is not in 0 .. runs-1, or k is out of range.
    """
    seen: set[tuple[str, int]] = set()
    tasks: dict[str, set[str]] = defaultdict(set)
    solved: dict[str, Counter[int]] = defaultdict(Counter)
    for each in evaluations:
        if (each.task_id, each.run) in seen or not 0 <= each.run < runs:
            raise ValueError(f"task {each.task_id}: run {each.run} occurs twice or is not one of the {runs} runs")
        seen.add((each.task_id, each.run))
        key = (each.scenario or each.task_id) if whole else each.task_id
        tasks[key].add(each.task_id)
        solved[key][each.run] += each.success
    return {
        key: estimator(sum(solved[key][run] == len(members) for run in range(runs)), runs, k)
        for key, members in tasks.items()
    }


def mean_by_key(measurements: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average several measurements of the same tasks or scenarios, e.g. of several seeds or checkpoints.

    Raises:
        ValueError: the measurements cover different tasks or scenarios.
    """
    keys = measurements[0].keys() if measurements else ()
    if any(measurement.keys() != keys for measurement in measurements):
        raise ValueError("the measurements are of different tasks")
    return {key: sum(measurement[key] for measurement in measurements) / len(measurements) for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One measure of a setting on one split: its value by task or scenario, and how to aggregate it."""

    failed: tuple[Mapping[str, float], ...]
    """For each training seed, the value of each task (or scenario), lost rollouts counted as failures."""
    solved: tuple[Mapping[str, float], ...]
    """The same values as in ``failed``, but with lost rollouts counted as successes."""
    cluster: Callable[[str], str]
    """Task -> its cluster; tasks of one scenario form a cluster."""
    trials: float
    """Number of rollouts (for SGC, of scenario runs) behind the measure, including lost ones."""
    rate: bool = True
    """Whether the measure is a rate in [0, 1]; otherwise it is a mean without bounds, such as turns."""

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
        """The 95 % interval over scenarios and training seeds; covers any outcome of the lost rollouts."""
        if not self.rate:
            return mean_interval(self.at_worst)
        worst, best = rate_interval(self.at_worst), rate_interval(self.at_best)
        return Interval(worst.mean, worst.low, best.high)


def pass_k_measure(
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
        k: number of trials.
        scenarios: whether the tasks of a scenario form a cluster.
        whole: estimate SGC; a scenario is solved if all its tasks are.
        estimator: `pass_hat_k` or `pass_at_k`.

    Raises:
        ValueError: nothing was evaluated, or the measurements cover different tasks.
    """

    def values(solved: bool) -> tuple[Mapping[str, float], ...]:
        by_seed = [[[_as_solved(each) if solved else each for each in part] for part in seed] for seed in seeds]
        return tuple(
            mean_by_key([pass_k_by_task(part, runs, k, estimator, whole=whole) for part in s]) for s in by_seed
        )

    failed = values(solved=False)
    if not failed or not failed[0]:
        raise ValueError("nothing was evaluated")
    return Measure(
        failed=failed,
        solved=values(solved=True) if lost_rollouts(seeds) else failed,
        cluster=_scenario(seeds) if scenarios and not whole else str,
        trials=len(failed[0]) * runs * sum(len(seed) for seed in seeds),
    )


def turns(seeds: Seeds, *, scenarios: bool = False) -> Measure | None:
    """Mean turns by task, over rollouts with at least one turn; None if no task has such rollouts in every seed."""
    by_seed = []
    for seed in seeds:
        played: dict[str, list[int]] = defaultdict(list)
        for each in (each for measurement in seed for each in measurement if each.turns):
            played[each.task_id].append(each.turns)
        by_seed.append({task: float(np.mean(found)) for task, found in played.items()})
    common = [task for task in by_seed[0] if all(task in values for values in by_seed)] if by_seed else []
    return _of_tasks(by_seed, common, _scenario(seeds) if scenarios else str) if common else None


def turns_played(seeds: Seeds) -> list[int]:
    """Number of turns of every rollout that has at least one turn."""
    return [each.turns for seed in seeds for measurement in seed for each in measurement if each.turns]


def lost_rollouts(seeds: Seeds) -> int:
    """Number of lost rollouts."""
    return sum(each.lost for seed in seeds for measurement in seed for each in measurement)


def comparison_measures(seeds: Seeds, runs: int, *, scenarios: bool = True) -> dict[str, Measure]:
    """Measures for comparing settings, by name: rates at p^1 and at the largest k, and turns if any rollout was played.

    The names are ``TGC p^1``, ``SGC p^3`` and ``turns``; without scenarios ``SR p^1``.
    """
    ks = dict.fromkeys((1, min(runs, MOST_K)))
    task = "TGC" if scenarios else "SR"
    found = {f"{task} p^{k}": pass_k_measure(seeds, runs, k, scenarios=scenarios) for k in ks}
    if scenarios:
        found |= {f"SGC p^{k}": pass_k_measure(seeds, runs, k, whole=True) for k in ks}
    played = turns(seeds, scenarios=scenarios)
    return found if played is None else found | {"turns": played}


def differences(one: Mapping[str, Measure], other: Mapping[str, Measure]) -> dict[str, tuple[Interval, float]]:
    """`difference` of each measure that both settings have, by the measure's name."""
    return {name: difference(measure, other[name]) for name, measure in one.items() if name in other}


def difference(one: Measure, other: Measure) -> tuple[Interval, float]:
    """The difference ``one`` - ``other``, paired by task.

    Returns: the 95 % interval of the difference, and the two-sided p-value of the test that it is 0. Both are valid
        whatever the outcome of the lost rollouts would have been. The p-value is that of a permutation test over
        scenarios; with several training seeds, the larger of this and that of Student's test over scenarios and seeds.
    Raises:
        ValueError: two rates cover different tasks, or two means of turns have no task in common.
    """
    if not one.rate:
        common = [task for task in one.failed[0] if task in other.failed[0]]
        if not common:
            raise ValueError("no task is in both measures")
        one, other = (_of_tasks(each.failed, common, one.cluster) for each in (one, other))
        return mean_difference(one.at_worst, other.at_worst), _p_value(one, other)
    if apart := one.failed[0].keys() ^ other.failed[0].keys():
        raise ValueError(f"{len(apart)} tasks are in only one of the two measures")
    low = rate_difference(one.at_worst, other.at_best)
    high = rate_difference(one.at_best, other.at_worst)
    interval = Interval(one.mean - other.mean, low.low, high.high)
    if low.mean <= 0 <= high.mean:
        return interval, 1.0
    worst = _p_value(one, replace(other, failed=other.solved)), _p_value(replace(one, failed=one.solved), other)
    return interval, max(worst)


def permutation_p_value(
    differences: Mapping[str, float], cluster: Callable[[str], str], *, permutations: int = PERMUTATIONS
) -> float:
    """Two-sided p-value of the test that paired differences have mean 0, by changing the signs of whole clusters.

    If there are at most ``permutations`` ways to assign signs to the clusters, all of them are tried and the p-value is
    exact. Otherwise so many are drawn at random, and the observed signs are added, so that the p-value is never 0.

    Args:
        differences: task (or scenario) -> difference.
        cluster: task -> its cluster.
        permutations: maximum number of sign assignments to try.

    Raises:
        ValueError: there are no differences.
    """
    if not differences:
        raise ValueError("no differences to test")
    sums: dict[str, float] = defaultdict(float)
    for key, value in differences.items():
        sums[cluster(key)] += value
    # Round, so that equal sums are ties regardless of the order of addition.
    sum_C = np.round(list(sums.values()), _DIGITS)
    # With one cluster, both sign assignments are equally far from 0, so p is 1.
    if len(sum_C) < 2 or not sum_C.any():
        return 1.0
    exact = 2 ** len(sum_C) <= permutations
    if exact:
        numbers = np.arange(2 ** len(sum_C))[:, None]
        sign_PC = 1 - 2 * (numbers >> np.arange(len(sum_C)) & 1)
    else:
        sign_PC = np.random.default_rng(0).choice([-1, 1], size=(permutations, len(sum_C)))
    sum_P = np.round(sign_PC @ sum_C, _DIGITS)
    observed = round(sum_C.sum(), _DIGITS)
    rarer = min(int((sum_P >= observed).sum()), int((sum_P <= observed).sum()))
    return min(1.0, 2 * (rarer / len(sign_PC) if exact else (rarer + 1) / (permutations + 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: multiply the i-th smallest of m by m - i + 1, make monotone, limit to 1."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _p_value(one: Measure, other: Measure) -> float:
    first, second = mean_by_key(one.failed), mean_by_key(other.failed)
    by_scenario = permutation_p_value({task: first[task] - second[task] for task in first}, one.cluster)
    if max(len(one.failed), len(other.failed)) == 1:
        return by_scenario
    variance, degrees = paired_variance(one.at_worst, other.at_worst)
    return max(by_scenario, student_p_value(one.mean - other.mean, variance, degrees))


def _scenario(seeds: Seeds) -> Callable[[str], str]:
    """Task -> its scenario; a task without a scenario maps to itself."""
    rollouts = [each for seed in seeds for measurement in seed for each in measurement]
    return {each.task_id: each.scenario or each.task_id for each in rollouts}.__getitem__


def _as_solved(evaluation: Evaluation) -> Evaluation:
    return replace(evaluation, success=True) if evaluation.lost else evaluation


def _of_tasks(seeds: Sequence[Mapping[str, float]], tasks: Sequence[str], cluster: Callable[[str], str]) -> Measure:
    """The measure of turns over ``tasks`` only; ``seeds``: for each training seed, the mean turns by task."""
    values = tuple({task: seed[task] for task in tasks} for seed in seeds)
    return Measure(failed=values, solved=values, cluster=cluster, trials=len(tasks), rate=False)

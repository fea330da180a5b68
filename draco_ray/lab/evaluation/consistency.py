"""Discovery and consistency over n runs: pass@k and pass^k, for tasks (TGC) and for whole scenarios (SGC).

Section "Metrics": pass^k is the chance that k trials all succeed (p^k), pass@k that at least one of k does. Both are
estimated without bias from n >= k runs of which c succeeded, as the share of the k-subsets of the runs that qualify.
A scenario succeeds in a run if every one of its tasks does, and p^k of SGC is pass^k of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb

from draco_ray.records import Evaluation

Estimator = Callable[[int, int, int], float]


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


def task_values(
    evaluations: Iterable[Evaluation], runs: int, k: int, estimator: Estimator = pass_hat_k
) -> dict[str, float]:
    """TGC at k: task id -> the estimate over its ``runs`` runs; a run that is missing failed.

    Raises:
        ValueError: a run comes twice or is not 0 .. runs-1, or k is out of range.
    """
    return {task: estimator(sum(outcomes), runs, k) for task, outcomes in _outcomes(evaluations, runs).items()}


def scenario_values(
    evaluations: Iterable[Evaluation], runs: int, k: int, estimator: Estimator = pass_hat_k
) -> dict[str, float]:
    """SGC at k: scenario -> the estimate over the runs in which all its tasks succeeded; raises as `task_values`."""
    listed, together = list(evaluations), dict[str, list[bool]]()
    scenarios = scenarios_of(listed)
    for task, outcomes in _outcomes(listed, runs).items():
        so_far = together.setdefault(scenarios[task], [True] * runs)
        together[scenarios[task]] = [a and b for a, b in zip(so_far, outcomes, strict=True)]
    return {scenario: estimator(sum(outcomes), runs, k) for scenario, outcomes in together.items()}


def scenarios_of(evaluations: Iterable[Evaluation]) -> dict[str, str]:
    """Task id -> its scenario; a task of none is one of its own."""
    return {each.task_id: each.scenario or each.task_id for each in evaluations}


def scenario_of(task_id: str) -> str:
    """The scenario of AppWorld's ids, ``<scenario>_<1..3>``."""
    return task_id.rsplit("_", 1)[0]


def mean_by_key(measurements: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average several measurements of the same tasks or scenarios, e.g. of several seeds or checkpoints.

    Raises:
        ValueError: they are not of the same ones.
    """
    keys = measurements[0].keys() if measurements else ()
    if any(measurement.keys() != keys for measurement in measurements):
        raise ValueError("the measurements are not of the same tasks")
    return {key: sum(measurement[key] for measurement in measurements) / len(measurements) for key in keys}


def _outcomes(evaluations: Iterable[Evaluation], runs: int) -> dict[str, list[bool]]:
    outcomes: dict[str, list[bool]] = {}
    seen: set[tuple[str, int]] = set()
    for evaluation in evaluations:
        place = (evaluation.task_id, evaluation.run)
        if place in seen or not 0 <= evaluation.run < runs:
            raise ValueError(f"task {evaluation.task_id}: run {evaluation.run} is unexpected, {runs} runs are counted")
        seen.add(place)
        outcomes.setdefault(evaluation.task_id, [False] * runs)[evaluation.run] = evaluation.success
    return outcomes


def _check(successes: int, runs: int, k: int) -> None:
    if not 0 <= successes <= runs:
        raise ValueError(f"{successes} successes in {runs} runs")
    if not 1 <= k <= runs:
        raise ValueError(f"k = {k} trials cannot be drawn from {runs} runs")

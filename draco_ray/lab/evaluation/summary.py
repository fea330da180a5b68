"""One row of the paper's result table: TGC and SGC at p^1 .. p^k, turns; from several seeds or checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draco_ray.lab.evaluation.consistency import mean_by_key, scenario_of, scenario_values, task_values
from draco_ray.lab.evaluation.intervals import Interval, clustered_bootstrap
from draco_ray.records import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a policy fares on one split. Rates are shares in [0, 1], index 0 is p^1."""

    tgc: tuple[Interval, ...]
    sgc: tuple[Interval, ...]
    turns: float
    """Mean agent turns per rollout."""
    task_success: Mapping[str, float]
    """p^1 by task, for paired comparisons."""


def summarise(measurements: Sequence[Sequence[Evaluation]], runs: int, most: int = 3) -> Summary:
    """Average over measurements of the same tasks, then take intervals over scenarios.

    Args:
        measurements: the evaluated rollouts of each seed or checkpoint, ``runs`` per task.
        runs: n of pass^k.
        most: the largest k, if there are as many runs.

    Raises:
        ValueError: nothing was evaluated, or the measurements differ in their tasks.
    """
    if not any(measurements):
        raise ValueError("nothing was evaluated")
    tgc, sgc = [], []
    for k in range(1, min(runs, most) + 1):
        tasks = mean_by_key([task_values(evaluations, runs, k) for evaluations in measurements])
        scenarios = mean_by_key([scenario_values(evaluations, runs, k) for evaluations in measurements])
        tgc.append(clustered_bootstrap(tasks, scenario_of))
        sgc.append(clustered_bootstrap(scenarios, str))
    turns = [evaluation.turns for evaluations in measurements for evaluation in evaluations]
    success = mean_by_key([task_values(evaluations, runs, 1) for evaluations in measurements])
    return Summary(tgc=tuple(tgc), sgc=tuple(sgc), turns=sum(turns) / len(turns), task_success=success)


def difference(one: Summary, other: Summary) -> Interval:
    """TGC p^1 of ``one`` minus that of ``other``, paired by task, with its interval.

    Raises:
        ValueError: they are not of the same tasks.
    """
    if one.task_success.keys() != other.task_success.keys():
        raise ValueError("the two summaries are not of the same tasks")
    return clustered_bootstrap(
        {task: one.task_success[task] - other.task_success[task] for task in one.task_success}, scenario_of
    )

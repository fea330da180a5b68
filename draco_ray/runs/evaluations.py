"""Evaluations of a training run's own policies, read from its tables, and their rates.

If an environment has no evaluator, the judge's pass rate on held-out rollouts replaces the success rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from draco_ray.records import Evaluation, FloatArray, IntArray, JudgedRollout, Verdict
from draco_ray.runs.directory import RunDirectory, damaged
from draco_ray.runs.rows import scenario_of

RecordT = TypeVar("RecordT", Evaluation, JudgedRollout)


def task_goal_completion(evaluations: Iterable[Evaluation]) -> float:
    """TGC: the share of rollouts that passed all tests, in [0, 1]; 0.0 without rollouts.

    With several runs per task this is the mean over runs, p^1.
    """
    outcomes = [evaluation.success for evaluation in evaluations]
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


def scenario_goal_completion(evaluations: Iterable[Evaluation]) -> float:
    """SGC: the share of (scenario, run) pairs in which all tasks succeeded, in [0, 1]; 0.0 without rollouts.

    A task without a scenario is its own scenario.
    """
    scenarios: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for evaluation in evaluations:
        scenarios[evaluation.scenario or evaluation.task_id, evaluation.run].append(evaluation.success)
    return sum(all(outcomes) for outcomes in scenarios.values()) / len(scenarios) if scenarios else 0.0


def read_evaluations(run: RunDirectory) -> dict[tuple[int, str], list[Evaluation]]:
    """(training step, split) -> evaluated rollouts; step 0 is the untrained policy."""
    return _by_policy(run, "evaluations", Evaluation)


DRAWS = 2_000
"""Number of bootstrap samples per interval."""
CONFIDENCE_LEVEL = 0.95
"""Confidence level of intervals."""


@dataclass(frozen=True, slots=True)
class Share:
    """A mean share in [0, 1] and its percentile bootstrap interval over scenarios.

    The bounds are None if fewer than two scenarios have a value.
    """

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """The share and its interval in per cent."""
        if self.low is None or self.high is None:
            return f"{100 * self.mean:.1f} %"
        return f"{100 * self.mean:z.1f} % [{100 * self.low:z.1f}, {100 * self.high:z.1f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRates:
    """Rates over one policy's held-out rollouts."""

    pass_rate: Share | None
    """Mean share of passes among applicable verdicts of a rollout; None if no verdict applies."""
    agreement: Share | None
    """Mean share of a rollout's criteria on which two scoring calls agree."""
    tasks: int
    rollouts: int
    unscored: int
    """Rollouts that were lost or whose scoring failed; they are left out of the rates."""

    def __str__(self) -> str:
        """One line, which says that the judge's rate is a stand-in for an evaluator."""
        rate = "unknown" if self.pass_rate is None else str(self.pass_rate)
        parts = [f"judge's pass rate {rate} (a stand-in, because there is no evaluator)"]
        if self.agreement is not None:
            parts.append(f"the judge agrees with itself on {self.agreement} of verdicts")
        parts.append(f"{self.tasks} tasks, {self.rollouts} rollouts")
        if self.unscored:
            parts.append(f"{self.unscored} rollouts without verdicts are left out")
        return "; ".join(parts)


def judged_rates(rollouts: Sequence[JudgedRollout]) -> JudgedRates:
    """Rates over held-out rollouts with intervals over their scenarios."""
    scored = [each for each in rollouts if each.error is None]
    return JudgedRates(
        pass_rate=_share(scored, lambda rollout: passed_share(rollout.verdicts)),
        agreement=_share(scored, _agreed),
        tasks=len({each.task_id for each in rollouts}),
        rollouts=len(rollouts),
        unscored=len(rollouts) - len(scored),
    )


def read_judged(run: RunDirectory) -> dict[tuple[int, str], list[JudgedRollout]]:
    """(training step, split) -> judged held-out rollouts; step 0 is the untrained policy."""
    return _by_policy(run, "heldout_verdicts", JudgedRollout)


def _by_policy(run: RunDirectory, table: str, kind: type[RecordT]) -> dict[tuple[int, str], list[RecordT]]:
    """(training step, split) -> the table's rows as records; a null becomes the field's default.

    Raises:
        DamagedRun: the table cannot be read, or a field has a value that it cannot have.
    """
    record, found = TypeAdapter(kind), defaultdict(list)
    for row in run.table(table).to_pylist():
        values = {name: value for name, value in row.items() if value is not None} | {"scenario": scenario_of(row)}
        try:
            found[row["training_step"], row["split"]].append(record.validate_python(values))
        except ValidationError as error:
            raise damaged(run.tables / table, f"a row of step {row['training_step']}: {error}") from None
    return dict(sorted(found.items()))


def passed_share(verdicts: Sequence[int]) -> float | None:
    """Share of passes among the applicable verdicts on a rollout; None if no verdict applies."""
    passes, fails = (list(verdicts).count(verdict) for verdict in (Verdict.PASS, Verdict.FAIL))
    return passes / (passes + fails) if passes + fails else None


def _agreed(rollout: JudgedRollout) -> float | None:
    if not rollout.again or not rollout.verdicts:
        return None
    return float(np.mean([one == other for one, other in zip(rollout.verdicts, rollout.again, strict=True)]))


def _share(rollouts: Iterable[JudgedRollout], value_of: Callable[[JudgedRollout], float | None]) -> Share | None:
    clusters: dict[str, int] = {}
    found = [
        (value, clusters.setdefault(rollout.scenario or rollout.task_id, len(clusters)))
        for rollout in rollouts
        if (value := value_of(rollout)) is not None
    ]
    return mean_share(np.array([value for value, _ in found]), np.array([cluster for _, cluster in found]))


def mean_share(value_N: FloatArray, cluster_N: IntArray) -> Share | None:
    """The mean of values, and its percentile bootstrap interval over their clusters; None without a value."""
    if not len(value_N):
        return None
    index_N = np.unique(cluster_N, return_inverse=True)[1]
    sums_C, counts_C = np.bincount(index_N, weights=value_N), np.bincount(index_N)
    mean = float(sums_C.sum() / counts_C.sum())
    if len(counts_C) < 2:
        return Share(mean, None, None)
    drawn = np.random.default_rng(0).integers(0, len(counts_C), (DRAWS, len(counts_C)))
    means = sums_C[drawn].sum(axis=1) / counts_C[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Share(mean, float(low), float(high))

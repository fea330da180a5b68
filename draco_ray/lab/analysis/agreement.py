"""Whether two graders agree beyond chance: rates with their own denominators, chance-corrected coefficients, intervals.

The reference is the judge whose verdicts a run used. If the other grader did not answer a criterion, its rating is
`UNANSWERED`: a disagreement in ``agreement`` and in the rates whose denominator is the reference's verdicts
(``balanced_accuracy``, ``false_pass``, ``false_fail``). Chance, kappa, alpha and AC1 leave it out, as they compare
answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from draco_ray.lab.evaluation.intervals import Interval, bounded_limits
from draco_ray.records import BoolArray, FloatArray, IntArray, Verdict

UNANSWERED = 2
"""Rating of a judgment to which the other grader gave no verdict."""
RATINGS = (Verdict.FAIL.value, Verdict.NOT_APPLICABLE.value, Verdict.PASS.value)
_FAIL, _PASS = RATINGS.index(Verdict.FAIL.value), RATINGS.index(Verdict.PASS.value)

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the other grader's verdicts compare with the reference; NaN where a denominator is empty."""

    judgments: int
    passes: int
    """Number of judgments that the reference passes: the denominator of ``false_fail``."""
    fails: int
    """Number of judgments that the reference fails: the denominator of ``false_pass``."""
    unanswered: float
    """Share of all judgments that the other grader left without a verdict."""
    agreement: float
    """Share of all judgments with equal verdicts, N/A included."""
    chance: float
    """Agreement that two independent graders with these margins would reach."""
    kappa: float
    """Cohen's coefficient over pass, fail and N/A."""
    alpha: float
    """Krippendorff's coefficient, nominal."""
    ac1: float
    """Gwet's coefficient, which does not collapse if nearly all verdicts are equal. Its number of categories is the
    number of distinct verdicts that either grader gives, at least two."""
    balanced_accuracy: float
    """Mean recall: for each verdict the reference gives, the share that the other grader repeats."""
    false_pass: float
    """Of the judgments the reference fails, the share the other passes."""
    false_fail: float
    """Of the judgments the reference passes, the share the other fails."""


COUNTS = ("judgments", "passes", "fails")
"""Fields of `Agreement` that are numbers of judgments."""
RATES = tuple(field.name for field in dataclasses.fields(Agreement) if field.name not in COUNTS)
"""Fields of `Agreement` that are rates or coefficients."""
COEFFICIENTS = ("kappa", "alpha", "ac1")
"""Fields in [-1, 1]; all other rates are in [0, 1]."""


def agreement(reference: IntArray, other: IntArray) -> Agreement:
    """Compare two graders' ratings of the same judgments.

    Args:
        reference: +1, -1 or 0.
        other: the same, or `UNANSWERED`.

    Raises:
        ValueError: the two differ in shape, or contain other values.

    >>> found = agreement(np.array([1, 1, -1, -1]), np.array([1, 1, -1, 1]))
    >>> found.agreement, found.chance, found.kappa, found.false_pass
    (0.75, 0.5, 0.5, 0.5)
    """
    counts = contingency(reference, other)
    return _compare(counts, _used(counts))


def contingency(reference: IntArray, other: IntArray) -> FloatArray:
    """Judgments by the reference's rating (row) and the other's (column), shape (3, 4): `RATINGS`, then unanswered.

    Raises:
        ValueError: as `agreement`.
    """
    if reference.shape != other.shape or reference.ndim != 1:
        raise ValueError(
            f"ratings have shapes {reference.shape} and {other.shape}; expected two vectors of equal length"
        )
    columns = (*RATINGS, UNANSWERED)
    if not np.isin(reference, RATINGS).all() or not np.isin(other, columns).all():
        raise ValueError("a rating is not -1, 0 or +1")
    return np.array(
        [[np.count_nonzero((reference == row) & (other == column)) for column in columns] for row in RATINGS], float
    )


def agreement_intervals(clusters: Sequence[FloatArray]) -> dict[str, tuple[float, float]]:
    """Intervals of every rate of `Agreement` over the choice of clusters, computed like `clustered_interval`.

    Args:
        clusters: one `contingency` table per cluster.
    Returns: (low, high) by name in `RATES`; infinite where fewer than two clusters have a denominator.

    Raises:
        ValueError: there are no clusters.
    """
    if not clusters:
        raise ValueError("no clusters, so no interval can be computed")
    table_C = np.stack(clusters)
    total = table_C.sum(axis=0)
    used = _used(total)
    whole = _compare(total, used)
    without = [_compare(total - table, used) for table in table_C]
    judged_C = table_C.sum(axis=2)
    counted = {"false_pass": judged_C[:, _FAIL], "false_fail": judged_C[:, _PASS]}
    bounds = {}
    for name in RATES:
        many_C = counted.get(name, judged_C.sum(axis=1))
        bounds[name] = _limits(
            getattr(whole, name),
            [getattr(each, name) for each, many in zip(without, many_C, strict=True) if many],
            trials=float(many_C.sum()),
            bounds=(-1.0, 1.0) if name in COEFFICIENTS else (0.0, 1.0),
        )
    return bounds


def clustered_interval(clusters: Mapping[Any, Sequence[ItemT]], statistic: Callable[[list[ItemT]], float]) -> Interval:
    """A statistic in [0, 1] over all items, with its interval over the choice of clusters.

    Judgments on one task are correlated: treating them as independent would make the interval too narrow. The
    variance is the jackknife's, leaving out one cluster at a time. The limits come from `bounded_limits`, so the
    interval has a width even if every judgment agreed. The interval is infinite if there is only one cluster, or if
    leaving one out makes the statistic undefined.

    Raises:
        ValueError: there are no clusters.
    """
    if not clusters:
        raise ValueError("no clusters, so no interval can be computed")
    groups = [list(items) for items in clusters.values() if items]
    items = [item for group in groups for item in group]
    value = statistic(items)
    places = np.cumsum([0, *(len(group) for group in groups)])
    # Leaving out the only cluster would leave no items.
    left_out = range(len(groups)) if len(groups) > 1 else ()
    without = [statistic(items[: places[index]] + items[places[index + 1] :]) for index in left_out]
    return Interval(value, *_limits(value, without, trials=float(len(items))))


def _limits(
    value: float, without: Sequence[float], *, trials: float, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """The limits of a statistic's interval, given its value without each of the clusters."""
    many = len(without)
    if many < 2 or not np.isfinite([value, *without]).all():
        return -np.inf, np.inf
    variance = (many - 1) * float(np.var(without))
    return bounded_limits(value, variance, clusters=many, trials=trials, bounds=bounds)


def auroc(positive: FloatArray, negative: FloatArray) -> float:
    """The probability that a positive scores above a negative, ties half; NaN if either is missing.

    >>> auroc(np.array([0.9, 0.5]), np.array([0.5, 0.1]))
    0.875
    """
    if not len(positive) or not len(negative):
        return float("nan")
    difference = positive[:, None] - negative[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


def _compare(counts: FloatArray, used: BoolArray) -> Agreement:
    """The `Agreement` of a `contingency` table; ``used`` marks the ratings that are categories of AC1."""
    table, rows = counts[:, :-1], counts.sum(axis=1)
    total, agreed = rows.sum(), np.diagonal(counts)
    repeated = [agreed[row] / rows[row] for row in range(len(rows)) if rows[row]]
    chance = _chance(table)
    return Agreement(
        judgments=int(total),
        passes=int(rows[_PASS]),
        fails=int(rows[_FAIL]),
        unanswered=ratio(counts[:, -1].sum(), total),
        agreement=ratio(agreed.sum(), total),
        chance=chance,
        kappa=_corrected(table, chance),
        alpha=_alpha(table),
        ac1=_corrected(table, _gwet_chance(table, used)),
        balanced_accuracy=float(np.mean(repeated)) if repeated else float("nan"),
        false_pass=ratio(counts[_FAIL, _PASS], rows[_FAIL]),
        false_fail=ratio(counts[_PASS, _FAIL], rows[_PASS]),
    )


def _used(counts: FloatArray) -> BoolArray:
    """Ratings that occur, in either grader's answers."""
    return np.asarray(counts[:, :-1].sum(axis=0) + counts[:, :-1].sum(axis=1) > 0)


def ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN if ``whole`` is 0."""
    return float(part / whole) if whole else float("nan")


def _chance(table: FloatArray) -> float:
    return ratio((table.sum(axis=0) * table.sum(axis=1)).sum(), table.sum() ** 2)


def _gwet_chance(table: FloatArray, used: BoolArray) -> float:
    total = table.sum()
    if not total:
        return float("nan")
    share = (table.sum(axis=0) + table.sum(axis=1)) / (2 * total)
    return float((share * (1 - share)).sum() / (max(2, int(used.sum())) - 1))


def _corrected(table: FloatArray, chance: float) -> float:
    # If only one rating occurs, agreement by chance is certain and the coefficient is undefined.
    return ratio(ratio(np.trace(table), table.sum()) - chance, 1 - chance)


def _alpha(table: FloatArray) -> float:
    """Nominal alpha of two graders without gaps: 1 - observed / expected disagreement."""
    values = table + table.T
    total = values.sum()
    expected = total**2 - (values.sum(axis=0) ** 2).sum()
    return 1 - ratio((total - 1) * (total - np.trace(values)), expected)

"""Whether two graders agree beyond chance: rates with their own denominators, chance-corrected coefficients, intervals.

The reference is the judge whose verdicts a run used. Where the other grader left a criterion unanswered, the rating is
`UNANSWERED`: a disagreement in ``agreement`` and in the rates that have a denominator of the reference's verdicts
(``balanced_accuracy``, ``false_pass``, ``false_fail``), and left out of chance, kappa, alpha and AC1, which compare
answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.records import BoolArray, FloatArray, IntArray, Verdict

UNANSWERED = 2
"""Stands where the other grader gave no verdict."""
RATINGS = (Verdict.FAIL.value, Verdict.NOT_APPLICABLE.value, Verdict.PASS.value)
RESAMPLES = 1000
_FAIL, _PASS = RATINGS.index(Verdict.FAIL.value), RATINGS.index(Verdict.PASS.value)

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the other grader's verdicts compare with the reference; NaN where a denominator is empty."""

    judgments: int
    passes: int
    """Of the reference: the denominator of ``false_fail``."""
    fails: int
    """Of the reference: the denominator of ``false_pass``."""
    unanswered: float
    """Share of all judgments."""
    agreement: float
    """Share of all judgments with equal verdicts, N/A included."""
    chance: float
    """Agreement that two graders with these margins, but independent of each other, would reach."""
    kappa: float
    """Cohen's coefficient over pass, fail and N/A."""
    alpha: float
    """Krippendorff's coefficient, nominal."""
    ac1: float
    """Gwet's coefficient, which does not collapse where nearly all verdicts are the same. Its number of categories is
    that of the verdicts which either grader gives, at least two."""
    balanced_accuracy: float
    """Mean over the reference's verdicts, of those that occur, of the share repeated."""
    false_pass: float
    """Of the judgments the reference fails, the share the other passes."""
    false_fail: float
    """Of the judgments the reference passes, the share the other fails."""


COUNTS = ("judgments", "passes", "fails")
"""Fields of `Agreement` that are numbers of judgments."""
RATES = tuple(field.name for field in dataclasses.fields(Agreement) if field.name not in COUNTS)
"""The others."""


def agreement(reference: IntArray, other: IntArray) -> Agreement:
    """Compare two graders' ratings of the same judgments.

    Args:
        reference: +1, -1 or 0.
        other: the same, or `UNANSWERED`.

    Raises:
        ValueError: the two differ in shape, or hold other values.

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
        raise ValueError(f"{reference.shape} reference ratings, {other.shape} others: expected two equal vectors")
    columns = (*RATINGS, UNANSWERED)
    if not np.isin(reference, RATINGS).all() or not np.isin(other, columns).all():
        raise ValueError("a rating is none of -1, 0, +1")
    return np.array(
        [[np.count_nonzero((reference == row) & (other == column)) for column in columns] for row in RATINGS], float
    )


def agreement_intervals(
    clusters: Sequence[FloatArray], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Percentile intervals of every rate of `Agreement` under resampling of whole clusters, as `bootstrap` does.

    Args:
        clusters: a `contingency` each.
        level: coverage.
        resamples: bootstrap samples.
        seed: the same seed gives the same intervals.
    Returns: (low, high) by name in `RATES`; infinite with one cluster, or where no resample has a value.

    Raises:
        ValueError: there are no clusters.
    """
    if not clusters:
        raise ValueError("nothing to resample")
    tables = np.stack(clusters)
    used = _used(tables.sum(axis=0))
    names = len(tables)
    found: dict[str, list[float]] = {name: [] for name in RATES}
    for drawn in np.random.default_rng(seed).multinomial(names, np.full(names, 1 / names), resamples):
        resampled = _compare(np.tensordot(drawn.astype(float), tables, 1), used)
        for name in RATES:
            found[name].append(getattr(resampled, name))
    bounds = {}
    for name, values in found.items():
        defined = np.array(values)[~np.isnan(values)]
        if names < 2 or not len(defined):
            bounds[name] = (-np.inf, np.inf)
        else:
            low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
            bounds[name] = (float(low), float(high))
    return bounds


def bootstrap(
    clusters: Mapping[str, Sequence[ItemT]],
    statistic: Callable[[list[ItemT]], float],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """A statistic over all items, with a percentile interval under resampling of whole clusters.

    Judgments on one task rise and fall together: resampling them one by one would promise too narrow an interval.
    Resamples in which the statistic is undefined are left out; with one cluster the interval is the whole line.

    Raises:
        ValueError: there are no clusters.
    """
    if not clusters:
        raise ValueError("nothing to resample")
    groups = list(clusters.values())
    mean = statistic([item for group in groups for item in group])
    if len(groups) < 2:
        return Interval(mean, -np.inf, np.inf)
    drawn = np.random.default_rng(seed).integers(0, len(groups), (resamples, len(groups)))
    found = np.array([statistic([item for index in row for item in groups[index]]) for row in drawn])
    found = found[~np.isnan(found)]
    if not len(found):
        return Interval(mean, -np.inf, np.inf)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))


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
    """Of a `contingency`; ``used`` says which ratings are the categories of AC1."""
    table, rows = counts[:, :-1], counts.sum(axis=1)
    total, agreed = rows.sum(), np.diagonal(counts)
    repeated = [agreed[row] / rows[row] for row in range(len(rows)) if rows[row]]
    chance = _chance(table)
    return Agreement(
        judgments=int(total),
        passes=int(rows[_PASS]),
        fails=int(rows[_FAIL]),
        unanswered=_ratio(counts[:, -1].sum(), total),
        agreement=_ratio(agreed.sum(), total),
        chance=chance,
        kappa=_corrected(table, chance),
        alpha=_alpha(table),
        ac1=_corrected(table, _gwet_chance(table, used)),
        balanced_accuracy=float(np.mean(repeated)) if repeated else float("nan"),
        false_pass=_ratio(counts[_FAIL, _PASS], rows[_FAIL]),
        false_fail=_ratio(counts[_PASS, _FAIL], rows[_PASS]),
    )


def _used(counts: FloatArray) -> BoolArray:
    """Ratings that occur, in either grader's answers."""
    return np.asarray(counts[:, :-1].sum(axis=0) + counts[:, :-1].sum(axis=1) > 0)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


def _chance(table: FloatArray) -> float:
    total = table.sum()
    return float((table.sum(axis=0) * table.sum(axis=1)).sum() / total**2) if total else float("nan")


def _gwet_chance(table: FloatArray, used: BoolArray) -> float:
    total = table.sum()
    if not total:
        return float("nan")
    share = (table.sum(axis=0) + table.sum(axis=1)) / (2 * total)
    return float((share * (1 - share)).sum() / (max(2, int(used.sum())) - 1))


def _corrected(table: FloatArray, chance: float) -> float:
    # With one rating only, agreement by chance is certain and says nothing.
    if np.isnan(chance) or chance == 1.0:
        return float("nan")
    return (float(np.trace(table) / table.sum()) - chance) / (1 - chance)


def _alpha(table: FloatArray) -> float:
    """Nominal alpha of two graders without gaps: 1 - observed / expected disagreement."""
    values = table + table.T
    total = values.sum()
    margin = values.sum(axis=0)
    expected = total**2 - (margin**2).sum()
    if not total or not expected:
        return float("nan")
    observed = total - np.trace(values)
    return float(1 - (total - 1) * observed / expected)

"""How far two graders agree beyond chance: rates, chance-corrected coefficients, and the intervals of both.

One grader is the reference, such as the judge whose verdicts a run used. A judgment is one criterion of one rollout. If
the other grader gave no verdict on it, the other grader's rating is `UNANSWERED_RATING`. Such a judgment is a
disagreement in ``agreement`` and ``balanced_accuracy``. It is in the denominators of ``false_pass`` and ``false_fail``,
but is itself neither. ``chance`` and the coefficients leave such judgments out, since they compare verdicts.

================== =====================================================================================================
measure            meaning
================== =====================================================================================================
judgments          number of judgments
passes             number of judgments that the reference passes: the denominator of ``false_fail``
fails              number of judgments that the reference fails: the denominator of ``false_pass``
unanswered         share of judgments on which the other grader gave no verdict
agreement          share of judgments with equal verdicts; "not applicable" is a verdict, too
chance             agreement expected if each grader gave verdicts at random, with the frequencies of its own verdicts
kappa              Cohen's coefficient over the verdicts pass, fail and "not applicable"
alpha              Krippendorff's coefficient for nominal data
ac1                Gwet's coefficient, which does not collapse if nearly all verdicts are equal; its number of
                   categories is the number of distinct verdicts that either grader gives, at least two
balanced_accuracy  mean of up to three shares: of the judgments that the reference passes, fails or calls "not
                   applicable", the share with the same verdict by the other grader
false_pass         share of the judgments failed by the reference that the other grader passes
false_fail         share of the judgments passed by the reference that the other grader fails
================== =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from draco_ray.lab.evaluation.intervals import Interval, bounded_limits
from draco_ray.records import FloatArray, IntArray, Verdict

UNANSWERED_RATING = 2
"""Rating of a judgment to which the other grader gave no verdict."""
RATINGS = (Verdict.FAIL.value, Verdict.NOT_APPLICABLE.value, Verdict.PASS.value)
_FAIL, _PASS = RATINGS.index(Verdict.FAIL.value), RATINGS.index(Verdict.PASS.value)

COUNTS = ("judgments", "passes", "fails")
"""Measures that are numbers of judgments."""
COEFFICIENTS = ("kappa", "alpha", "ac1")
"""Measures in [-1, 1]; all other rates are in [0, 1]."""
RATES = ("unanswered", "agreement", "chance", *COEFFICIENTS, "balanced_accuracy", "false_pass", "false_fail")
"""Measures that are rates or coefficients."""


def contingency(reference: IntArray, other: IntArray) -> IntArray:
    """Counts by the reference's rating (3 rows) and the other's (4 columns): `RATINGS`, then `UNANSWERED_RATING`.

    Args:
        reference: +1, -1 or 0.
        other: the same, or `UNANSWERED_RATING`.

    Raises:
        ValueError: the two differ in shape, or contain other values.
    """
    if reference.shape != other.shape or reference.ndim != 1:
        raise ValueError(
            f"ratings have shapes {reference.shape} and {other.shape}; expected two vectors of equal length"
        )
    columns = (*RATINGS, UNANSWERED_RATING)
    if not np.isin(reference, RATINGS).all() or not np.isin(other, columns).all():
        raise ValueError("a rating is not -1, 0 or +1")
    return np.array(
        [[np.count_nonzero((reference == row) & (other == column)) for column in columns] for row in RATINGS]
    )


def agreement(counts: IntArray) -> dict[str, Any]:
    """The measures `COUNTS` and `RATES` of a `contingency`; NaN where a denominator is 0.

    >>> found = agreement(contingency(np.array([1, 1, -1, -1]), np.array([1, 1, -1, 1])))
    >>> [float(found[name]) for name in ("agreement", "chance", "kappa", "false_pass")]
    [0.75, 0.5, 0.5, 0.5]
    """
    return _measures(counts, _categories(counts))


def agreement_intervals(clusters: Sequence[IntArray]) -> dict[str, tuple[float, float]]:
    """95 % intervals of the `RATES`, computed like `clustered_interval`: by a jackknife over clusters.

    Args:
        clusters: one `contingency` per cluster.
    Returns: the limits (low, high) of each rate, by name. They are infinite if fewer than two clusters have judgments
        in the denominator of the rate.

    Raises:
        ValueError: there are no clusters.
    """
    if not clusters:
        raise ValueError("no clusters, so no interval can be computed")
    table_C = np.stack(clusters)
    total = table_C.sum(axis=0)
    whole, without_C = (_measures(table, _categories(total)) for table in (total, total - table_C))
    asked_C = table_C.sum(axis=2)
    denominators = {"false_pass": asked_C[:, _FAIL], "false_fail": asked_C[:, _PASS]}
    bounds = {}
    for name in RATES:
        trials_C = denominators.get(name, asked_C.sum(axis=1))
        limits = (-1.0, 1.0) if name in COEFFICIENTS else (0.0, 1.0)
        bounds[name] = _limits(whole[name], without_C[name][trials_C > 0], float(trials_C.sum()), limits)
    return bounds


def clustered_interval(clusters: Iterable[Collection[tuple[float, float]]]) -> Interval:
    """A share in [0, 1], sum of parts / sum of wholes, with its interval over clusters.

    Judgments on one task are correlated: treating them as independent would make the interval too narrow. The
    variance is the jackknife's, leaving out one cluster at a time. The limits come from `bounded_limits`, so the
    interval has a width even if every judgment agreed. The interval is infinite if there is only one cluster, or if
    leaving one out makes the share undefined.

    Args:
        clusters: (part, whole) of every item of each cluster; (value, 1) for a mean. Empty clusters do not count.

    >>> clustered_interval([[(1, 1), (0, 1)], []])
    Interval(mean=0.5, low=-inf, high=inf)
    """
    known = [np.array([*items], float) for items in clusters if items]
    sums_C2 = np.array([items.sum(axis=0) for items in known]).reshape(-1, 2)
    part, whole = sums_C2.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = float(part / whole)
        without_C = (part - sums_C2[:, 0]) / (whole - sums_C2[:, 1])
    return Interval(mean, *_limits(mean, without_C, trials=float(sum(map(len, known)))))


def _limits(
    value: float, without_C: FloatArray, trials: float, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """The limits of a statistic's interval, given its value without each of the clusters."""
    many = len(without_C)
    if many < 2 or not np.isfinite([value, *without_C]).all():
        return -np.inf, np.inf
    variance = (many - 1) * float(np.var(without_C))
    return bounded_limits(value, variance, clusters=many, trials=trials, bounds=bounds)


def auroc(positive: FloatArray, negative: FloatArray) -> float:
    """The probability that a positive scores above a negative, ties counting half; NaN if either is missing.

    >>> auroc(np.array([0.9, 0.5]), np.array([0.5, 0.1]))
    0.875
    """
    if not len(positive) or not len(negative):
        return float("nan")
    difference = positive[:, None] - negative[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


def ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN if ``whole`` is 0."""
    return float(part / whole) if whole else float("nan")


def _categories(counts: IntArray) -> int:
    """Number of distinct verdicts that either grader gives, at least two."""
    answered = counts[:, :-1]
    return max(2, int(np.count_nonzero(answered.sum(axis=0) + answered.sum(axis=1))))


def _measures(counts: IntArray, categories: int) -> dict[str, Any]:
    """The measures of one `contingency` table, or of each table in a stack of shape (C, 3, 4).

    ``categories``: number of categories in AC1, the same for all tables.
    """
    asked, table = counts.sum(axis=-1), counts[..., :-1]
    mine, theirs = table.sum(axis=-1), table.sum(axis=-2)
    total, answered = asked.sum(axis=-1), mine.sum(axis=-1)
    equal = np.diagonal(table, axis1=-2, axis2=-1)
    agreed, margins = equal.sum(axis=-1), mine + theirs
    # Where a denominator is 0, so is its numerator, and the quotient is NaN.
    with np.errstate(invalid="ignore"):
        observed = agreed / answered
        chance = (mine * theirs).sum(axis=-1) / answered**2
        share = margins / (2 * answered)[..., None]
        by_chance = (share * (1 - share)).sum(axis=-1) / (categories - 1)
        differing = (2 * answered - 1) * 2 * (answered - agreed)
        recalls = np.where(asked, equal / asked, 0.0)
        return {
            "judgments": total,
            "passes": asked[..., _PASS],
            "fails": asked[..., _FAIL],
            "unanswered": counts[..., -1].sum(axis=-1) / total,
            "agreement": agreed / total,
            "chance": chance,
            # If only one rating occurs, agreement by chance is certain and the coefficient is undefined.
            "kappa": (observed - chance) / (1 - chance),
            "alpha": 1 - differing / ((2 * answered) ** 2 - (margins**2).sum(axis=-1)),
            "ac1": (observed - by_chance) / (1 - by_chance),
            "balanced_accuracy": recalls.sum(axis=-1) / np.count_nonzero(asked, axis=-1),
            "false_pass": counts[..., _FAIL, _PASS] / asked[..., _FAIL],
            "false_fail": counts[..., _PASS, _FAIL] / asked[..., _PASS],
        }

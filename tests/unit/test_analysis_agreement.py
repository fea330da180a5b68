"""Agreement coefficients against values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from draco_ray.lab.analysis.agreement import (
    RATES,
    UNANSWERED_RATING,
    agreement,
    agreement_intervals,
    auroc,
    clustered_interval,
    contingency,
)
from draco_ray.lab.evaluation.intervals import Interval


def ratings(table: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ratings from a contingency table over (fail, pass) or (fail, not applicable, pass), reference by row."""
    values = (-1, 1) if len(table) == 2 else (-1, 0, 1)
    pairs = [
        (row, column)
        for row, counts in zip(values, table, strict=True)
        for column, count in zip(values, counts, strict=True)
        for _ in range(count)
    ]
    return np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])


def compared(reference: np.ndarray, other: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(**agreement(contingency(reference, other)))


def test_coefficients_of_a_known_table() -> None:
    # 50 judgments: 20 both fail, 15 both pass, 5 false passes, 10 false fails.
    found = compared(*ratings([[20, 5], [10, 15]]))
    assert found.agreement == pytest.approx(0.7)
    assert found.chance == pytest.approx(0.5)
    assert found.kappa == pytest.approx(0.4)
    assert found.false_pass == pytest.approx(0.2)
    assert found.false_fail == pytest.approx(0.4)
    assert found.balanced_accuracy == pytest.approx(0.7)
    # Coincidences: 15 of each order off the diagonal; margins 55 and 45 of 100.
    assert found.alpha == pytest.approx(1 - 99 * 30 / (100**2 - 55**2 - 45**2))
    assert (found.judgments, found.passes, found.fails) == (50, 25, 25)


def test_three_verdicts() -> None:
    # Of 200: margins 120, 60, 20 and 100, 60, 40; 140 on the diagonal.
    found = compared(*ratings([[88, 14, 18], [10, 40, 10], [2, 6, 12]]))
    assert found.chance == pytest.approx((120 * 100 + 60 * 60 + 20 * 40) / 200**2)
    assert found.kappa == pytest.approx((0.70 - 0.41) / (1 - 0.41))
    # Mean margins 0.55, 0.30, 0.15.
    by_chance = (0.55 * 0.45 + 0.30 * 0.70 + 0.15 * 0.85) / 2
    assert found.ac1 == pytest.approx((0.70 - by_chance) / (1 - by_chance))
    assert found.alpha == pytest.approx(1 - 399 * 120 / (400**2 - 220**2 - 120**2 - 60**2))
    assert found.balanced_accuracy == pytest.approx((88 / 120 + 40 / 60 + 12 / 20) / 3)
    assert (found.false_pass, found.false_fail) == (18 / 120, 2 / 20)


def test_published_examples() -> None:
    # Krippendorff, "Computing Krippendorff's alpha-reliability", two observers, binary data: 0.095.
    one, other = ([1 if digit == "1" else -1 for digit in digits] for digits in ("0100000010", "1110010000"))
    assert compared(np.array(one), np.array(other)).alpha == pytest.approx(0.095, abs=5e-4)
    # Gwet's example of the kappa paradox, 118, 5, 2 and 0 of 125: kappa -0.0234, AC1 0.9408.
    found = compared(*ratings([[118, 5], [2, 0]]))
    assert (found.kappa, found.ac1) == (pytest.approx(-0.0234, abs=5e-5), pytest.approx(0.9408, abs=5e-5))


def test_coefficients_do_not_depend_on_who_is_the_reference() -> None:
    one, other = ratings([[8, 1, 3], [0, 4, 2], [5, 1, 9]])
    first, second = compared(one, other), compared(other, one)
    assert (first.kappa, first.alpha, first.ac1) == pytest.approx((second.kappa, second.alpha, second.ac1))
    assert first.false_pass != second.false_pass


def test_every_rate_has_an_interval_over_clusters() -> None:
    rng = np.random.default_rng(1)
    pairs = [ratings(rng.integers(0, 9, (3, 3)).tolist()) for _ in range(12)]
    whole = compared(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
    bounds = agreement_intervals([contingency(*pair) for pair in pairs])
    assert set(bounds) == set(RATES)
    for name, (low, high) in bounds.items():
        assert low <= getattr(whole, name) <= high, name
    # The same as leaving out the judgments themselves, a whole cluster at a time; resampled, they spread as much.
    same = clustered_interval([[(one == other, 1) for one, other in zip(*pair, strict=True)] for pair in pairs])
    assert bounds["agreement"] == pytest.approx((same.low, same.high))
    tables = np.stack([contingency(*pair) for pair in pairs])
    resampled = [
        compared(*ratings(tables[drawn].sum(axis=0)[:, :3].astype(int).tolist())).kappa
        for drawn in rng.integers(0, 12, (2000, 12))
    ]
    low, high = bounds["kappa"]
    assert high - low == pytest.approx(2 * 2.2 * np.std(resampled), rel=0.2)
    assert agreement_intervals([contingency(*pairs[0])])["kappa"] == (-math.inf, math.inf)


def test_ac1_stays_where_kappa_collapses() -> None:
    found = compared(*ratings([[0, 5], [5, 90]]))
    assert found.kappa < 0
    assert found.ac1 > 0.85
    assert found.balanced_accuracy == pytest.approx((0 + 90 / 95) / 2)


def test_unanswered_counts_against_agreement_but_not_in_the_coefficients() -> None:
    found = compared(np.array([1, 1, -1, -1]), np.array([1, UNANSWERED_RATING, -1, UNANSWERED_RATING]))
    assert (found.unanswered, found.agreement, found.kappa) == (0.5, 0.5, 1.0)
    assert found.false_pass == 0.0


def test_one_verdict_only_says_nothing_beyond_chance() -> None:
    found = compared(np.ones(4, dtype=int), np.ones(4, dtype=int))
    assert found.agreement == 1.0
    assert math.isnan(found.kappa)
    assert math.isnan(found.alpha)
    assert math.isnan(found.false_pass)


def test_perfect_and_opposite() -> None:
    reference = np.array([1, -1, 0, 1, -1, 0])
    assert compared(reference, reference).kappa == pytest.approx(1.0)
    assert compared(reference, reference).alpha == pytest.approx(1.0)
    assert compared(reference, np.roll(reference, 1)).kappa < 0


def test_ratings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="not -1, 0 or"):
        compared(np.array([2]), np.array([1]))


def test_judges_that_never_differed_may_yet_differ() -> None:
    """Ten groups, all passes but one fail each, all repeated: no coefficient is sure to be 1, no slip sure to be 0."""
    pairs = [ratings([[1, 0], [0, 4]]) for _ in range(10)]
    bounds = agreement_intervals([contingency(*pair) for pair in pairs])
    assert bounds["false_pass"] == pytest.approx((0.0, 1 - 0.025 ** (1 / 10)))
    assert bounds["agreement"] == pytest.approx((0.025 ** (1 / 10), 1.0))
    assert bounds["kappa"] == pytest.approx((2 * 0.025 ** (1 / 10) - 1, 1.0))
    assert all(high - low > 0.1 for low, high in bounds.values())
    # What has its denominator in one group only has no interval.
    rare = [ratings([[1, 0], [0, 4]]), *(ratings([[0, 0], [0, 5]]) for _ in range(9))]
    assert agreement_intervals([contingency(*pair) for pair in rare])["false_pass"] == (-math.inf, math.inf)


def test_whole_clusters_are_left_out() -> None:
    items = np.random.default_rng(0).integers(0, 2, 40).astype(float)
    apart = clustered_interval([[(item, 1)] for item in items])
    tenfold = clustered_interval([[(item, 1)] * 10 for item in items])
    assert (tenfold.low, tenfold.high) == pytest.approx((apart.low, apart.high))
    assert apart.low < apart.mean == items.mean() < apart.high
    # A group without items is no evidence.
    assert clustered_interval([*([(item, 1)] for item in items), []]) == apart
    for alone in ([[(1, 1)]], [[(1, 1)], []]):
        assert clustered_interval(alone) == Interval(1.0, -math.inf, math.inf)
    # Without items, and without one of the groups, the share is not known.
    assert math.isnan(clustered_interval([]).mean)
    assert clustered_interval([[(1, 2)], [(0, 0)]]) == Interval(0.5, -math.inf, math.inf)
    with pytest.raises(ValueError, match="no clusters"):
        agreement_intervals([])


def test_auroc_of_nothing_is_undefined() -> None:
    assert math.isnan(auroc(np.array([]), np.array([1.0])))

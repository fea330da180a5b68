"""Agreement coefficients against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draco_ray.analysis.agreement import UNANSWERED, agreement, auroc, bootstrap


def ratings(table: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ratings from a contingency table over (fail, pass), reference by row."""
    pairs = [
        (row, column)
        for row, counts in zip((-1, 1), table, strict=True)
        for column, count in zip((-1, 1), counts, strict=True)
        for _ in range(count)
    ]
    return np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])


def test_coefficients_of_a_known_table() -> None:
    # 50 judgments: 20 both fail, 15 both pass, 5 false passes, 10 false fails.
    found = agreement(*ratings([[20, 5], [10, 15]]))
    assert found.agreement == pytest.approx(0.7)
    assert found.chance == pytest.approx(0.5)
    assert found.kappa == pytest.approx(0.4)
    assert found.false_pass == pytest.approx(0.2)
    assert found.false_fail == pytest.approx(0.4)
    assert found.balanced_accuracy == pytest.approx(0.7)
    # Coincidences: 15 of each order off the diagonal; margins 55 and 45 of 100.
    assert found.alpha == pytest.approx(1 - 99 * 30 / (100**2 - 55**2 - 45**2))


def test_ac1_stays_where_kappa_collapses() -> None:
    found = agreement(*ratings([[0, 5], [5, 90]]))
    assert found.kappa < 0
    assert found.ac1 > 0.85
    assert found.balanced_accuracy == pytest.approx((0 + 90 / 95) / 2)


def test_unanswered_counts_against_agreement_but_not_in_the_coefficients() -> None:
    found = agreement(np.array([1, 1, -1, -1]), np.array([1, UNANSWERED, -1, UNANSWERED]))
    assert (found.unanswered, found.agreement, found.kappa) == (0.5, 0.5, 1.0)
    assert found.false_pass == 0.0


def test_one_verdict_only_says_nothing_beyond_chance() -> None:
    found = agreement(np.ones(4, dtype=int), np.ones(4, dtype=int))
    assert found.agreement == 1.0
    assert math.isnan(found.kappa)
    assert math.isnan(found.alpha)
    assert math.isnan(found.false_pass)


def test_perfect_and_opposite() -> None:
    reference = np.array([1, -1, 0, 1, -1, 0])
    assert agreement(reference, reference).kappa == pytest.approx(1.0)
    assert agreement(reference, reference).alpha == pytest.approx(1.0)
    assert agreement(reference, np.roll(reference, 1)).kappa < 0


def test_ratings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="none of -1, 0"):
        agreement(np.array([2]), np.array([1]))


def test_bootstrap_resamples_whole_clusters() -> None:
    clusters = {"a": [1.0] * 10, "b": [0.0] * 10}

    def mean(items: list[float]) -> float:
        return float(np.mean(items))

    found = bootstrap(clusters, mean)
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
    alone = bootstrap({"a": [1.0]}, mean)
    assert alone.low == -math.inf


def test_auroc_of_nothing_is_undefined() -> None:
    assert math.isnan(auroc(np.array([]), np.array([1.0])))

"""Paired comparison against brute force: every assignment of signs, and every intersection of hypotheses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.lab.evaluation.comparison import holm, paired_difference, permutation_p_value
from draco_ray.lab.evaluation.consistency import scenario_of


def brute_p_value(differences: dict[str, float]) -> float:
    clusters = sorted({scenario_of(task) for task in differences})
    observed = abs(sum(differences.values()))
    extreme = []
    for signs in itertools.product((1, -1), repeat=len(clusters)):
        of = dict(zip(clusters, signs, strict=True))
        total = sum(of[scenario_of(task)] * value for task, value in differences.items())
        extreme.append(abs(total) >= observed - 1e-9)
    return float(np.mean(extreme))


def differences(scenarios: int, seed: int, shift: float = 0.1) -> dict[str, float]:
    random = np.random.default_rng(seed)
    return {
        f"{scenario}_{number}": round(float(random.normal(shift, 0.3)) * 3) / 3
        for scenario in range(scenarios)
        for number in (1, 2, 3)
    }


@pytest.mark.parametrize("seed", range(5))
def test_few_scenarios_are_enumerated(seed: int) -> None:
    found = differences(6, seed)
    assert permutation_p_value(found, scenario_of) == pytest.approx(brute_p_value(found))


def test_many_scenarios_are_drawn_close_to_the_truth_and_never_zero() -> None:
    found = differences(14, 3)
    assert permutation_p_value(found, scenario_of) == pytest.approx(brute_p_value(found), abs=0.02)
    certain = {f"{scenario}_1": 1.0 for scenario in range(40)}
    assert 0 < permutation_p_value(certain, scenario_of, permutations=2_500) == pytest.approx(1 / 2_501)


def test_no_difference_at_all_is_no_evidence() -> None:
    assert permutation_p_value({f"{n}_1": 0.0 for n in range(5)}, scenario_of) == 1.0


def test_tasks_of_a_scenario_are_not_independent_evidence() -> None:
    one = {f"{scenario}_1": 1.0 for scenario in range(4)}
    tripled = {f"{scenario}_{number}": 1.0 for scenario in range(4) for number in (1, 2, 3)}
    assert permutation_p_value(one, scenario_of) == permutation_p_value(tripled, scenario_of) == pytest.approx(2 / 16)


def closed_testing(p_values: list[float]) -> list[float]:
    """Holm as what it is: the closed test by Bonferroni. A hypothesis falls once every set that holds it does."""
    indices = range(len(p_values))
    adjusted = []
    for index in indices:
        sets = [
            chosen
            for size in range(1, len(p_values) + 1)
            for chosen in itertools.combinations(indices, size)
            if index in chosen
        ]
        adjusted.append(min(1.0, max(len(chosen) * min(p_values[i] for i in chosen) for chosen in sets)))
    return adjusted


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_is_the_closed_test_by_bonferroni(p_values: list[float]) -> None:
    assert holm(p_values) == pytest.approx(closed_testing(p_values))


def test_the_difference_is_of_means_and_needs_the_same_tasks() -> None:
    one = {f"{s}_{n}": float((s + n) % 2) for s in range(8) for n in (1, 2)}
    other = dict.fromkeys(one, 0.25)
    interval, p_value = paired_difference(one, other, scenario_of)
    assert interval.mean == pytest.approx(0.25)
    assert interval.low <= 0.25 <= interval.high
    assert 0 < p_value <= 1
    with pytest.raises(ValueError, match="1 tasks are in one of the two only"):
        paired_difference(one, dict.fromkeys(list(one)[1:], 0.0), scenario_of)

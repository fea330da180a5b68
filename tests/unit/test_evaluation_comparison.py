"""Comparisons against brute force (assignments of signs, intersections of hypotheses); seeds and lost rollouts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.lab.evaluation.measures import difference, holm, pass_k_measure, permutation_p_value, turns
from draco_ray.records import LOST_ROLLOUT, EpisodeEnd, Evaluation
from tests.support.evaluations import scenario_of


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
    # Two-sided: twice the share that is as large, the observed one counted.
    assert 0 < permutation_p_value(certain, scenario_of, permutations=2_500) == pytest.approx(2 / 2_501)


def test_a_single_scenario_is_no_evidence() -> None:
    for found in ({"a_1": 1.0}, {"a_1": 1.0, "a_2": 0.5, "a_3": 0.25}):
        assert permutation_p_value(found, scenario_of) == brute_p_value(found) == 1.0


def test_no_difference_at_all_is_no_evidence() -> None:
    assert permutation_p_value({f"{n}_1": 0.0 for n in range(5)}, scenario_of) == 1.0
    with pytest.raises(ValueError, match="no differences"):
        permutation_p_value({}, scenario_of)


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


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_is_the_closed_test_by_bonferroni(p_values: list[float]) -> None:
    assert holm(p_values) == pytest.approx(closed_testing(p_values))


def evaluated(seed: int, chance: float, *, scenarios: int = 20, lost: float = 0.0, longer: int = 0) -> list[Evaluation]:
    """Three runs of three tasks a scenario; of those that would be failures a share was lost instead."""
    random = np.random.default_rng(seed)
    found = []
    for run, scenario, task in itertools.product(range(3), range(scenarios), (1, 2, 3)):
        gone = bool(random.random() < lost)
        found.append(
            Evaluation(
                task_id=f"{scenario}_{task}",
                run=run,
                success=bool(random.random() < chance) and not gone,
                passed_tests=0,
                total_tests=1,
                turns=0 if gone else int(random.integers(3, 9)) + longer,
                ended=EpisodeEnd.SERVER_ERROR if gone else EpisodeEnd.FINISHED,
                failures=(LOST_ROLLOUT,) if gone else (),
            )
        )
    return found


def test_the_difference_is_of_means_and_needs_the_same_tasks() -> None:
    one, other = (
        pass_k_measure([[evaluated(seed, chance)]], 3, scenarios=True) for seed, chance in ((1, 0.8), (2, 0.5))
    )
    interval, p_value = difference(one, other)
    assert interval.mean == pytest.approx(one.mean - other.mean)
    assert 0 < interval.low <= interval.mean <= interval.high
    assert p_value < 0.01
    fewer = pass_k_measure([[evaluated(2, 0.5, scenarios=19)]], 3, scenarios=True)
    with pytest.raises(ValueError, match="3 tasks are in only one of the two"):
        difference(one, fewer)


def test_lost_rollouts_bound_a_rate_and_cannot_make_a_difference() -> None:
    """Two equal policies, one of which lost a fifth of its rollouts: as failures they would be significant."""
    whole, short = ([[evaluated(seed, 0.6, lost=lost)]] for seed, lost in ((1, 0.0), (2, 0.2)))
    one, other = (pass_k_measure(seeds, 3, scenarios=True) for seeds in (whole, short))
    assert other.at_worst.mean < 0.53 < 0.6 < other.at_best.mean
    bounds = other.interval()
    assert bounds.low < other.at_worst.mean < other.at_best.mean < bounds.high
    hidden = pass_k_measure([[[replace(each, failures=()) for each in short[0][0]]]], 3, scenarios=True)
    assert difference(one, hidden)[1] < 0.02
    interval, p_value = difference(one, other)
    assert p_value == 1.0
    assert interval.low < 0 < interval.high
    # A difference that no loss explains stays one, and its p is the worst there could be.
    better = pass_k_measure([[evaluated(3, 1.0)]], 3, scenarios=True)
    assert difference(better, hidden)[1] <= difference(better, other)[1] < 0.05


def test_several_seeds_need_more_than_one_lucky_seed() -> None:
    """A gain of three equal seeds is evidence about training; a larger one that is of one of three seeds is not."""
    base = [[evaluated(seed, 0.5)] for seed in (1, 2, 3)]
    steady = [[evaluated(seed, 0.7)] for seed in (4, 5, 6)]
    lucky = [[evaluated(seed, chance)] for seed, chance in ((7, 1.0), (8, 0.55), (9, 0.55))]
    other, one, mixed = (pass_k_measure(seeds, 3, scenarios=True) for seeds in (base, steady, lucky))
    assert mixed.mean > one.mean > other.mean + 0.1
    assert difference(one, other)[1] < 0.05
    interval, p_value = difference(mixed, other)
    assert p_value > 0.1
    assert interval.low < 0
    pooled = pass_k_measure([[each for seed in lucky for each in seed]], 3, scenarios=True)
    assert difference(pooled, pass_k_measure([[each for seed in base for each in seed]], 3, scenarios=True))[1] < 0.001


def test_turns_are_compared_on_tasks_that_both_played() -> None:
    one, other = turns([[evaluated(1, 0.5, longer=2)]]), turns([[evaluated(2, 0.5, lost=0.7)]])
    assert one is not None
    assert other is not None
    assert len(other.failed[0]) < len(one.failed[0])
    interval, p_value = difference(one, other)
    assert interval.low < interval.mean < interval.high
    assert interval.mean == pytest.approx(2.0, abs=0.6)
    assert p_value < 0.01
    assert turns([[evaluated(1, 0.5, lost=1.0)]]) is None

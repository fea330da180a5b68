"""pass^k and pass@k against counting every k-subset of the runs; intervals against what resampling must give."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.lab.evaluation.measures import mean_by_key, pass_at_k, pass_hat_k, pass_k_by_task
from draco_ray.records import EpisodeEnd, Evaluation
from draco_ray.runs.evaluations import scenario_goal_completion, task_goal_completion
from tests.support.evaluations import scenario_of

RUNS = 3
fuzz = settings(max_examples=50, deadline=None)


def evaluation(task_id: str, run: int, success: bool) -> Evaluation:
    return Evaluation(
        task_id=task_id,
        run=run,
        success=success,
        passed_tests=int(success),
        total_tests=1,
        turns=3,
        ended=EpisodeEnd.FINISHED,
        scenario=scenario_of(task_id),
    )


# Outcomes of three runs of up to four scenarios with one to three tasks each.
tables = st.dictionaries(
    st.builds("{}_{}".format, st.sampled_from("abcd"), st.integers(1, 3)),
    st.lists(st.booleans(), min_size=RUNS, max_size=RUNS),
    min_size=1,
)


def evaluations(table: dict[str, list[bool]]) -> list[Evaluation]:
    return [evaluation(task, run, success) for task, runs in table.items() for run, success in enumerate(runs)]


@fuzz
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_both_estimators_count_the_subsets_of_the_runs(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(combinations(outcomes, k))
    assert pass_hat_k(sum(outcomes), len(outcomes), k) == pytest.approx(sum(map(all, subsets)) / len(subsets))
    assert pass_at_k(sum(outcomes), len(outcomes), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
def test_both_estimators_are_unbiased(p: float, k: int) -> None:
    runs = 6
    chance = [math.comb(runs, c) * p**c * (1 - p) ** (runs - c) for c in range(runs + 1)]
    expected_all = sum(weight * pass_hat_k(c, runs, k) for c, weight in enumerate(chance))
    expected_any = sum(weight * pass_at_k(c, runs, k) for c, weight in enumerate(chance))
    assert expected_all == pytest.approx(p**k)
    assert expected_any == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("c", "n", "k"), [(4, 3, 1), (-1, 3, 1), (1, 3, 0), (1, 3, 4), (0, 0, 1)])
def test_impossible_counts_are_refused(c: int, n: int, k: int) -> None:
    for estimator in (pass_hat_k, pass_at_k):
        with pytest.raises(ValueError, match="runs"):
            estimator(c, n, k)


@fuzz
@given(tables, st.integers(1, RUNS))
def test_goals_at_k_count_the_subsets_of_the_runs(table: dict[str, list[bool]], k: int) -> None:
    subsets = list(combinations(range(RUNS), k))
    tasks, scenarios = (
        pass_k_by_task(evaluations(table), RUNS, k),
        pass_k_by_task(evaluations(table), RUNS, k, whole=True),
    )
    for task, outcomes in table.items():
        expected = np.mean([all(outcomes[run] for run in subset) for subset in subsets])
        assert tasks[task] == pytest.approx(expected)
    for scenario in {scenario_of(task) for task in table}:
        members = [outcomes for task, outcomes in table.items() if scenario_of(task) == scenario]
        # Every task of the scenario, in every one of the k runs.
        expected = np.mean([all(outcomes[run] for outcomes in members for run in subset) for subset in subsets])
        assert scenarios[scenario] == pytest.approx(expected)


@fuzz
@given(tables)
def test_at_one_they_are_the_plain_goals(table: dict[str, list[bool]]) -> None:
    listed = evaluations(table)
    assert np.mean(list(pass_k_by_task(listed, RUNS, 1).values())) == pytest.approx(task_goal_completion(listed))
    assert np.mean(list(pass_k_by_task(listed, RUNS, 1, whole=True).values())) == pytest.approx(
        scenario_goal_completion(listed)
    )
    assert pass_k_by_task(listed, RUNS, 1) == pass_k_by_task(listed, RUNS, 1, pass_at_k)


@fuzz
@given(tables, st.data())
def test_consistency_falls_and_discovery_rises_with_k(table: dict[str, list[bool]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, RUNS - 1))
    for whole in (False, True):
        for key, value in pass_k_by_task(evaluations(table), RUNS, k, whole=whole).items():
            assert pass_k_by_task(evaluations(table), RUNS, k + 1, whole=whole)[key] <= value + 1e-12
        for key, value in pass_k_by_task(evaluations(table), RUNS, k, pass_at_k, whole=whole).items():
            assert pass_k_by_task(evaluations(table), RUNS, k + 1, pass_at_k, whole=whole)[key] >= value - 1e-12


def test_a_missing_run_is_a_failure_and_a_doubled_one_an_error() -> None:
    listed = [evaluation("a_1", 0, True), evaluation("a_1", 2, True)]
    assert pass_k_by_task(listed, RUNS, 1) == {"a_1": pytest.approx(2 / 3)}
    assert pass_k_by_task(listed, RUNS, 3) == {"a_1": 0.0}
    with pytest.raises(ValueError, match="a_1: run 2"):
        pass_k_by_task([*listed, listed[1]], RUNS, 1)
    with pytest.raises(ValueError, match="a_1: run 2"):
        pass_k_by_task(listed, 2, 1)


def test_measurements_of_several_seeds_are_averaged_by_task() -> None:
    assert mean_by_key([{"a": 1.0, "b": 0.0}, {"b": 1.0, "a": 1.0}]) == {"a": 1.0, "b": 0.5}
    with pytest.raises(ValueError, match="of different tasks"):
        mean_by_key([{"a": 1.0}, {"b": 1.0}])

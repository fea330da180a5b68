"""Intervals: where they are exact, never of zero width, and how often they hold a truth that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from draco_ray.lab.evaluation.intervals import (
    bounded_limits,
    clustered_mean,
    mean_difference,
    mean_interval,
    rate_difference,
    rate_interval,
    satterthwaite,
    student_p_value,
)
from tests.support.evaluations import scenario_of
from tests.support.jobs import load_job

fuzz = settings(deadline=None)
shares = st.dictionaries(
    st.builds("{}_{}".format, st.integers(0, 7), st.integers(1, 3)),
    st.sampled_from([0.0, 1 / 3, 2 / 3, 1.0]),
    min_size=1,
)


def values(scenarios: int, value: float) -> dict[str, float]:
    return {f"{scenario}_{task}": value for scenario in range(scenarios) for task in (1, 2, 3)}


@pytest.mark.parametrize("scenarios", [2, 15, 56, 139])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_none_and_all_of_n_scenarios_have_clopper_and_pearsons_bounds(scenarios: int, value: float) -> None:
    found = rate_interval(clustered_mean([values(scenarios, value)], scenario_of))
    exact = binomtest(round(scenarios * value), scenarios).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert found.high - found.low > 0.02


@fuzz
@given(st.lists(shares, min_size=1, max_size=1) | st.tuples(shares).map(lambda one: [one[0], one[0]]))
def test_an_interval_of_a_rate_holds_its_mean_within_0_and_1_and_has_a_width(seeds: list[dict[str, float]]) -> None:
    measured = clustered_mean(seeds, scenario_of, trials=9 * len(seeds[0]))
    found = rate_interval(measured)
    assert found.mean == pytest.approx(np.mean(list(seeds[0].values())))
    if measured.clusters < 2:
        assert (found.low, found.high) == (-math.inf, math.inf)
        return
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.high - found.low > 0.01


@fuzz
@given(shares, st.data())
def test_an_interval_of_a_difference_holds_it_and_has_a_width(one: dict[str, float], data: st.DataObject) -> None:
    other = data.draw(
        st.one_of(st.just(one), st.fixed_dictionaries({task: st.sampled_from([0.0, 1.0]) for task in one}))
    )
    first, second = (clustered_mean([each], scenario_of) for each in (one, other))
    found, turned = rate_difference(first, second), rate_difference(second, first)
    if first.clusters < 2:
        assert found.low == -math.inf
        return
    assert -1 <= found.low <= found.mean <= found.high <= 1
    assert found.high - found.low > 0.01
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))


def test_independent_trials_have_the_binomial_interval() -> None:
    """One task a scenario, so that nothing is shared: Clopper and Pearson's, a little wider by Student's quantile."""
    solved = {f"{number}_1": float(number < 40) for number in range(100)}
    found = rate_interval(clustered_mean([solved], scenario_of))
    exact = binomtest(40, 100).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=0.005)
    assert found.low < exact.low
    assert found.high > exact.high


def test_tasks_of_a_scenario_are_no_independent_evidence() -> None:
    random = np.random.default_rng(0)
    alike = {f"{number}_{task}": value for number, value in enumerate(random.random(40).round()) for task in (1, 2, 3)}
    together, apart = (rate_interval(clustered_mean([alike], cluster)) for cluster in (scenario_of, str))
    assert together.high - together.low == pytest.approx(math.sqrt(3) * (apart.high - apart.low), rel=0.1)


def test_a_cluster_counts_by_its_size() -> None:
    uneven = {"a_1": 0.0, "b_1": 1.0, "b_2": 1.0, "b_3": 1.0}
    measured = clustered_mean([uneven], scenario_of)
    assert measured.mean == 0.75
    # The ratio estimator's residuals: (0 - 0.75) / 2 and (3 - 2.25) / 2.
    assert measured.influence == pytest.approx({"a": -0.375, "b": 0.375})
    assert measured.cluster_variance == pytest.approx(2 * 0.375**2 / 2)


def test_training_seeds_are_a_level() -> None:
    """The same scenarios solved by one seed and not by the other: no number of scenarios makes that sure."""
    one, other = ({f"{number}_1": value for number in range(200)} for value in (0.9, 0.3))
    alone = clustered_mean([dict.fromkeys(one, 0.6)], scenario_of, trials=600)
    both = clustered_mean([one, other], scenario_of, trials=1200)
    assert both.mean == pytest.approx(alone.mean)
    assert both.variance == pytest.approx(0.3**2)
    assert both.degrees == pytest.approx(1.0)
    narrow, wide = rate_interval(alone), rate_interval(both)
    assert narrow.high - narrow.low < 0.15
    assert wide.high - wide.low > 0.9
    with pytest.raises(ValueError, match="measured on different tasks"):
        clustered_mean([one, {"0_1": 1.0}], scenario_of)


def test_means_without_bounds_have_students_interval() -> None:
    random = np.random.default_rng(3)
    value_S = random.normal(8, 2, 30)
    turns = clustered_mean([{f"{number}_1": float(value) for number, value in enumerate(value_S)}], scenario_of)
    found = mean_interval(turns)
    exact = t.interval(0.95, 29, value_S.mean(), value_S.std(ddof=1) / math.sqrt(30))
    assert (found.low, found.high) == pytest.approx(exact)
    longer = clustered_mean([{f"{number}_1": float(value) + 1 for number, value in enumerate(value_S)}], scenario_of)
    assert mean_difference(longer, turns).mean == pytest.approx(1.0)
    # No two scenarios differ: nothing is known of the spread, and none is claimed.
    assert mean_difference(longer, turns).low == -math.inf
    assert mean_interval(clustered_mean([values(5, 7.0)], scenario_of)).high == math.inf


def test_what_is_not_paired_is_refused() -> None:
    one, other = clustered_mean([values(4, 0.5)], scenario_of), clustered_mean([values(5, 0.5)], scenario_of)
    for compare in (rate_difference, mean_difference):
        with pytest.raises(ValueError, match="measured on different scenarios"):
            compare(one, other)
    with pytest.raises(ValueError, match="no values"):
        clustered_mean([{}], scenario_of)


def test_bounds_other_than_0_and_1() -> None:
    low, high = bounded_limits(0.2, 0.01, clusters=20, bounds=(-1.0, 1.0))
    halved = bounded_limits(0.6, 0.0025, clusters=20)
    assert (low, high) == pytest.approx(tuple(2 * bound - 1 for bound in halved))
    assert bounded_limits(1.0, 0.0, clusters=20, bounds=(-1.0, 1.0))[0] == pytest.approx(2 * 0.025 ** (1 / 20) - 1)


def test_degrees_of_freedom_and_students_p_value() -> None:
    assert satterthwaite([(2.0, 14), (0.0, 0)]) == pytest.approx(14)
    assert satterthwaite([(1.0, 10), (1.0, 10)]) == pytest.approx(20)
    assert satterthwaite([(1.0, 138), (1e6, 1)]) == pytest.approx(1, rel=1e-4)
    assert student_p_value(2.0, 1.0, 10) == pytest.approx(2 * t.sf(2, 10))
    assert student_p_value(2.0, 0.0, 10) == 1.0


HELD = 300
"""Simulated evaluations; a true coverage of 95 % gives at least 91.5 % of them all but once in 200 times."""


@pytest.mark.parametrize("design", ["seldom", "half, alike", "nearly always"])
@pytest.mark.parametrize("scenarios", [15, 56])
def test_intervals_hold_the_truth_at_15_and_56_scenarios(design: str, scenarios: int) -> None:
    bench = load_job("bench_intervals")
    [population] = [each for each in bench.DESIGNS if each.name == design]
    random = np.random.default_rng(5)
    for _, k, whole in bench.METRICS:
        truth = bench.truth_of(population, k, whole)
        held = []
        for _ in range(HELD // len(bench.METRICS)):
            outcome = bench.play(random, population, bench.population(random, population, scenarios))
            found = rate_interval(bench.mean_of(bench.values(outcome, k, whole), population))
            held.append(found.low <= truth <= found.high)
        assert np.mean(held) > 0.9


def test_the_bench_prints_every_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_job("bench_intervals")
    monkeypatch.setattr(bench, "SCENARIOS", (15,))
    monkeypatch.setattr(bench, "TRUTH", 400)
    bench.main(repeats=2, only=None)
    printed = capsys.readouterr().out
    assert printed.count("### ") == 7
    assert len([line for line in printed.splitlines() if "| 15 scenarios |" in line or "| 15 groups |" in line]) == 6
    lines = [line for line in printed.splitlines() if line.startswith("| 15 |")]
    assert len(lines) == 4 * len(bench.DESIGNS) + 4 * len(bench.PAIRS) + 2 * 3 * len(bench.SEEDED) + 4 * 3
    assert all("(" in line.split("|")[-2] for line in lines)

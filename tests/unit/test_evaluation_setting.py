"""One setting on one split, against plain loops over its rollouts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import mean, stdev

import pytest

from draco_ray.lab.evaluation.results import RolloutResult
from draco_ray.lab.evaluation.setting import aggregate
from draco_ray.records import LOST_ROLLOUT, Termination
from tests.support.evaluations import SCENARIOS, TASKS, a_plan, a_result, measurement

PLAN = a_plan(measurements=("step00005", "step00010", "step00015"))
MEASURED = [measurement(PLAN, seed, chance) for seed, chance in enumerate((0.55, 0.7, 0.85))]


def solved(results: list[RolloutResult], task: str, run: int) -> bool:
    (found,) = [each for each in results if (each.evaluation.task_id, each.evaluation.run) == (task, run)]
    return found.evaluation.success


def brute(results: list[RolloutResult], groups: list[list[str]], k: int, joint: bool) -> float:
    """Mean over groups and k-subsets of runs: all (pass^k) or any (pass@k) of the runs solve the whole group."""
    combine = all if joint else any
    values = [
        combine(all(solved(results, task, run) for task in group) for run in runs)
        for group in groups
        for runs in itertools.combinations(range(PLAN.runs), k)
    ]
    return mean(values)


EACH_TASK = [[task] for task in TASKS]
EACH_SCENARIO = [[f"{scenario}_{number}" for number in (1, 2, 3)] for scenario in SCENARIOS]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_rates_are_means_over_checkpoints_with_their_spread(k: int) -> None:
    result = aggregate(PLAN, [MEASURED])
    for estimates, groups, joint in (
        (result.tgc, EACH_TASK, True),
        (result.sgc, EACH_SCENARIO, True),
        (result.tgc_at, EACH_TASK, False),
        (result.sgc_at, EACH_SCENARIO, False),
    ):
        each = [brute(results, groups, k, joint) for results in MEASURED]
        assert estimates[k - 1].mean == pytest.approx(mean(each))
        assert estimates[k - 1].std == pytest.approx(stdev(each))
        low, high = estimates[k - 1].low, estimates[k - 1].high
        assert low is not None
        assert high is not None
        assert low <= mean(each) <= high


def test_one_checkpoint_has_its_spread_across_runs_where_a_run_has_a_value() -> None:
    plan = a_plan()
    results = MEASURED[0]
    result = aggregate(plan, [[results]])
    per_run = [mean(solved(results, task, run) for task in TASKS) for run in range(3)]
    assert result.tgc[0].std == pytest.approx(stdev(per_run))
    assert result.tgc[1].std is None
    assert result.sgc[2].std is None
    turns = [
        [r.evaluation.turns for r in results if r.evaluation.run == run and r.evaluation.turns] for run in range(3)
    ]
    assert result.turns is not None
    assert result.turns.std == pytest.approx(stdev([mean(of_one) for of_one in turns]))
    once = aggregate(a_plan(runs=1), [[[r for r in results if r.evaluation.run == 0]]])
    assert once.tgc[0].std is None
    assert len(once.tgc) == 1


def test_each_difficulty_has_its_own_denominator() -> None:
    result = aggregate(PLAN, [MEASURED])
    for level in (1, 2, 3):
        tasks = [task for task, difficulty in TASKS.items() if difficulty == level]
        inside = [group for group in EACH_SCENARIO if group[0] in tasks]
        stratum = result.difficulty[level]
        assert stratum.tasks == len(tasks)
        assert stratum.tgc.mean == pytest.approx(
            mean(brute(results, [[task] for task in tasks], 1, True) for results in MEASURED)
        )
        assert stratum.sgc is not None
        assert stratum.sgc.mean == pytest.approx(mean(brute(results, inside, 1, True) for results in MEASURED))


def test_turns_leave_out_what_never_began_and_costs_are_of_one_pass() -> None:
    plan = a_plan(tasks={"a_1": 1, "a_2": None}, runs=2)
    results = [
        a_result("a_1", 0, True, turns=4),
        a_result("a_2", 0, False, turns=0, dollars=0.05),
        a_result("a_1", 1, True, turns=8),
        a_result("a_2", 1, False, turns=6),
    ]
    result = aggregate(plan, [[results]])
    assert result.turns is not None
    assert result.turns.mean == pytest.approx(6.0)
    assert result.usage.dollars == pytest.approx(0.4)
    assert result.dollars_per_task == pytest.approx(0.2)
    assert result.usage.input_tokens == 900
    assert result.terminations is not None
    assert result.terminations[Termination.SERVER_ERROR] == pytest.approx(0.25)
    assert sum(result.terminations.values()) == pytest.approx(1.0)
    assert list(result.difficulty) == [1]
    assert result.measures["TGC p^1"].failed == ({"a_1": 1.0, "a_2": 0.0},)


def test_a_benchmark_without_scenarios_has_a_rate_per_task_only() -> None:
    plan = a_plan(scenarios=False, tasks={"task_1": None, "task_2": None}, runs=1)
    result = aggregate(plan, [[[a_result("task_1", 0, True), a_result("task_2", 0, False)]]])
    assert result.sgc == ()
    assert result.tgc[0].mean == pytest.approx(0.5)
    assert result.clusters == 2
    assert list(result.measures) == ["SR p^1", "turns"]


def test_one_scenario_has_no_interval() -> None:
    plan = a_plan(tasks={"a_1": 1, "a_2": 1}, runs=1)
    result = aggregate(plan, [[[a_result("a_1", 0, True), a_result("a_2", 0, False)]]])
    assert result.tgc[0].low is None
    assert result.tgc[0].high is None


def test_several_seeds_are_averaged_with_the_spread_across_them() -> None:
    seeds = [MEASURED, [measurement(PLAN, 10 + seed, 0.4) for seed in range(3)]]
    result = aggregate(PLAN, seeds)
    each = [mean(brute(results, EACH_TASK, 3, True) for results in seed) for seed in seeds]
    assert result.tgc[2].mean == pytest.approx(mean(each))
    assert result.tgc[2].std == pytest.approx(stdev(each))
    assert (result.seeds, result.rollouts) == (2, 2 * 3 * 3 * len(TASKS))
    one = aggregate(PLAN, [MEASURED])
    assert result.tgc[0].low is not None
    assert one.tgc[0].low is not None
    assert result.tgc[0].high is not None
    assert one.tgc[0].high is not None
    assert result.tgc[0].high - result.tgc[0].low > one.tgc[0].high - one.tgc[0].low
    assert result.usage.dollars == pytest.approx(one.usage.dollars, rel=0.2)


def test_lost_rollouts_are_counted_and_bound_every_rate() -> None:
    def gone(result: RolloutResult) -> RolloutResult:
        return replace(
            result, evaluation=replace(result.evaluation, success=False, failures=(LOST_ROLLOUT,)), error="crashed"
        )

    plan = a_plan()
    whole = measurement(plan, 1, 0.9)
    short = [gone(each) if number % 6 == 0 else each for number, each in enumerate(whole)]
    result, hidden = (
        aggregate(plan, [[short]]),
        aggregate(plan, [[[replace(each, evaluation=replace(each.evaluation, failures=())) for each in short]]]),
    )
    assert (result.lost, result.rollouts, hidden.lost) == (12, 72, 0)
    for rates, others in ((result.tgc, hidden.tgc), (result.sgc, hidden.sgc), (result.sgc_at, hidden.sgc_at)):
        for rate, other in zip(rates, others, strict=True):
            assert (rate.mean, rate.low) == (other.mean, other.low)
            assert rate.high is not None
            assert other.high is not None
            assert rate.high >= other.high
    assert result.tgc[0].high is not None
    assert result.tgc[0].high > 0.95 > (hidden.tgc[0].high or 0)

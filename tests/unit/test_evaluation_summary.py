"""Rows of the result table, against means over plain loops."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig
from draco_ray.lab.evaluation.measures import comparison_measures, differences, pass_k_measure
from draco_ray.lab.evaluation.setting import describe_gain, describe_run_gain
from draco_ray.records import LOST_ROLLOUT, EpisodeEnd, Evaluation, Task, lost_evaluation
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore

TASKS = [f"{scenario}_{number}" for scenario in "abcdef" for number in (1, 2)]
RUNS = 3


def measurement(seed: int, chance: float) -> list[Evaluation]:
    random = np.random.default_rng(seed)
    return [
        Evaluation(
            task_id=task,
            run=run,
            success=bool(random.random() < chance),
            passed_tests=0,
            total_tests=1,
            turns=int(random.integers(1, 9)),
            ended=EpisodeEnd.FINISHED,
            scenario=task[0],
        )
        for run in range(RUNS)
        for task in TASKS
    ]


def test_rates_are_means_over_seeds_and_intervals_hold_them() -> None:
    seeds = [measurement(seed, 0.7) for seed in range(4)]
    apart = [[seed] for seed in seeds]
    tgc = [pass_k_measure(apart, RUNS, k, scenarios=True).interval() for k in (1, 2, 3)]
    sgc = [pass_k_measure(apart, RUNS, k, whole=True).interval() for k in (1, 2, 3)]
    assert tgc[0].mean == pytest.approx(np.mean([each.success for seed in seeds for each in seed]))
    all_three = [all(each.success for each in seed if each.task_id == task) for seed in seeds for task in TASKS]
    assert tgc[2].mean == pytest.approx(np.mean(all_three))
    scenarios = [
        all(each.success for each in seed if each.task_id[0] == scenario) for seed in seeds for scenario in "abcdef"
    ]
    assert sgc[2].mean == pytest.approx(np.mean(scenarios))
    for interval in (*tgc, *sgc):
        assert 0 <= interval.low <= interval.mean <= interval.high <= 1


def test_a_difference_is_paired_by_task_in_every_measure() -> None:
    better, worse = (comparison_measures([[measurement(*how)]], RUNS) for how in ((0, 1.0), (1, 0.0)))
    found = differences(better, worse)
    assert list(found) == ["TGC p^1", "TGC p^3", "SGC p^1", "SGC p^3", "turns"]
    for name in list(found)[:4]:
        interval, p_value = found[name]
        assert (interval.mean, interval.high) == (1.0, 1.0)
        # Six scenarios out of six cannot promise the next one.
        assert 0 < interval.low < 0.8
        assert p_value == pytest.approx(2 / 2**6)
    assert found["turns"][0].mean == pytest.approx(better["turns"].mean - worse["turns"].mean)
    same, p_value = differences(*[comparison_measures([[measurement(2, 0.5)]], RUNS)] * 2)["TGC p^1"]
    assert same.low < 0 == same.mean < same.high
    assert p_value == 1.0


def test_several_seeds_widen_the_interval() -> None:
    seeds = [measurement(seed, chance) for seed, chance in enumerate((0.95, 0.5, 0.1))]
    apart, pooled = (
        pass_k_measure(each, RUNS, scenarios=True).interval() for each in ([[seed] for seed in seeds], [seeds])
    )
    assert apart.mean == pytest.approx(pooled.mean)
    assert apart.high - apart.low > 2 * (pooled.high - pooled.low)


def test_what_does_not_belong_together_is_refused() -> None:
    whole, part = measurement(0, 0.5), [each for each in measurement(0, 0.5) if each.task_id != "a_1"]
    for apart in ([[whole], [part]], [[whole, part]]):
        with pytest.raises(ValueError, match="different tasks"):
            pass_k_measure(apart, RUNS, scenarios=True).interval()
    with pytest.raises(ValueError, match="1 tasks are in only one of the two"):
        differences(*(comparison_measures([[each]], RUNS) for each in (whole, part)))
    nothings: list[Any] = [[], [[]], [[[]]]]
    for nothing in nothings:
        with pytest.raises(ValueError, match="nothing was evaluated"):
            pass_k_measure(nothing, RUNS)


def test_the_gain_of_a_run_comes_with_its_intervals_its_losses_and_its_one_seed() -> None:
    before, after = measurement(0, 0.3), measurement(1, 0.8)
    said = describe_gain(before, after, RUNS)
    numbers = re.findall(r"\[(\S+), (\S+)\]", said)
    assert len(numbers) == 3
    low, high = map(float, numbers[2])
    gain = pass_k_measure([[after]], RUNS).mean - pass_k_measure([[before]], RUNS).mean
    assert 0 < low < 100 * gain < high
    assert said.startswith("95 % intervals over 6 scenarios: ")
    assert said.endswith("points; one training seed")
    gone = [replace(each, success=False, failures=(LOST_ROLLOUT,)) if each.run == 2 else each for each in after]
    with_losses = describe_gain(before, gone, RUNS)
    assert (
        "; 12 of 72 rollouts were lost: they count as failures, and the intervals cover every result they could have "
        "had; one training seed" in with_losses
    )
    wide_low, wide_high = map(float, re.findall(r"\[(\S+), (\S+)\]", with_losses)[2])
    assert wide_low < low
    assert wide_high > wide_low + 33
    alone = [each for each in before if each.task_id[0] == "a"]
    assert describe_gain(alone, alone, RUNS) == "only one scenario, so no interval"


def test_a_scenario_is_the_group_of_a_task_whatever_its_id() -> None:
    before, after = (
        [replace(each, scenario=each.task_id) for each in measurement(*how)] for how in ((0, 0.3), (1, 0.8))
    )
    assert describe_gain(before, after, RUNS).startswith("95 % intervals over 12 scenarios: ")
    before, after = ([replace(each, scenario=each.task_id[-1]) for each in side] for side in (before, after))
    assert describe_gain(before, after, RUNS).startswith("95 % intervals over 2 scenarios: ")
    alone, variant = Task(task_id="task_1", instruction="-"), Task(task_id="a", group="g", instruction="-")
    assert [lost_evaluation(task, 0).scenario for task in (alone, variant)] == ["task_1", "g"]


def test_a_run_says_its_gain_where_it_was_measured_before_and_after(tmp_path: Path) -> None:
    config = DracoConfig.model_validate({"data": {"root": tmp_path / "world"}})
    run = RunDirectory.create(tmp_path / "run", dump_config(config))
    store = RunStore(run)
    assert describe_run_gain(run) is None
    before, after = measurement(0, 0.3), measurement(1, 0.8)
    store.write("evaluations", 0, "dev", rows.evaluation_rows(0, "dev", before))
    assert describe_run_gain(run) is None
    store.write("evaluations", 5, "dev", rows.evaluation_rows(5, "dev", after))
    assert describe_run_gain(run) == f"on dev, {describe_gain(before, after, RUNS)}"
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "sandbox.json").write_text("{}")
    assert describe_run_gain(run) == f"on dev of a generated world, {describe_gain(before, after, RUNS)}"
    store.write("evaluations", 6, "dev", rows.evaluation_rows(6, "dev", after[:-1]))
    assert describe_run_gain(run) is None

"""Rows of the result table, against means over plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from draco_ray.lab.evaluation.summary import difference, summarise
from draco_ray.records import EpisodeEnd, Evaluation

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
        )
        for run in range(RUNS)
        for task in TASKS
    ]


def test_rates_are_means_over_seeds_and_intervals_hold_them() -> None:
    seeds = [measurement(seed, 0.7) for seed in range(4)]
    summary = summarise(seeds, RUNS)
    assert summary.tgc[0].mean == pytest.approx(np.mean([each.success for seed in seeds for each in seed]))
    all_three = [all(each.success for each in seed if each.task_id == task) for seed in seeds for task in TASKS]
    assert summary.tgc[2].mean == pytest.approx(np.mean(all_three))
    scenarios = [
        all(each.success for each in seed if each.task_id[0] == scenario) for seed in seeds for scenario in "abcdef"
    ]
    assert summary.sgc[2].mean == pytest.approx(np.mean(scenarios))
    assert summary.turns == pytest.approx(np.mean([each.turns for seed in seeds for each in seed]))
    for interval in (*summary.tgc, *summary.sgc):
        assert 0 <= interval.low <= interval.mean <= interval.high <= 1


def test_no_more_trials_than_runs() -> None:
    one_run = [each for each in measurement(0, 0.5) if each.run == 0]
    assert len(summarise([one_run], 1).tgc) == 1
    assert len(summarise([measurement(0, 0.5)], RUNS, most=2).sgc) == 2


def test_a_difference_is_paired_by_task() -> None:
    better, worse = summarise([measurement(0, 1.0)], RUNS), summarise([measurement(1, 0.0)], RUNS)
    assert difference(better, worse).low == difference(better, worse).high == 1.0
    same = difference(summarise([measurement(2, 0.5)], RUNS), summarise([measurement(2, 0.5)], RUNS))
    assert (same.low, same.mean, same.high) == (0, 0, 0)


def test_what_does_not_belong_together_is_refused() -> None:
    whole, part = measurement(0, 0.5), [each for each in measurement(0, 0.5) if each.task_id != "a_1"]
    with pytest.raises(ValueError, match="same tasks"):
        summarise([whole, part], RUNS)
    with pytest.raises(ValueError, match="same tasks"):
        difference(summarise([whole], RUNS), summarise([part], RUNS))
    with pytest.raises(ValueError, match="nothing was evaluated"):
        summarise([[]], RUNS)

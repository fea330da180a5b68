"""The judge's pass rate on held-out tasks, which stands in where nothing can be evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.lab.report.page import write_report
from draco_ray.lab.runs.show import show
from draco_ray.records import Criterion, Judged, JudgedRollout, ScoredCriterion, Task, Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import judged_rates, read_judged
from draco_ray.runs.store_actor import RunStoreActor
from tests.support.small_run import small_run

PASS, FAIL, NOT = (int(verdict) for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.NOT_APPLICABLE))


def rollout(task: str, *verdicts: int, again: tuple[int, ...] = (), scenario: str = "") -> JudgedRollout:
    return JudgedRollout(task_id=task, run=0, scenario=scenario, verdicts=verdicts, again=again)


def test_the_rate_is_the_mean_over_rollouts_of_their_share_of_passes() -> None:
    rates = judged_rates([rollout("a", PASS, FAIL, NOT), rollout("b", PASS), rollout("c", NOT)])
    assert rates.pass_rate is not None
    assert rates.pass_rate.mean == pytest.approx((0.5 + 1.0) / 2)
    assert (rates.tasks, rates.rollouts, rates.unscored) == (3, 3, 0)


def test_what_was_not_scored_is_in_no_rate_and_is_counted() -> None:
    lost = replace(rollout("b"), error="the rollout was lost")
    rates = judged_rates([rollout("a", PASS), lost])
    assert rates.pass_rate is not None
    assert (rates.pass_rate.mean, rates.unscored) == (1.0, 1)
    # Of one task nothing can be said of others.
    assert rates.pass_rate.low is None
    assert "1 rollouts without verdicts are left out" in str(rates)
    assert str(judged_rates([lost])).startswith("judge's pass rate unknown (a stand-in, because there is no evaluator)")


def test_agreement_is_over_both_scorings_of_a_rollout() -> None:
    rates = judged_rates([rollout("a", PASS, FAIL, again=(PASS, PASS)), rollout("b", PASS, again=(PASS,))])
    assert rates.agreement is not None
    assert rates.agreement.mean == pytest.approx(0.75)
    assert judged_rates([rollout("a", PASS)]).agreement is None


@given(st.lists(st.lists(st.sampled_from([PASS, FAIL]), min_size=1, max_size=4), min_size=2, max_size=12))
def test_the_interval_holds_its_rate_and_stays_a_share(found: list[list[int]]) -> None:
    share = judged_rates([rollout(f"t{index}", *verdicts) for index, verdicts in enumerate(found)]).pass_rate
    assert share is not None
    assert share.low is not None
    assert share.high is not None
    assert 0 <= share.low <= share.mean + 1e-9
    assert share.mean - 1e-9 <= share.high <= 1


def test_tasks_of_a_scenario_are_drawn_together() -> None:
    verdicts = np.random.default_rng(1).choice([PASS, FAIL], 24)
    alone = judged_rates([rollout(f"t{index}", int(verdict)) for index, verdict in enumerate(verdicts)])
    copied = judged_rates(
        [
            rollout(f"t{index}", int(verdict), scenario=f"s{index // 4}")
            for index, verdict in enumerate(np.sort(verdicts))
        ]
    )
    assert alone.pass_rate is not None
    assert copied.pass_rate is not None
    widths = [(share.high or 0) - (share.low or 0) for share in (alone.pass_rate, copied.pass_rate)]
    assert widths[1] > 1.5 * widths[0]


def test_what_is_kept_is_shown_and_called_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    kept = RunStoreActor(run.path)
    rubric: Judged[Any] = Judged(value=(Criterion(title="Polite", description="-", evaluator_instruction="-"),))
    passed: Judged[Any] = Judged(value=(ScoredCriterion(verdict=Verdict.PASS),))
    failed: Judged[Any] = Judged(value=(ScoredCriterion(verdict=Verdict.FAIL),))
    tasks = [Task(task_id=name, instruction="-") for name in ("x", "y", "z")]
    kept.heldout(0, "dev", tasks[0], 0, rubric, passed, failed)
    kept.heldout(0, "dev", tasks[1], 0, rubric, failed, failed)
    assert kept.heldout(0, "dev", tasks[2], 0, rubric).error == "the rollout was lost"
    unscored = kept.heldout(1, "dev", tasks[0], 0, Judged(value=None, error="no rubric"), Judged(value=()), None)
    assert unscored.error == "no rubric"
    (before, after) = read_judged(RunDirectory.open(run.path)).items()
    assert (before[0], [each.verdicts for each in before[1]]) == ((0, "dev"), [(PASS,), (FAIL,), ()])
    assert after[0] == (1, "dev")
    show(run.path)
    said = capsys.readouterr().out
    assert "after step 0: on dev: judge's pass rate 50.0 % [" in said
    assert "a stand-in, because there is no evaluator" in said
    page = tmp_path / "page.html"
    write_report(RunDirectory.open(run.path), page)
    assert "judge&#39;s pass rate on dev, before and after step 1" in page.read_text(encoding="utf-8")

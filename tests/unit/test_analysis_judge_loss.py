"""What training would lose with another judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draco_ray.lab.analysis.judge_loss import judge_loss
from draco_ray.lab.analysis.replay import REPLAYED_SCHEMA
from tests.support.small_run import small_run


def row(task: str, rollout: int, criterion: int, reference: int, verdict: int | None, **more: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "judge": "cheap",
        "training_step": 1,
        "task_id": task,
        "rollout": rollout,
        "phase": "score",
        "criterion": criterion,
        "title": "t",
        "reference": reference,
        "verdict": verdict,
        "reference_steps": [],
        "steps": [],
        "dollars": 0.01,
        "error": None,
        **more,
    }


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=REPLAYED_SCHEMA)


def test_verdicts_that_agree_lose_nothing_and_those_that_are_turned_round_all(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    same = [row("a", r, k, v, v) for r, k, v in ((0, 0, 1), (0, 1, 1), (1, 0, -1), (1, 1, 1))]
    (kept,) = judge_loss(run, table(*same)).to_pylist()
    assert (kept["groups"], kept["rollouts"]) == (1, 2)
    assert kept["advantage_correlation"] == pytest.approx(1.0)
    assert (kept["sign_flips"], kept["best_kept"], kept["signal_lost"]) == (0.0, 1.0, 0.0)
    assert kept["dollars"] == pytest.approx(0.04)
    turned = [row("a", 0, 0, 1, -1), row("a", 1, 0, -1, 1)]
    (lost,) = judge_loss(run, table(*turned)).to_pylist()
    assert lost["advantage_correlation"] == pytest.approx(-1.0)
    assert (lost["sign_flips"], lost["best_kept"], lost["signal_lost"]) == (1.0, 0.0, 0.0)
    blind = [row("a", 0, 0, 1, 1), row("a", 1, 0, -1, 1)]
    (none,) = judge_loss(run, table(*blind)).to_pylist()
    assert (none["advantage_correlation"], none["signal_lost"]) == (None, 1.0)


def test_what_the_other_judge_did_not_answer_is_left_out(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    found = judge_loss(run, table(row("a", 0, 0, 1, 1), row("a", 1, 0, -1, None), row("a", 2, 0, -1, -1)))
    assert found.to_pylist()[0]["rollouts"] == 2
    (alone,) = judge_loss(run, table(row("a", 0, 0, 1, 1), row("a", 1, 0, -1, None))).to_pylist()
    assert (alone["groups"], alone["best_kept"]) == (0, None)


def test_the_cost_beside_is_that_of_the_same_prompts(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    calls = run.table("judge_calls", columns=["training_step", "task_id", "rollout", "phase", "dollars"]).to_pylist()
    scored = next(call for call in calls if call["phase"] == "score")
    (found,) = judge_loss(run, table(row(scored["task_id"], scored["rollout"], 0, 1, 1))).to_pylist()
    key = ("training_step", "task_id", "rollout", "phase")
    of_it = [call["dollars"] for call in calls if [call[k] for k in key] == [scored[k] for k in key]]
    assert found["own_dollars"] == pytest.approx(sum(of_it)) == pytest.approx(0.02 * len(of_it))

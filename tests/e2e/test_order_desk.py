"""A second environment, in one file outside the package, trains end to end: its tasks, its facts, its own judge.

The policy is written by hand (`tests.support.scripted_policy`) and the judge is a few rules behind a real HTTP server;
Ray, vLLM, the rollout workers, the judge pool and the learner are those of every run.
"""

from __future__ import annotations

import pytest

from draco_ray.runs.directory import RunDirectory
from tests.support.command import draco
from tests.support.order_desk_policy import EXAMPLE, arguments, build_order_desk_policy

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Two steps in the order desk, with an evaluation before and after: a run that begins and ends by itself."""
    root = tmp_path_factory.mktemp("order-desk")
    words = arguments(build_order_desk_policy(root / "policy"), root, "desk", "data.eval_tasks=3", "train.steps=2")
    result = draco(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the offline rule judge" in result.stdout
    assert "held-out TGC" in result.stdout
    tasks = len((EXAMPLE / "tasks" / "train.jsonl").read_text().splitlines())
    assert f"environment.py:OrderDesk, {tasks} training tasks" in result.stdout
    return RunDirectory.open(root / "desk")


def test_rollouts_are_of_this_environment(run: RunDirectory) -> None:
    steps = run.table("steps").to_pylist()
    seen = [step["observation"] for step in steps if step["observation"] is not None]
    assert any("A0" in text for text in seen)
    assert any(text == "sent" for text in seen)
    rows = run.table("trajectories").to_pylist()
    assert len(rows) == 2 * 2 * 6
    assert {row["termination"] for row in rows} <= {"finished", "no_action", "turn_limit", "response_limit"}
    assert any("order desk of a shop" in message["content"] for message in rows[0]["prompt"])


def test_the_judge_is_told_of_this_environment_alone(run: RunDirectory) -> None:
    calls = run.table("judge_calls").to_pylist()
    assert {call["phase"] for call in calls} == {"stage1", "stage2", "union", "score", "credit"}
    for call in calls:
        assert "only delivered orders are refunded" in call["prompt"]
        assert "complete_task" not in call["prompt"]
    assert "only delivered orders are refunded" in run.setting("judge.environment_facts")


def test_the_policy_is_updated_and_evaluated(run: RunDirectory) -> None:
    assert [line["updates"] for line in run.metrics()] == [1, 1]
    assert all(line["grad_norm"] > 0 for line in run.metrics())
    evaluations = run.table("evaluations").to_pylist()
    assert {row["training_step"] for row in evaluations} == {0, 2}
    assert {row["scenario"] for row in evaluations} == {"refund", "early", "ship"}
    # An evaluated rollout leaves its trajectory as a trained one does.
    kept = run.table("evaluation_trajectories").to_pylist()
    assert len(kept) == len(evaluations)
    assert run.table("evaluation_steps").num_rows >= len(kept)

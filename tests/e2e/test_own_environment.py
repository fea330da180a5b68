"""`draco new environment` writes a folder whose own test passes: `draco sft`, then a training step with its tools.

Ray, vLLM, the jail of the tools, the judge pool and the learner are those of every run; the policy is a tiny one that
knows the folder's demonstrations, and the judge is canned.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from draco_ray.runs.directory import RunDirectory
from tests.support.command import draco_here

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run that the test of a new environment leaves."""
    root = tmp_path_factory.mktemp("own")
    folder = root / "shop"
    written = draco_here("new", "environment", str(folder))
    assert written.returncode == 0, written.stderr
    # As users start it pytest finds the test, and has what it asks for.
    plan = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--setup-plan", str(folder)]
    planned = subprocess.run(plan, cwd=root, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "test_one_training_step (fixtures used: " in planned.stdout
    runpy.run_path(str(folder / "test_environment.py"))["test_one_training_step"](root)
    return RunDirectory.open(root / "test")


def test_steps_are_turns_with_calls_whose_results_came_back(run: RunDirectory) -> None:
    steps = [step for step in run.table("steps").to_pylist() if step["action"] is not None]
    assert any('"name": "sell"' in step["action"] for step in steps)
    seen = {step["observation"] for step in steps}
    assert seen & {"3 left", "1 left", "sold", "error: sell: ValueError: only 0 left"}
    (line,) = run.metrics()
    assert line["rollouts_lost"] == 0
    assert line["ended"].get("finished", 0) + line["ended"]["no_action"] > 0


def test_the_tools_are_in_the_prompt_and_in_what_the_judge_is_told(run: RunDirectory) -> None:
    rows = run.table("trajectories").to_pylist()
    assert len(rows) == 2 * 6
    assert [message["role"] for message in rows[0]["prompt"]] == ["tools", "system", "user"]
    calls = run.table("judge_calls").to_pylist()
    assert {"stage1", "score"} <= {call["phase"] for call in calls}
    for call in calls:
        assert "- Tool `sell(item: string, number?: integer)`: Sell some of an item." in call["prompt"]
        assert "What is not there cannot be sold." in call["prompt"]
        assert "[TOOLS" not in call["prompt"]
    # What is expected is for evaluations only.
    assert not any('"pen": 2' in call["prompt"] for call in calls)


def test_held_out_tasks_are_evaluated_by_the_folders_own_function(run: RunDirectory) -> None:
    rows = run.table("evaluations").to_pylist()
    assert {row["task_id"] for row in rows} == {"hat"}
    assert {row["total_tests"] for row in rows} == {1}


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    refused = draco_here("new", "environment", str(tmp_path))
    assert refused.returncode != 0
    assert "is not empty" in refused.stderr + refused.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

"""An agent on OpenAI's SDK, with a sub-agent, is trained one step through the endpoint of its rollout worker.

The policy is written by hand (`tests.support.desk_agent_policy`) and the judge is a few rules behind a real HTTP
server; the agent is the example's own program, and Ray, vLLM and the learner are those of every run.
"""

from __future__ import annotations

import pytest

from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_judged
from draco_ray.runs.rows import step_trajectories
from tests.conftest import REPOSITORY
from tests.support.command import draco
from tests.support.desk_agent_policy import build_desk_agent_policy

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

TASKS = """\
def rows():
    ask = {"split": "train", "instruction": "Please refund my lamp.", "state": "late", "expected": "refunded"}
    return [ask | {"id": 0}, ask | {"id": "dev", "split": "dev"}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One step of one task."""
    root = tmp_path_factory.mktemp("desk-agent")
    (root / "tasks.py").write_text(TASKS)
    result = draco(
        "train",
        str(REPOSITORY / "examples/desk_agent/desk_agent.yaml"),
        f"environment.options.tasks={root}/tasks.py:rows",
        f"model.path={build_desk_agent_policy(root / 'policy')}",
        f"run.root={root}",
        "run.name=desk",
        "train.steps=1",
        # Each rollout is a program that imports OpenAI's SDK.
        "train.prompts_per_step=1",
        "algorithm.group_size=4",
        "environment.options.evaluator=''",
        "train.evaluate_before_after=true",
        "learner.minibatch_prompts=1",
        "agent.max_prompt_length=1024",
        "ray.dashboard=false",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Nothing can be evaluated: the judge's pass rate stands in, and is called so.
    assert "has no evaluator: the judge's pass rate on held-out tasks stands in" in result.stdout
    assert "held-out judge's pass rate" in result.stdout
    assert "TGC" not in result.stdout
    return RunDirectory.open(root / "desk")


def test_the_branches_of_every_rollout_are_recorded_with_their_tokens(run: RunDirectory) -> None:
    played = [trajectory for group in step_trajectories(run, 1).values() for trajectory in group]
    assert len(played) == 4
    assert any(len(trajectory.branches) > 1 for trajectory in played)
    for trajectory in played:
        assert trajectory.turns[-1].role == "program"
        spoken = [turn for turn in trajectory.turns if turn.role == "assistant"]
        assert spoken
        assert {turn.policy_version for turn in spoken} == {0}
        assert sum(turn.last_token - turn.first_token for turn in spoken) == int(trajectory.sampled_T.sum())
        # A sub-agent's one turn answers a look-up, and is a step of its own branch.
        looked = [step for step in trajectory.steps if "look_up" in step.text]
        assert len([step for step in trajectory.steps if step.branch > 0]) >= min(1, len(looked))
        # What the agent's last call led to it has told nobody.
        answered = [step.observation for step in looked if step.observation is not None]
        assert all("came late. The policy desk says" in observation for observation in answered)
        assert len(answered) >= len(looked) - 1


def test_the_judge_sees_the_branches_by_name_and_the_policy_is_updated(run: RunDirectory) -> None:
    calls = run.table("judge_calls").to_pylist()
    assert {call["phase"] for call in calls} == {"stage1", "stage2", "union", "score", "credit"}
    assert any("(branch 2, step 2, message)" in call["prompt"] for call in calls if call["phase"] == "score")
    assert all("late are refunded, no others" in call["prompt"] for call in calls)
    (line,) = run.metrics()
    assert line["updates"] == 1
    assert line["grad_norm"] > 0


def test_held_out_tasks_are_judged_by_the_same_criteria_before_and_after(run: RunDirectory) -> None:
    (before, after) = read_judged(run).items()
    assert (before[0], after[0]) == ((0, "dev"), (1, "dev"))
    for _, rollouts in (before, after):
        assert [each.task_id for each in rollouts] == ["dev"]
        assert all(each.verdicts and len(each.again) == len(each.verdicts) for each in rollouts if each.error is None)
    assert any(each.error is None for each in (*before[1], *after[1]))
    rows = run.table("heldout_verdicts").to_pylist()
    assert len({tuple(row["criteria"]) for row in rows}) == 1
    # What was asked about them is none of a training step, and is paid for all the same.
    calls = run.table("heldout_calls").to_pylist()
    assert {call["phase"] for call in calls} == {"stage1", "score"}
    assert not any(call["task_id"].startswith("dev") for call in run.table("judge_calls").to_pylist())
    assert not run.table("evaluations").num_rows

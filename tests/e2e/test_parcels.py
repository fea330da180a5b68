"""A taskset of verifiers is trained one step, played by verifiers' own environment server.

The policy is written by hand and the judge is a few rules behind a real HTTP server; the taskset is the example's, and
verifiers, Ray, vLLM and the learner are those of every run.
"""

from __future__ import annotations

import numpy as np
import pytest

from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import step_trajectories
from tests.conftest import REPOSITORY
from tests.support.command import draco
from tests.support.rewards import check_rubric_run
from tests.support.scripted_policy import save_turns_policy
from tests.support.tiny_model import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.deployment, pytest.mark.usefixtures("verifiers")]

SHELVES = (" A", " B", " C", " D")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One step of two tasks."""
    root = tmp_path_factory.mktemp("parcels")
    policy = save_turns_policy(root / "policy", tiny_tokenizer(), dict.fromkeys(SHELVES, 1.0))
    result = draco(
        "train",
        str(REPOSITORY / "examples/parcels/parcels.yaml"),
        f"model.path={policy}",
        f"run.root={root}",
        "run.name=parcels",
        "train.steps=1",
        "train.prompts_per_step=2",
        "train.evaluate_before_after=false",
        "learner.minibatch_prompts=2",
        "environment.start_timeout_seconds=300",
        "ray.dashboard=false",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return RunDirectory.open(root / "parcels")


def test_traces_are_rollouts_with_their_tokens_and_log_probs(run: RunDirectory) -> None:
    played = [trajectory for group in step_trajectories(run, 1).values() for trajectory in group]
    assert len(played) == 2 * 6
    for trajectory in played:
        assert trajectory.error is None
        # Three parcels: each is asked about, and what the policy says of it is a step.
        assert [turn.role for turn in trajectory.turns] == [*["user", "assistant"] * 3, "program"]
        asked = [turn.text for turn in trajectory.turns if turn.role == "user"]
        assert [" First: a " in asked[0], " Next: a " in asked[1], " Next: a " in asked[2]] == [True] * 3
        assert [step.text in SHELVES for step in trajectory.steps] == [True] * 3
        assert {step.policy_version for step in trajectory.steps} == {0}
        # A letter and the end of the turn, three times.
        assert int(trajectory.sampled_T.sum()) == 6
        assert np.exp(trajectory.logprob_T[trajectory.sampled_T][::2]) == pytest.approx(0.25, abs=0.02)


def test_the_judge_reads_the_episode_and_the_policy_is_updated(run: RunDirectory) -> None:
    calls = run.table("judge_calls").to_pylist()
    assert {call["phase"] for call in calls} == {"stage1", "stage2", "union", "score", "credit"}
    assert all("the letter of a shelf" in call["prompt"] for call in calls)
    rewards = check_rubric_run(run, credit=True)
    assert len(rewards) == 2
    assert any(len(set(group)) > 1 for group in rewards.values())
    (line,) = run.metrics()
    assert line["updates"] == 1
    assert line["grad_norm"] > 0
    # The rewards of the taskset are nowhere in a run that is blind to outcomes.
    assert run.table("outcomes").num_rows == 0
    assert run.table("evaluations").num_rows == 0

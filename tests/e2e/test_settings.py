"""A step of training in every setting: its rewards are what its recorded verdicts, AppWorld's tests or its noise say.

The settings `draco` and `no-credit` are trained in test_training.py, `outcome` in test_ray_job.py,
`static-credit` in tests/integration/test_wheel.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from draco_ray.runs.directory import RunDirectory
from tests.e2e.test_training import PROMPTS, arguments
from tests.integration.test_judge_local_servers import SERVED
from tests.support.command import draco
from tests.support.functions_policy import FUNCTIONS, build_functions_policy, check_functions
from tests.support.rewards import check_given_rewards, check_rubric_run, voted
from tests.support.scripted_policy import THOUGHT, build_scripted_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("joined_ray")]

SEED = 3
"""Gives the two groups different noise."""


SHORT = ("agent.max_prompt_length=2048", "agent.max_response_length=1024", "agent.max_turns=2")


@pytest.fixture(scope="module")
def scripted_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_scripted_policy(tmp_path_factory.mktemp("scripted") / "policy")


def one_step(world: Path, model: Path, root: Path, setting: str, *words: str, config: str = "sandbox") -> RunDirectory:
    words = ("--setting", setting, "train.steps=1", "train.evaluate_before_after=false", f"seed={SEED}", *words)
    result = draco(*arguments(world, model, root, setting, config), *words, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    return RunDirectory.open(root / setting)


def test_static_rubric_without_credit(sandbox_root: Path, starter_model: Path, tmp_path: Path) -> None:
    run = one_step(sandbox_root, starter_model, tmp_path, "static")
    rewards = check_rubric_run(run, credit=False)
    assert len(rewards) == PROMPTS
    assert any(any(group) for group in rewards.values())
    assert {call["phase"] for call in run.table("judge_calls").to_pylist()} == {"score"}


def test_random(sandbox_root: Path, scripted_policy: Path, tmp_path: Path) -> None:
    run = one_step(sandbox_root, scripted_policy, tmp_path, "random", *SHORT, "algorithm.group_size=6")
    tasks = sorted(set(run.table("advantages").column("task_id").to_pylist()))
    noise = [np.random.default_rng([SEED, 1, place]).integers(0, 2, 6).tolist() for place in range(PROMPTS)]
    assert noise[0] != noise[1]
    # Which of the step's places a task has is the order's business.
    first = [row["reward"] for row in run.table("advantages").to_pylist() if row["task_id"] == tasks[0]]
    check_given_rewards(
        run, {(1, task): draw for task, draw in zip(tasks, sorted(noise, key=lambda n: n != first), strict=True)}
    )
    assert run.table("judge_calls").num_rows == 0


@pytest.mark.parametrize(("setting", "votes"), [("self-judge", 3), ("self-judge-plain", 1)])
def test_self_judge(sandbox_root: Path, scripted_policy: Path, tmp_path: Path, setting: str, votes: int) -> None:
    # Eight, so that all rewards of both groups are equal by chance in fewer than 4 runs of 1,000.
    words = (*SHORT, "algorithm.group_size=8", "judge.self_judge.context_tokens=null")
    run = one_step(sandbox_root, scripted_policy, tmp_path, setting, *words)
    rewards = check_rubric_run(run, credit=True)
    assert len(rewards) == PROMPTS
    assert any(len(set(group)) > 1 for group in rewards.values())
    calls = run.table("judge_calls").to_pylist()
    assert {call["model"] for call in calls} == {"self/policy"}
    # A thought was sampled, and is no part of the reply.
    tokenizer = AutoTokenizer.from_pretrained(scripted_policy)
    thought = len(tokenizer.tokenize(THOUGHT))
    for call in calls:
        beyond = call["output_tokens"] - len(tokenizer.tokenize(call["reply"]))
        assert (beyond >= thought) == (setting == "self-judge")
    # And the recorded verdicts are those of the policy's own replies.
    recorded = {
        (row["training_step"], row["task_id"], row["rollout"]): row["verdict"]
        for row in run.table("verdicts").to_pylist()
    }
    assert recorded == voted(run, votes)


def test_a_judge_that_is_served_on_the_cluster(sandbox_root: Path, scripted_policy: Path, tmp_path: Path) -> None:
    """The policy here calls AppWorld's APIs as functions."""
    config = tmp_path / "functions.yaml"
    config.write_text("extends: [sandbox, appworld-functions]\n")
    policy = build_functions_policy(tmp_path / "policy", sandbox_root)
    served = ("judge.rule_judge.start=false", f"judge.model=hosted_vllm/{scripted_policy}", "judge.local.enabled=true")
    # One server: that they come with the calls is seen in tests/integration.
    alone = [*(key for key in SERVED if "max_replicas" not in key), "judge.local.max_replicas=1"]
    words = (*FUNCTIONS, *served, *alone, "judge.max_tokens=256", "algorithm.group_size=4")
    run = one_step(sandbox_root, policy, tmp_path, "draco", *words, config=str(config))
    check_functions(run)
    assert len(check_rubric_run(run, credit=True)) == PROMPTS
    calls = run.table("judge_calls").to_pylist()
    assert {call["model"] for call in calls} == {f"hosted_vllm/{scripted_policy}"}
    assert {call["phase"] for call in calls} >= {"stage1", "stage2", "union", "score"}
    assert (run.path / "logs" / "judge-server-0.log").is_file()
    running = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not any(f"--model {scripted_policy}" in words for words in running)

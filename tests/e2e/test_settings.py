"""A step of training in every setting: its rewards are what its recorded verdicts, AppWorld's tests or its noise say.

The settings `draco` and `no-credit` are trained in test_training.py, `static-credit` in
tests/integration/test_wheel.py.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.records import Termination
from draco_ray.runs.directory import RunDirectory
from tests.e2e.test_training import PROMPTS, arguments
from tests.integration.test_judge_local_servers import SERVED
from tests.support.command import draco
from tests.support.functions_policy import FUNCTIONS, build_functions_policy, check_functions
from tests.support.rewards import check_given_rewards, check_rubric_run, voted
from tests.support.scripted_policy import THOUGHT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("joined_ray")]

SEED = 3
"""Gives the two groups different noise."""


ROLLOUT = ("training_step", "task_id", "rollout")
SHORT = ("agent.max_prompt_length=2048", "agent.max_response_length=1024", "agent.max_turns=2")


def one_step(
    world: Path, model: Path, root: Path, setting: str, *words: str, config: str = "sandbox", evaluated: bool = False
) -> RunDirectory:
    fixed = ("train.steps=1", f"train.evaluate_before_after={str(evaluated).lower()}", f"seed={SEED}")
    words = ("--setting", setting, *fixed, *words)
    result = draco(*arguments(world, model, root, setting, config), *words, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("held-out TGC" in result.stdout) == evaluated
    return RunDirectory.open(root / setting)


async def replayed_outcomes(run: RunDirectory, world: Path) -> dict[tuple[int, str], list[float]]:
    """By group and rollout: 1 where AppWorld's tests pass after the recorded cells were run anew."""
    cells: dict[tuple[int, str, int], list[str]] = defaultdict(list)
    for row in sorted(run.table("steps").to_pylist(), key=lambda row: row["turn"]):
        if row["action"] is not None:
            cells[row["training_step"], row["task_id"], row["rollout"]].append(row["action"])
    rewards: dict[tuple[int, str], list[float]] = defaultdict(list)
    slot = AppWorldSlot(EnvironmentConfig(), world, load_ground_truth=True, name="again")
    try:
        for row in sorted(run.table("advantages").to_pylist(), key=lambda row: row["rollout"]):
            group = (row["training_step"], row["task_id"])
            await slot.open(row["task_id"])
            for cell in cells[*group, row["rollout"]]:
                await slot.execute(cell)
            rewards[group].append(float((await slot.evaluate()).success))
    finally:
        await slot.stop()
    return dict(rewards)


def test_outcome(sandbox_root: Path, starter_model: Path, tmp_path: Path) -> None:
    """The setting whose training sees the ground truth, as its evaluation does."""
    run = one_step(sandbox_root, starter_model, tmp_path, "outcome", "data.eval_tasks=1", evaluated=True)
    # The reward is AppWorld's verdict on the world that a rollout's code leaves behind, played once more here.
    check_given_rewards(run, asyncio.run(replayed_outcomes(run, sandbox_root)))
    # The same verdict is in a table of its own, with how many of AppWorld's tests passed.
    rewards = {tuple(row[key] for key in ROLLOUT): row["reward"] for row in run.table("advantages").to_pylist()}
    verdicts = {tuple(row[key] for key in ROLLOUT): row for row in run.table("outcomes").to_pylist()}
    assert rewards == {rollout: float(row["success"]) for rollout, row in verdicts.items()}
    assert all((row["passed_tests"] == row["total_tests"] > 0) == row["success"] for row in verdicts.values())
    assert run.table("judge_calls").num_rows == 0
    assert set(run.table("evaluations").column("training_step").to_pylist()) == {0, 1}
    modes = run.table("evaluations").column("termination").to_pylist()
    assert set(modes) <= {mode.value for mode in Termination}


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

"""A step of training with other rewards and judges: its rewards are what its verdicts, AppWorld's tests or noise say.

Where AppWorld does not matter it is trained in the order desk, whose tasks cost little. Of the other settings `draco`
is trained in test_training.py, `no-credit` in test_faults.py and `static-credit` in tests/integration/test_wheel.py;
`static` is what the last two have in common, and `self-judge-plain` is `self-judge` with one vote and no reasoning.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from draco_ray.environments.appworld.data_root import load_split
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.world.scripts import families
from tests.e2e.test_training import arguments as on_appworld
from tests.integration.test_judge_local_servers import SERVED
from tests.support.command import draco, draco_here
from tests.support.functions_policy import FUNCTIONS, build_functions_policy, check_functions
from tests.support.order_desk_policy import arguments, build_order_desk_policy
from tests.support.rewards import check_given_rewards, check_rubric_run, voted
from tests.support.scripted_policy import THOUGHT, save_turns_policy
from tests.support.tiny_model import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.deployment, pytest.mark.usefixtures("joined_ray")]

PROMPTS = 2
SEED = 3
"""Gives the two groups different noise."""
ROLLOUT = ("training_step", "task_id", "rollout")


@pytest.fixture(scope="module")
def order_desk_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_order_desk_policy(tmp_path_factory.mktemp("order-desk") / "policy")


def one_step(model: Path, root: Path, setting: str, *words: str) -> RunDirectory:
    return trained(root, setting, *arguments(model, root, setting, "judge.workers=1", *words))


def trained(root: Path, setting: str, *words: str) -> RunDirectory:
    fixed = ("--setting", setting, "train.steps=1", "train.evaluate_before_after=false", f"seed={SEED}")
    result = draco(*words, *fixed)
    assert result.returncode == 0, result.stdout + result.stderr
    verified = draco_here("verify", str(root / setting))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "step 1: 2 groups" in verified.stdout
    return RunDirectory.open(root / setting)


def test_outcome(sandbox_root: Path, tmp_path: Path) -> None:
    """The setting whose training sees AppWorld's ground truth."""
    # A turn is the solution of one family of the tasks or of the other.
    solutions = {name: "\n".join(family.script()) for name, family in families().items()}
    entries = json.loads((sandbox_root / "sandbox.json").read_text(encoding="utf-8"))["tasks"]
    family = {task: entries[task]["family"] for task in load_split(sandbox_root, "train")}
    turns = {f"<code>\n{solutions[name]}\n</code>": 1.0 for name in sorted(set(family.values()))}
    assert len(turns) > 1
    policy = save_turns_policy(tmp_path / "policy", tiny_tokenizer(), turns)
    words = on_appworld(sandbox_root, policy, tmp_path, "outcome")
    run = trained(tmp_path, "outcome", *words, "agent.max_turns=1", "algorithm.group_size=4")
    played = {tuple(row[key] for key in ROLLOUT): row["action"].strip() for row in run.table("steps").to_pylist()}
    rewards: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (step, task, _), code in sorted(played.items()):
        rewards[step, task].append(float(code == solutions[family[task]]))
    assert len(rewards) == PROMPTS
    assert any(len(set(group)) > 1 for group in rewards.values())
    check_given_rewards(run, dict(rewards))
    # AppWorld's verdict is in a table of its own, with how many of its tests passed.
    given = {tuple(row[key] for key in ROLLOUT): row["reward"] for row in run.table("advantages").to_pylist()}
    verdicts = {tuple(row[key] for key in ROLLOUT): row for row in run.table("outcomes").to_pylist()}
    assert given == {rollout: float(row["success"]) for rollout, row in verdicts.items()}
    assert all((row["passed_tests"] == row["total_tests"] > 0) == row["success"] for row in verdicts.values())
    assert run.table("judge_calls").num_rows == 0


def test_random(order_desk_policy: Path, tmp_path: Path) -> None:
    run = one_step(order_desk_policy, tmp_path, "random")
    tasks = sorted(set(run.table("advantages").column("task_id").to_pylist()))
    noise = [np.random.default_rng([SEED, 1, place]).integers(0, 2, 6).tolist() for place in range(PROMPTS)]
    assert noise[0] != noise[1]
    # Which of the step's places a task has is the order's business.
    first = [row["reward"] for row in run.table("advantages").to_pylist() if row["task_id"] == tasks[0]]
    check_given_rewards(
        run, {(1, task): draw for task, draw in zip(tasks, sorted(noise, key=lambda n: n != first), strict=True)}
    )
    assert run.table("judge_calls").num_rows == 0


def test_self_judge(scripted_policy: Path, tmp_path: Path) -> None:
    # Eight, so that all rewards of both groups are equal by chance in fewer than 4 runs of 1,000.
    short = ("agent.max_response_length=1024", "agent.max_turns=2")
    # This policy writes the fields of all phases at once, which no phase's schema allows.
    free = "judge.structured_output=false"
    words = (*short, "algorithm.group_size=8", "judge.self_judge.context_tokens=null", free)
    run = one_step(scripted_policy, tmp_path, "self-judge", *words)
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
        assert beyond >= thought
    # And the recorded verdicts are those of the policy's own replies.
    recorded = {
        (row["training_step"], row["task_id"], row["rollout"]): row["verdict"]
        for row in run.table("verdicts").to_pylist()
    }
    assert recorded == voted(run, votes=3)


def test_a_judge_that_is_served_on_the_cluster(sandbox_root: Path, scripted_policy: Path, tmp_path: Path) -> None:
    """The policy here calls AppWorld's APIs as functions."""
    config = tmp_path / "functions.yaml"
    config.write_text("extends: [sandbox, appworld-functions]\n")
    policy = build_functions_policy(tmp_path / "policy", sandbox_root)
    served = ("judge.rule_judge.start=false", f"judge.model=hosted_vllm/{scripted_policy}", "judge.local.enabled=true")
    # One server: that they come with the calls is seen in tests/integration.
    alone = [*(key for key in SERVED if "max_replicas" not in key), "judge.local.max_replicas=1"]
    words = (*FUNCTIONS, *served, *alone, "judge.max_tokens=256", "algorithm.group_size=4")
    run = trained(tmp_path, "draco", *on_appworld(sandbox_root, policy, tmp_path, "draco", str(config)), *words)
    check_functions(run)
    assert len(check_rubric_run(run, credit=True)) == PROMPTS
    calls = run.table("judge_calls").to_pylist()
    assert {call["model"] for call in calls} == {f"hosted_vllm/{scripted_policy}"}
    assert {call["phase"] for call in calls} >= {"stage1", "stage2", "union", "score"}
    assert (run.path / "logs" / "judge-server-0.log").is_file()
    running = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not any(f"--model {scripted_policy}" in words for words in running)

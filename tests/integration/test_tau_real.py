"""The real tau2-bench, if installed: one banking task evaluated, and retail as a training environment.

Scripted servers stand in for agent and user simulator, and in training a hand-written policy for the policy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from tokenizers import AddedToken

from draco_ray.benchmarks.tau.evaluate import evaluate_tau
from draco_ray.benchmarks.tau.results import read_episodes
from draco_ray.benchmarks.tau.server import api_policy
from draco_ray.benchmarks.tau.tau2_process import HOME_VARIABLE
from draco_ray.config.schema import DracoConfig
from draco_ray.records import EpisodeEnd
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import step_trajectories
from tests.support.command import draco
from tests.support.endpoint_episode import END, call
from tests.support.scripted_customer import ScriptedCustomer
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.scripted_policy import SURE, save_bigram_policy
from tests.support.tau_rollout import USER_KEY, play_tau, tau_config
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tool_templates import QWEN25

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get(HOME_VARIABLE),
        reason=f"{HOME_VARIABLE} is not set: tau2-bench needs a checkout and an environment of its own",
    ),
]
KEY = "sk-scripted-0123456789"


def test_one_task_of_the_real_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    talk = (Reply("Hello, I have a question."), Reply("How can I help?"), Reply("Nothing, thanks. ###STOP###"))
    with ScriptedJudgeServer(*talk) as server:
        endpoint = {"api_base": server.base, "model": "openai/SCRIPTED"}
        tau = {"retrieval": "bm25", "tasks": ["task_001"], "trials": 1, "concurrency": 1, "restarts": 0}
        roles = dict.fromkeys(("agent", "user", "judge"), endpoint)
        config = DracoConfig.model_validate(
            {"tau_bench": {**tau, **roles, "embeddings_cache": str(tmp_path / "embeddings")}}
        )
        directory = evaluate_tau(config, [api_policy("openai/SCRIPTED")], tmp_path / "out")
    [result] = directory.complete_results()["openai_SCRIPTED"]
    assert result.evaluation.turns == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["measurements"]["openai_SCRIPTED"]
    assert (summary["episodes"], summary["infrastructure_errors"], summary["missing"]) == (1, 0, 0)
    assert summary["costs"]["user"]["input_tokens"] > 0
    assert len(server.requests) == 3
    written = [path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [text for text in written if KEY in text]


CUSTOMER = ("Hi, I am Yusuf Rossi, zip 19122. I want to exchange my keyboard.", "Go on.", "Thanks. ###STOP###")
LOOK_UP = call("find_user_id_by_name_zip", first_name="Yusuf", last_name="Rossi", zip="19122").removesuffix(END)
TURNS = (LOOK_UP, call("get_order_details", order_id="#W0").removesuffix(END), "It is done.", "I look.")
JUDGE = """\
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

def looks_up(task, steps):
    found = [step.number for step in steps if "find_user" in step.code]
    return (Verdict.PASS, found) if found else (Verdict.FAIL, [steps[-1].number])

def no_errors(task, steps):
    wrong = [step.number for step in steps if "Error" in (step.output or "")]
    return (Verdict.FAIL, wrong) if wrong else (Verdict.PASS, [])

answer = rule_judge([
    SimpleRule(title="Looks the customer up", instruction="Before anything else.", check=looks_up),
    SimpleRule(title="No error", instruction="No call ends in an error.", check=no_errors),
])
"""


async def test_an_episode_of_retail_is_rewarded_by_tau2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAU2_USER_API_KEY", USER_KEY)
    with ScriptedCustomer(CUSTOMER) as customer:
        lines = [LOOK_UP + END, f"It is done.{END}", f"Bye.{END}"]
        played = await play_tau(tau_config(customer.base), "0", lines, tmp_path / "kept", ground_truth=True)
    assert (played.trajectory.ended, played.trajectory.error) == (EpisodeEnd.FINISHED, None)
    assert [step.observation for step in played.trajectory.steps] == ["yusuf_rossi_9620", None, None]
    assert played.evaluated is not None
    # The exchange was never made.
    assert (played.evaluated.evaluation.reward, played.evaluated.evaluation.failures) == (0.0, ("DB",))
    (episode,) = read_episodes(tmp_path / "kept", ["0"], 1)
    assert (episode.termination_reason, episode.failure, episode.usage("assistant").calls) == ("user_stop", "DB", 3)


def _policy(directory: Path) -> Path:
    """Draws a call or a sentence in each turn."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN25
    tokenizer.add_tokens([AddedToken(turn, special=False, normalized=False) for turn in TURNS])

    def token(piece: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(piece))

    line_break = tokenizer.encode("\n", add_special_tokens=False)[-1]
    follows = {line_break: {token(turn): SURE for turn in TURNS}}
    follows |= {token(turn): {token("<|im_end|>"): SURE} for turn in TURNS}
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "efgh"]
    follows |= {letter: {token(turn): SURE} for letter, turn in zip(letters, TURNS, strict=True)}
    return save_bigram_policy(directory, tokenizer, follows)


def test_a_training_step_whose_rollouts_are_tau2s_own_episodes(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    with ScriptedCustomer(CUSTOMER) as customer:
        config = {
            "extends": ["sandbox", "tau"],
            "environment": {
                "options": {"domain": "retail", "user": {"model": "openai/SCRIPTED", "api_base": customer.base}},
                "slots": 2,
                "slots_per_worker": 2,
            },
            "agent": {"max_turns": 12, "max_response_length": 32768, "max_turn_tokens": 64},
            "judge": {"rule_judge": {"use": "./judge.py:answer"}},
            "train": {"prompts_per_step": 2, "steps": 1, "evaluate_before_after": False},
            "algorithm": {"group_size": 3},
            "learner": {"minibatch_prompts": 2, "micro_batch_tokens": 32768},
        }
        (tmp_path / "retail.yaml").write_text(yaml.safe_dump(config))
        result = draco(
            "train",
            str(tmp_path / "retail.yaml"),
            f"model.path={_policy(tmp_path / 'policy')}",
            f"run.root={tmp_path}",
            "run.name=retail",
            "ray.dashboard=false",
            environment={"TAU2_USER_API_KEY": USER_KEY},
        )
    assert result.returncode == 0, result.stdout + result.stderr
    run = RunDirectory.open(tmp_path / "retail")
    rollouts = [each for group in step_trajectories(run, 1).values() for each in group]
    assert len(rollouts) == 2 * 3
    for rollout in rollouts:
        assert rollout.ended in (EpisodeEnd.FINISHED, EpisodeEnd.TURN_LIMIT), rollout.error
        kept = run.path / "episodes" / rollout.group / f"{rollout.rollout}.0"
        (episode,) = json.loads((kept / "results.json").read_text())["simulations"]
        assert episode["reward_info"] is None
        if rollout.ended is EpisodeEnd.FINISHED:
            said = [message for message in episode["messages"] if message["role"] == "assistant"][1:]
            assert len(said) == sum(turn.role == "assistant" for turn in rollout.turns)
    (line,) = run.metrics()
    assert line["updates"] == 1
    assert line["grad_norm"] > 0
    calls = run.table("judge_calls").to_pylist()
    assert {row["phase"] for row in calls} == {"stage1", "stage2", "union", "score", "credit"}
    assert all("As a retail agent, you can help users" in row["prompt"] for row in calls)
    assert run.table("outcomes").num_rows == 0
    written = [path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file()]
    assert not [text for text in written if USER_KEY in text]

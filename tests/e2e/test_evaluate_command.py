"""`draco evaluate` as a user runs it: interrupted and gone on with, read by AppWorld, on checkpoints, on an API."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from draco_ray.config.load import dump_config, load_config
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.lab.evaluation.appworld import DATASET, AppWorldOutputs
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import Usage
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.world.scripts import families
from tests.support.command import draco, draco_here, start_draco
from tests.support.lost_results import lost_rollout
from tests.support.order_desk_policy import EXAMPLE, build_order_desk_policy
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.scripted_policy import save_turns_policy
from tests.support.tiny_model import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("joined_ray")]

TASKS, RUNS = 3, 2


DESK = str(EXAMPLE / "order_desk.yaml")
IN_THE_ORDER_DESK = (f"environment.use={EXAMPLE}/environment.py:OrderDesk",)
"""Words of an evaluation whose world costs nothing."""


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    """An evaluation small enough for a test."""
    return [
        "evaluate",
        *more,
        "--out",
        str(out),
        f"data.root={data}",
        f"data.eval_tasks={TASKS}",
        "environment.slots=1",
        "environment.slots_per_worker=1",
        "environment.cpus_per_worker=0.25",
        "ray.dashboard=false",
    ]


def appworld_evaluate(root: Path, experiment: str) -> dict[str, object]:
    """What AppWorld's own command says of an experiment."""
    done = subprocess.run(
        [appworld_python(None), "-m", "appworld.cli", "evaluate", experiment, DATASET, "--root", str(root)],
        env={"PATH": os.environ["PATH"], "HOME": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = root / "experiments" / "outputs" / experiment / "evaluations" / f"{DATASET}.json"
    found: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))
    return found


def test_an_interrupted_evaluation_goes_on_and_appworld_agrees(sandbox_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "evaluation"
    solution = "\n".join(families()["approve_relation_requests"].script())
    turns = {f"<code>\n{solution}\n</code>": 0.9, "Done.": 0.1}
    solving = save_turns_policy(tmp_path / "policy", tiny_tokenizer(), turns)
    policy = ["--policy", str(solving), "--config", "sandbox", "--split", "dev", "--runs", str(RUNS)]
    # One at a time: the others are still to be played when the first has ended.
    command = [*arguments(sandbox_root, out, *policy), "agent.max_turns=4"]
    process = start_draco(command)
    lines = out / "results" / "base.jsonl"
    while not lines.is_file() or b"\n" not in lines.read_bytes():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    # As `ray job stop` does; it becomes an interrupt, so that both end alike.
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    (finished,) = re.findall(r"stopped; (\d) of 6 rollouts are in", stdout)
    assert 1 <= int(finished) < TASKS * RUNS
    kept = lines.read_bytes()
    half = draco_here("tables", str(out))
    assert half.returncode == 2
    assert f"{finished} of 6 rollouts are finished" in half.stderr

    changed = draco_here(*command, "agent.max_turns=3")
    assert changed.returncode == 2
    assert changed.stderr.count("\n") == 1
    assert "agent.max_turns was 4, but is 3 in this command" in changed.stderr

    resumed = draco(*command)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"{finished} of 6 rollouts are already finished" in resumed.stdout
    assert lines.read_bytes().startswith(kept)
    directory = EvaluationDirectory.open(out)
    results = directory.complete_results()["base"]
    assert len(results) == TASKS * RUNS
    assert all(result.usage.output_tokens > 0 for result in results)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    rate = sum(result.evaluation.success for result in results) / len(results)
    assert summary["tgc"][0]["mean"] == pytest.approx(rate)

    # Of the first run, which was interrupted; in it a task that is solved is laid out as one that was lost.
    ours = {r.evaluation.task_id: r.evaluation.success for r in results if r.evaluation.run == 0}
    solved = [task for task, success in ours.items() if success]
    assert len(solved) > 1
    told = (out / "appworld" / "data" / "datasets" / f"{DATASET}.txt").read_text(encoding="utf-8")
    assert told.split() == [*directory.plan.tasks]
    AppWorldOutputs(out / "appworld", sandbox_root, told.split()).write("base", 0, solved[-1], {})
    individual = appworld_evaluate(out / "appworld", "base-run1")["individual"]
    assert isinstance(individual, dict)
    assert {task: verdict["success"] for task, verdict in individual.items()} == ours | {solved[-1]: False}
    assert {task: verdict["difficulty"] for task, verdict in individual.items()} == directory.plan.tasks

    again = draco_here(*command)
    assert again.returncode == 0
    assert "6 of 6 rollouts are already finished" in again.stdout


@pytest.mark.deployment
def test_checkpoints_of_a_run_are_measured_with_their_adapters(
    tmp_path: Path,
) -> None:
    policy = build_order_desk_policy(tmp_path / "policy")
    overrides = [*IN_THE_ORDER_DESK, f"data.root={EXAMPLE}/tasks", f"model.path={policy}", "train.prompts_per_step=6"]
    config = load_config(DESK, overrides)
    run = RunDirectory.create(tmp_path / "run", dump_config(config)).path
    learner = LoraLearner(config.model, config.learner, seed=0, device="cpu")
    random = np.random.default_rng(0)
    for step in (1, 2, 3, 4):
        learner.save(run / "checkpoints" / f"step{step:05d}")
        for name, parameter in learner.policy.peft.named_parameters():
            if "lora_B" in name:
                parameter.data += float(random.normal(0, 0.01))
    curve = arguments(
        EXAMPLE / "tasks", tmp_path / "curve", "--run", str(run), "--train-curve", "--every", "3", "--trust"
    )
    brief = ["--runs", "1", "data.eval_tasks=1", "agent.max_turns=2", "agent.max_turn_tokens=32"]
    done = draco(*curve, *brief)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = EvaluationDirectory.open(tmp_path / "curve")
    assert directory.plan.split == "train"
    # The untrained policy, every third checkpoint, and the last one.
    assert directory.plan.measurements == ("step00000", "step00003", "step00004")
    with (tmp_path / "curve" / "curve.csv").open(encoding="utf-8") as file:
        assert [row["Step"] for row in csv.DictReader(file)] == ["0", "3", "4"]


def test_an_api_model_is_measured_within_its_budget_and_through_outages(tmp_path: Path) -> None:
    script = [Reply(text="<code>\nprint(1 + 1)\n</code>"), Reply(text="Done.")]
    out = tmp_path / "out"
    policy = ["--policy", "litellm:openai/scripted", "--config", DESK, "--runs", "1", "--split", "dev"]
    with ScriptedJudgeServer(*script) as server:
        command = [*arguments(EXAMPLE / "tasks", out, *policy), *IN_THE_ORDER_DESK, "--api-base", server.base]
        command += ["judge.max_attempts=1", "environment.rollout_retries=0"]
        unpriced = draco_here(*command, "judge.limits.dollars=0.08")
        assert unpriced.returncode == 2
        assert "the price of openai/scripted is unknown" in unpriced.stderr

        # A call may cost 64 tokens of reply and does cost 10: a cent.
        command += ["agent.max_turn_tokens=64", "judge.prices={scripted: {input: 0.0, output: 1000.0}}"]
        # What LiteLLM is imported for is seen where nothing has imported it before.
        stopped = draco(*command, "judge.limits.dollars=0.08")
        assert stopped.returncode == 1, stopped.stdout + stopped.stderr
        assert stopped.stderr.count("\n") == 1
        assert "$0.0200 of judge.limits.dollars=0.08 is spent" in stopped.stderr
        assert "1 of 3 rollouts are kept" in stopped.stderr
        kept = (out / "results" / "openai_scripted.jsonl").read_bytes()

        command.append("judge.limits.dollars=0.11")
        # The second task is not answered, and then the key is no longer known.
        answered = len(server.requests)
        server.script = [*[Reply()] * answered, Reply(status=500), Reply(status=401, text="who are you?")]
        refused = draco(*command)
        assert refused.returncode == 1, refused.stdout + refused.stderr
        [lost, ended] = refused.stderr.splitlines()
        assert "rollout 0 attempt 0: server_error: the model did not answer" in lost
        assert "evaluated model openai/scripted at" in ended
        assert "check --policy, --api-base, --api-key-env" in ended
        assert "2 of 3 rollouts are kept; run the same command again to continue" in ended

        directory = EvaluationDirectory.open(out)
        [(task, run)] = directory.missing("openai_scripted")
        directory.add("openai_scripted", lost_rollout(task, run, Usage(), seconds=1.0, attempts=1, error="another"))
        over = draco_here(*command)
        assert over.returncode == 0, over.stdout + over.stderr
        assert "2 of 3 rollouts were lost and count as failures (the last: another)" in over.stdout
        assert json.loads((out / "summary.json").read_text())["terminations"]["server_error"] == pytest.approx(2 / 3)

        server.script = script
        done = draco(*command, "--retry-errors")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 lost rollouts will be repeated" in done.stdout
    assert (out / "results" / "openai_scripted.jsonl").read_bytes().startswith(kept)
    results = EvaluationDirectory.open(out).complete_results()["openai_scripted"]
    assert [result.evaluation.success for result in results] == [False] * 3
    # The first task has a turn of code and a closing one, the others the closing one.
    assert sorted(result.usage.calls for result in results) == [1, 1, 2]
    assert sum(result.usage.dollars or 0 for result in results) == pytest.approx(0.04)
    assert json.loads((out / "spent.json").read_text()) == {"dollars": pytest.approx(0.04)}


@pytest.mark.deployment
def test_a_set_over_splits_stops_where_too_much_is_lost_and_goes_on(tmp_path: Path) -> None:
    script = [Reply(text="<code>\nprint(1 + 1)\n</code>"), Reply(text="Done.")]
    out = tmp_path / "set"
    with ScriptedJudgeServer(Reply(status=500)) as server:
        file = tmp_path / "set.yaml"
        setting = {"policy": "litellm:openai/scripted", "api_base": server.base, "config": DESK}
        wanted = {"settings": {"Scripted": setting}, "splits": ["dev", "train"], "runs": 1, "max_lost_share": 0.4}
        file.write_text(json.dumps(wanted), encoding="utf-8")
        command = [
            "eval-set",
            str(file),
            *arguments(EXAMPLE / "tasks", out)[1:],
            *IN_THE_ORDER_DESK,
            "data.eval_tasks=2",
        ]
        command += ["judge.max_attempts=1", "environment.rollout_retries=0", "agent.max_turn_tokens=64"]
        lost = draco(*command)
        assert lost.returncode == 3, lost.stdout + lost.stderr
        # It stops at the first: one of two is more than two fifths.
        *_, line = lost.stderr.splitlines()
        assert "dev: 1 of 2 rollouts were lost, more than max_lost_share=0.4 (the last: " in line
        assert not (out / "Scripted" / "train").exists()
        asked = len(server.requests)
        assert draco_here(*command).returncode == 3
        assert len(server.requests) == asked

        server.script = script
        done = draco(*command, "--retry-errors")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 of 2: Scripted on train" in done.stdout
        assert "OrderDesk dev" in done.stdout
        asked = len(server.requests)
        again = draco_here(*command)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "2 of 2 evaluations are finished" in again.stdout
        assert len(server.requests) == asked
    for split in ("dev", "train"):
        assert EvaluationDirectory.open(out / "Scripted" / split).finished() == 2

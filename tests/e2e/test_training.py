"""Two training steps on real parts (Ray, vLLM, AppWorld, the judge's HTTP server, Ray Train, PEFT), then read back.

That run joins a Ray; the one that is told to end has started its own.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from draco_ray.runs.directory import RunDirectory
from tests.support.command import descendants, draco, draco_here, start_draco
from tests.support.functions_policy import FUNCTIONS, build_functions_policy, check_functions
from tests.support.rewards import check_rubric_run
from tests.support.standing_ray import joining

pytestmark = pytest.mark.slow

STEPS, PROMPTS, GROUP = 2, 2, 3


def arguments(world: Path, model: Path, root: Path, name: str, config: str = "sandbox") -> list[str]:
    """A run small enough for a test."""
    return [
        "train",
        config,
        f"data.root={world}",
        "data.eval_split=dev",
        "data.eval_tasks=2",
        f"model.path={model}",
        f"run.root={root}",
        f"run.name={name}",
        f"train.prompts_per_step={PROMPTS}",
        f"train.steps={STEPS}",
        f"algorithm.group_size={GROUP}",
        "learner.minibatch_prompts=1",
        "environment.slots=6",
        "judge.workers=1",
        "environment.slots_per_worker=6",
        "ray.dashboard=false",
        # A key that is taken only from one's own run directory.
        f"engine.adapter_directory={root / 'adapters'}",
    ]


@pytest.fixture(scope="module")
def blind_world(sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test world without any ground truth: outcome-blind training must not miss it."""
    root = tmp_path_factory.mktemp("blind") / "world"
    shutil.copytree(sandbox_root, root, ignore=shutil.ignore_patterns("ground_truth"))
    assert not list(root.rglob("ground_truth"))
    return root


@pytest.fixture(scope="module")
def run(one_ray: str, blind_world: Path, starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run of the setting ``draco`` on the world without ground truth."""
    root = tmp_path_factory.mktemp("runs")
    words = [*arguments(blind_world, starter_model, root, "two"), "train.evaluate_before_after=false"]
    result = draco(*words, environment=joining(one_ray))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "offline rule judge" in result.stdout
    assert len(re.findall(r"^step \d/2 ", result.stdout, re.MULTILINE)) == STEPS
    assert str(root / "two") in result.stdout
    return RunDirectory.open(root / "two")


def test_every_rollout_is_kept(run: RunDirectory) -> None:
    trajectories = run.table("trajectories")
    assert trajectories.num_rows == STEPS * PROMPTS * GROUP
    assert set(trajectories.column("training_step").to_pylist()) == {1, 2}
    # The second step's rollouts come from the adapter that the first one made.
    versions = {(row["training_step"], row["policy_version"]) for row in trajectories.to_pylist()}
    assert versions == {(1, 0), (2, 1)}
    assert run.table("steps").num_rows > 0


def test_a_run_tells_its_watchers(run: RunDirectory, tmp_path: Path) -> None:
    lines = [
        json.loads(line)
        for file in (run.path / "logs").glob("*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert {line["run"] for line in lines} == {"two"}
    played = {(line["step"], line["task"], line["rollout"]) for line in lines if line["message"].startswith("rollout ")}
    assert len(played) == STEPS * PROMPTS * GROUP
    (events,) = (run.path / "tensorboard").iterdir()
    assert b"judge/score/output_tokens" in events.read_bytes()
    result = draco_here("runs", "timeline", str(run.path), "--step", "2", "--out", str(tmp_path / "step2.json"))
    assert result.returncode == 0, result.stderr
    stages = {event["name"] for event in json.loads((tmp_path / "step2.json").read_text(encoding="utf-8"))}
    assert {"rollout", "stage1", "stage2", "union", "score", "learning", "sync", "checkpoint"} <= stages


def test_every_phase_of_the_judge_left_its_calls(run: RunDirectory) -> None:
    calls = run.table("judge_calls").to_pylist()
    per_phase = {
        phase: sum(call["phase"] == phase for call in calls) for phase in ("stage1", "stage2", "union", "score")
    }
    groups = STEPS * PROMPTS
    assert per_phase == {"stage1": groups, "stage2": groups * GROUP, "union": groups, "score": groups * GROUP}
    assert not [call["error"] for call in calls if call["error"]]
    assert all(call["prompt"] and call["reply"] and call["input_tokens"] > 0 for call in calls)
    assert run.table("criteria").num_rows > 0
    assert run.table("verdicts").num_rows > 0


def test_rewards_and_advantages_are_those_of_the_recorded_verdicts(run: RunDirectory) -> None:
    rewards = check_rubric_run(run, credit=True)
    assert len(rewards) == STEPS * PROMPTS
    assert any(len(set(group)) > 1 for group in rewards.values())
    fallbacks = run.table("advantages").column("fallback").to_pylist()
    assert "none" in fallbacks, "no advantage was divided by credit"


def test_the_adapter_changed_and_is_plain_peft(run: RunDirectory) -> None:
    first, second = (load_file(run.checkpoint(step) / "adapter_model.safetensors") for step in (1, 2))
    assert first.keys() == second.keys()
    assert any(not np.array_equal(first[name], second[name]) for name in first)
    config = json.loads((run.checkpoint(2) / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 16, 32)


def test_engine_and_learner_agree(run: RunDirectory) -> None:
    for metrics in run.metrics():
        # On the step's own samples, at the version that sampled them, and on a probe after the sync.
        assert metrics["engine_gap"] < 0.02
        assert metrics["canary_gap"] < 0.02


def test_show_and_cost_read_the_run(run: RunDirectory) -> None:
    shown = draco_here("runs", "show", str(run.path))
    assert shown.returncode == 0, shown.stderr
    assert f"{STEPS * PROMPTS * GROUP} trajectories" in shown.stdout
    cost = draco_here("runs", "cost", str(run.path))
    assert cost.returncode == 0, cost.stderr
    assert "stage2" in cost.stdout


def open_to_others(run: RunDirectory) -> list[Path]:
    return [path for path in [run.path, *run.path.rglob("*")] if path.stat().st_mode & 0o077]


def test_nobody_else_may_read_a_run_and_nothing_in_it_is_unpickled(run: RunDirectory) -> None:
    everything = [run.path, *run.path.rglob("*")]
    # Ray Train's own, in a closed folder: its controller is a process of the cluster's.
    own = run.path / "checkpoints" / "ray_train"
    assert [path for path in open_to_others(run) if own not in (path, *path.parents)] == []
    files = [path for path in everything if path.is_file()]
    kinds = {".json", ".jsonl", ".yaml", ".parquet", ".safetensors"}
    others = {path.relative_to(run.path).parts[0] for path in files if path.suffix not in kinds}
    assert others <= {".lock", "tensorboard", "judge_cache", "checkpoints"}
    # A pickle begins with its protocol; torch.save puts it into a ZIP file.
    begun = {path: path.read_bytes()[:4] for path in files}
    assert [path for path, bytes_ in begun.items() if bytes_[:1] == b"\x80" or bytes_ == b"PK\x03\x04"] == []


def test_ones_own_run_is_continued_by_one_command(run: RunDirectory) -> None:
    result = draco_here("train", "--resume", str(run.path))
    assert result.returncode == 0, result.stderr
    assert "two: finished with step 2" in result.stdout


@pytest.mark.timeout(600)
def test_sigterm_keeps_what_was_finished(blind_world: Path, tmp_path: Path) -> None:
    """Here AppWorld is played by a program behind the endpoint, which makes the policy's calls over HTTP."""
    config = tmp_path / "endpoint.yaml"
    config.write_text("extends: [sandbox, appworld-endpoint]\n")
    policy = build_functions_policy(tmp_path / "policy", blind_world)
    words = ["--setting", "no-credit", "train.evaluate_before_after=false", "train.steps=50", *FUNCTIONS]
    process = start_draco([*arguments(blind_world, policy, tmp_path, "cut", str(config)), *words])
    parts = tmp_path / "cut" / "tables" / "trajectories"
    try:
        while not [*parts.glob("step00002/*.arrow"), *parts.glob("step00002.parquet")]:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        # Nobody would read what it sends.
        assert descendants(process.pid, "raylet")
        assert not descendants(process.pid, "log_monitor.py")
        # It becomes an interrupt, so that both end alike.
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stdout + stderr
    assert "stopping…" in stdout
    assert f"what was finished is in {tmp_path / 'cut'}" in stdout
    assert f"continue with: draco train --resume {tmp_path / 'cut'}" in stdout
    run = RunDirectory.open(tmp_path / "cut")
    assert open_to_others(run) == []
    # As far as it came before the signal reached it: step 1 at least, and step 2 had begun.
    finished = [line["step"] for line in run.metrics()]
    assert finished == [*range(1, len(finished) + 1)]
    assert 1 <= len(finished) < 50
    steps = run.table("trajectories").column("training_step").to_pylist()
    assert {steps.count(step) for step in finished} == {PROMPTS * GROUP}
    assert steps.count(2) >= 1
    # The setting without credit: what step 1 was trained on follows from its verdicts, the same for all steps.
    rewards = check_rubric_run(run, credit=False)
    assert len([step for step, _ in rewards if step == 1]) == PROMPTS
    assert any(any(group) for group in rewards.values())
    assert "credit" not in run.table("judge_calls").column("phase").to_pylist()
    check_functions(run)

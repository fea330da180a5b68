"""Two training steps on real parts (Ray, vLLM, AppWorld, the judge's HTTP server, Ray Train, PEFT), then read back.

The run is killed in the second, with all it has started, and goes on: what is read back is that of an undisturbed run,
and no reply was paid for twice.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from draco_ray.runs.directory import RunDirectory
from tests.support.command import draco, draco_here, start_draco
from tests.support.holding_judge import HoldingJudge
from tests.support.rewards import check_rubric_run

pytestmark = pytest.mark.slow

STEPS, PROMPTS, GROUP = 2, 2, 3
TABLES = ("trajectories", "verdicts", "criteria", "advantages", "groups", "judge_calls")


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
def judge() -> Iterator[HoldingJudge]:
    with HoldingJudge() as server:
        yield server


@pytest.fixture(scope="module")
def run(
    judge: HoldingJudge, blind_world: Path, starter_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A run of the setting ``draco`` without ground truth, killed while step 2 was scored, and continued."""
    root = tmp_path_factory.mktemp("runs")
    asked = ["judge.rule_judge.start=false", "judge.model=openai/rule-judge", f"judge.api_base={judge.base}"]
    words = [*asked, "judge.api_key_env=KEY_OF_NOBODY", "train.evaluate_before_after=false"]
    process = start_draco([*arguments(blind_world, starter_model, root, "two"), *words])
    try:
        tables = root / "two" / "tables"
        wait_until(lambda: any(tables.glob("trajectories/step00002/*.arrow")), process)
        # Scoring of step 2 begins seconds later: it waits for the criteria of the whole group.
        judge.answers_before_holding = 0
        # Every phase before scoring is through when both groups' merge is in the books. How many scoring calls are
        # under way then is not known: rollouts that are equal to the letter share one.
        wait_until(lambda: len([*tables.glob("judge_calls/step00002/*union*.arrow")]) == PROMPTS, process)
        wait_until(lambda: judge.held > 0, process)
        below = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
    # With all that it has started, as where a machine goes down: nothing is told to end.
    for each in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    # What these still had to ask would be answered as well, and then to nobody who keeps it.
    psutil.wait_procs(below)
    judge.answers_before_holding = None
    directory = root / "two"

    changed = draco_here("train", "--resume", str(directory), "learner.learning_rate=1e-4", "train.steps=5")
    assert changed.returncode == 2, changed.stdout + changed.stderr
    (line,) = changed.stderr.splitlines()
    assert re.search(r"learner\.learning_rate \([\d.e-]+ -> 0\.0001\)", line)
    assert "train.steps (2 -> 5)" in line

    result = draco("train", "--resume", str(directory))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "continues after step 1" in result.stdout
    assert f"step 2: {PROMPTS * GROUP} finished rollouts are reused from the run directory" in result.stdout
    assert re.findall(r"^step (\d)/2 ", result.stdout, re.MULTILINE) == ["2"]
    assert str(directory) in result.stdout
    return RunDirectory.open(directory)


def wait_until(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not done():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_tables_hold_every_step_as_in_an_undisturbed_run(run: RunDirectory) -> None:
    assert [line["step"] for line in run.metrics()] == [1, 2]
    for table in TABLES:
        steps = run.table(table).column("training_step").to_pylist()
        assert set(steps) == {1, 2}, table
        # One file a step: nothing is left under way.
        assert not list((run.tables / table).glob("step*/")), table
    keys = [(row["training_step"], row["task_id"], row["rollout"]) for row in run.table("trajectories").to_pylist()]
    assert len(keys) == len(set(keys)) == STEPS * PROMPTS * GROUP
    assert [line["rollouts"] for line in run.metrics()] == [PROMPTS * GROUP] * STEPS
    assert run.checkpoint(2).is_dir()


def test_no_question_is_answered_twice_by_the_judge(run: RunDirectory, judge: HoldingJudge) -> None:
    assert judge.answered
    assert set(judge.answered.values()) == {1}
    calls = run.table("judge_calls").to_pylist()
    # And the books say what each cost when it was asked, not that its replay was free.
    paid = [call for call in calls if call["requests"]]
    # A reply that was kept but not yet in the books when the driver died is replayed without its cost (docs/faults.md).
    assert 0 <= judge.answered.total() - len(paid) <= 1
    # What else was free repeats a paid question of another rollout that is equal to the letter.
    assert len({call["prompt"] for call in calls} - {call["prompt"] for call in paid}) <= 1


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
    # Before and after it was killed.
    events = [file.read_bytes() for file in (run.path / "tensorboard").iterdir()]
    assert [b"judge/score/output_tokens" in file for file in events] == [True, True]
    result = draco_here("runs", "timeline", str(run.path), "--step", "1", "--out", str(tmp_path / "step1.json"))
    assert result.returncode == 0, result.stderr
    stages = {event["name"] for event in json.loads((tmp_path / "step1.json").read_text(encoding="utf-8"))}
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


def test_the_run_that_was_killed_is_computed_again(run: RunDirectory) -> None:
    verified = draco_here("verify", str(run.path))
    assert verified.returncode == 0, verified.stderr
    assert re.findall(r"^step (\d): 2 groups, 6 rollouts as recorded$", verified.stdout, re.MULTILINE) == ["1", "2"]


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


def test_a_finished_run_has_nothing_left_to_do(run: RunDirectory) -> None:
    before = run.metrics_file.read_text()
    result = draco_here("train", "--resume", str(run.path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "two: already finished at step 2" in result.stdout
    assert run.metrics_file.read_text() == before

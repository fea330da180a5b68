"""Processes killed with SIGKILL in the middle of a step: the run goes on, and its tables are whole."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer
from tests.support.command import start_draco
from tests.support.jobs import load_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, GROUP = 2, 2
STRIKES = {
    1: ("rollout worker", "union and judge"),
    2: ("AppWorld child", "advantage actor", "run store"),
    3: ("engine core", "learner worker"),
    4: ("engine actor", "judge server"),
}
"""Step -> what dies in it."""


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    return load_job("chaos")


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(latency=1.0) as server:
        yield server


@pytest.fixture(scope="module")
def struck(
    chaos: ModuleType,
    judge: JudgeServer,
    sandbox_root: Path,
    starter_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[RunDirectory, str]:
    """A run in each step of which something died, and what it printed."""
    root = tmp_path_factory.mktemp("runs")
    process = start_draco(
        [
            "train",
            "sandbox",
            f"data.root={sandbox_root}",
            f"model.path={starter_model}",
            f"run.root={root}",
            "run.name=struck",
            "judge.rule_judge.start=false",
            f"judge.model=openai/{MODEL_NAME}",
            f"judge.api_base={judge.base_url}",
            "judge.api_key_env=KEY_OF_NOBODY",
            f"train.prompts_per_step={PROMPTS}",
            f"train.steps={len(STRIKES)}",
            "train.evaluate_before_after=false",
            f"algorithm.group_size={GROUP}",
            "learner.minibatch_prompts=1",
            "environment.slots=4",
            "environment.slots_per_worker=4",
            "ray.dashboard=false",
        ]
    )
    parts = root / "struck" / "tables" / "trajectories"
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        for step, faults in STRIKES.items():
            while not list(parts.glob(f"step{step:05d}/*.arrow")):
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            for fault in faults:
                victims = [judge.pid] if fault == chaos.JUDGE_SERVER else chaos.find(fault, process)
                assert victims, (fault, process.poll())
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
            if chaos.JUDGE_SERVER in faults:
                # Requests are repeated for longer than a restart takes.
                port = int(judge.base_url.removesuffix("/v1").rsplit(":", 1)[-1])
                stack.enter_context(JudgeServer(latency=1.0, port=port))
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stdout + stderr
    return RunDirectory.open(root / "struck"), stdout + stderr


def test_every_step_is_finished(struck: tuple[RunDirectory, str]) -> None:
    run, printed = struck
    assert "Traceback" not in printed
    assert [line["step"] for line in run.metrics()] == list(STRIKES)
    for line in run.metrics():
        assert line["engine_gap"] is None or line["engine_gap"] < 0.02
        assert line["canary_gap"] is None or line["canary_gap"] < 0.02


def test_rollouts_are_there_or_counted_as_lost(struck: tuple[RunDirectory, str]) -> None:
    run, _ = struck
    rows = run.table("trajectories").to_pylist()
    for line in run.metrics():
        played = [row for row in rows if row["training_step"] == line["step"]]
        assert len(played) + line["rollouts_lost"] == PROMPTS * GROUP
        # An engine that was replaced samples from the adapter that the step began with.
        assert {row["policy_version"] for row in played} == {line["step"] - 1}


def test_what_the_run_store_was_asked_to_write_is_there(struck: tuple[RunDirectory, str]) -> None:
    run, _ = struck
    groups = run.table("groups").to_pylist()
    assert sorted(row["training_step"] for row in groups) == sorted([*STRIKES] * PROMPTS)
    calls = run.table("judge_calls").to_pylist()
    ruled = {(row["training_step"], row["task_id"]) for row in run.table("criteria").to_pylist()}
    assert ruled
    for row in groups:
        if row["state"] == "credited":
            phases = [
                call["phase"]
                for call in calls
                if (call["training_step"], call["task_id"]) == (row["training_step"], row["task_id"])
            ]
            assert phases.count("stage1") == phases.count("union") == 1
            assert phases.count("stage2") == row["rollouts"]
            # Where rollouts are alike the union may find no criterion, and nothing is scored.
            assert phases.count("score") == (row["rollouts"] if (row["training_step"], row["task_id"]) in ruled else 0)

"""Processes killed with SIGKILL in the middle of a step: the run goes on, and its tables are whole. SIGTERM ends it.

It has started its own Ray, and is of the setting without credit. AppWorld is played by a program behind the endpoint,
which makes the policy's calls over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer
from tests.e2e.test_training import open_to_others
from tests.support.command import start_draco
from tests.support.functions_policy import FUNCTIONS, build_functions_policy, check_functions
from tests.support.jobs import load_job
from tests.support.rewards import check_rubric_run

pytestmark = pytest.mark.slow

PROMPTS, GROUP = 2, 3
STRIKES = {
    2: ("rollout worker", "union and judge", "learner worker"),
    3: ("AppWorld child", "advantage actor", "run store", "engine core"),
    4: ("engine actor", "judge server"),
}
"""Step -> what dies in it; the first is left alone, and the driver is told to end in the last."""
LAST = 5


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    return load_job("chaos")


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(latency=1.0) as server:
        yield server


@pytest.fixture(scope="module")
def struck(
    chaos: ModuleType, judge: JudgeServer, sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, str]:
    """A run in which something died in most steps, and what it printed."""
    root = tmp_path_factory.mktemp("runs")
    config = root / "endpoint.yaml"
    config.write_text("extends: [sandbox, appworld-endpoint]\n")
    process = start_draco(
        [
            "train",
            str(config),
            "--setting",
            "no-credit",
            f"data.root={sandbox_root}",
            f"model.path={build_functions_policy(root / 'policy', sandbox_root)}",
            *FUNCTIONS,
            f"run.root={root}",
            "run.name=struck",
            "judge.rule_judge.start=false",
            f"judge.model=openai/{MODEL_NAME}",
            f"judge.api_base={judge.base_url}",
            "judge.api_key_env=KEY_OF_NOBODY",
            f"train.prompts_per_step={PROMPTS}",
            "train.steps=50",
            "train.evaluate_before_after=false",
            f"algorithm.group_size={GROUP}",
            "learner.minibatch_prompts=1",
            "environment.slots=6",
            "environment.slots_per_worker=6",
            "ray.dashboard=false",
        ]
    )
    parts = root / "struck" / "tables" / "trajectories"
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        for step in range(1, LAST + 1):
            while not [*parts.glob(f"step{step:05d}/*.arrow"), *parts.glob(f"step{step:05d}.parquet")]:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            faults = STRIKES.get(step, ())
            for fault in faults:
                if fault == chaos.JUDGE_SERVER:
                    os.kill(judge.pid, signal.SIGKILL)
                else:
                    strike(chaos, fault, process)
            if chaos.JUDGE_SERVER in faults:
                # Its port is free once it has ended.
                os.waitid(os.P_PID, judge.pid, os.WEXITED | os.WNOWAIT)
                # Requests are repeated for longer than a restart takes.
                port = int(judge.base_url.removesuffix("/v1").rsplit(":", 1)[-1])
                stack.enter_context(JudgeServer(latency=1.0, port=port))
        # It becomes an interrupt, so that both end alike.
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stdout + stderr
    return RunDirectory.open(root / "struck"), stdout + stderr


def strike(chaos: ModuleType, fault: str, process: subprocess.Popen[str]) -> None:
    """Kill those of a fault; again where one had ended by itself between the look and the signal."""
    while True:
        victims = chaos.find(fault, process)
        assert victims, (fault, process.poll() is None or process.communicate())
        with contextlib.suppress(ProcessLookupError):
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            return


def test_every_step_is_finished(struck: tuple[RunDirectory, str]) -> None:
    run, printed = struck
    assert "Traceback" not in printed
    steps = finished(run)
    assert steps == [*range(1, len(steps) + 1)]
    # As far as it came before the signal reached it: the last step had begun.
    assert LAST - 1 <= len(steps) < 50
    for line in run.metrics():
        assert line["engine_gap"] is None or line["engine_gap"] < 0.02
        assert line["canary_gap"] is None or line["canary_gap"] < 0.02


def finished(run: RunDirectory) -> list[int]:
    return [line["step"] for line in run.metrics()]


def test_sigterm_keeps_what_was_finished(struck: tuple[RunDirectory, str]) -> None:
    run, printed = struck
    assert "stopping…" in printed
    assert f"finished results are in {run.path}" in printed
    assert f"continue with: draco train --resume {run.path}" in printed
    assert open_to_others(run) == []
    assert run.table("trajectories").column("training_step").to_pylist().count(LAST) >= 1


def test_rewards_are_those_of_the_recorded_verdicts_without_credit(struck: tuple[RunDirectory, str]) -> None:
    run, _ = struck
    rewards = check_rubric_run(run, credit=False)
    assert len([step for step, _ in rewards if step == 1]) == PROMPTS
    assert any(any(group) for group in rewards.values())
    assert "credit" not in run.table("judge_calls").column("phase").to_pylist()


def test_the_program_behind_the_endpoint_makes_the_policys_calls(struck: tuple[RunDirectory, str]) -> None:
    check_functions(struck[0])


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
    steps = finished(run)
    groups = [row for row in run.table("groups").to_pylist() if row["training_step"] in steps]
    assert sorted(row["training_step"] for row in groups) == sorted(steps * PROMPTS)
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

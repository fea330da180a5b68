"""A driver that is killed in a step: the run goes on where it stopped, and no reply is paid for twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from draco_ray.runs.directory import RunDirectory
from tests.support.command import descendants, draco, draco_here, start_draco
from tests.support.holding_judge import HoldingJudge
from tests.support.standing_ray import joining

# The fixture runs the command four times.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS, GROUP = 2, 2, 2
TABLES = ("trajectories", "verdicts", "criteria", "advantages", "groups", "judge_calls")


@pytest.fixture(scope="module")
def judge() -> Iterator[HoldingJudge]:
    with HoldingJudge() as server:
        yield server


@pytest.fixture(scope="module")
def resumed(
    one_ray: str, judge: HoldingJudge, sandbox_root: Path, starter_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A run that was killed while step 2 was scored, with the Ray that it had started, and continued on another."""
    root = tmp_path_factory.mktemp("runs")
    process = start_draco(
        [
            "train",
            "sandbox",
            f"data.root={sandbox_root}",
            f"model.path={starter_model}",
            f"run.root={root}",
            "run.name=killed",
            "judge.rule_judge.start=false",
            "judge.model=openai/rule-judge",
            f"judge.api_base={judge.base}",
            "judge.api_key_env=KEY_OF_NOBODY",
            f"train.prompts_per_step={PROMPTS}",
            f"train.steps={STEPS}",
            "train.evaluate_before_after=false",
            f"algorithm.group_size={GROUP}",
            "learner.minibatch_prompts=1",
            "environment.slots=2",
            "environment.slots_per_worker=2",
            "ray.dashboard=false",
        ]
    )
    try:
        tables = root / "killed" / "tables"
        wait_until(lambda: any(tables.glob("trajectories/step00002/*.arrow")), process)
        # Scoring of step 2 begins seconds later: it waits for the criteria of the whole group.
        judge.answers_before_holding = 0
        # Every phase before scoring is through when both groups' merge is in the books. How many scoring calls are
        # under way then is not known: rollouts that are equal to the letter share one.
        wait_until(lambda: len([*tables.glob("judge_calls/step00002/*union*.arrow")]) == PROMPTS, process)
        wait_until(lambda: judge.held > 0, process)
        workers = descendants(process.pid, "JudgeWorker")
        assert workers
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        end_session(process)
    # What these still had to ask would be answered as well, and then to nobody who keeps it.
    psutil.wait_procs(workers)
    judge.answers_before_holding = None
    directory = root / "killed"

    changed = draco_here("train", "--resume", str(directory), "learner.learning_rate=1e-4", "train.steps=5")
    assert changed.returncode == 2, changed.stdout + changed.stderr
    (line,) = changed.stderr.splitlines()
    assert re.search(r"learner\.learning_rate \([\d.e-]+ -> 0\.0001\)", line)
    assert "train.steps (2 -> 5)" in line

    result = draco("train", "--resume", str(directory), environment=joining(one_ray), timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "continues after step 1" in result.stdout
    assert f"step 2: {PROMPTS * GROUP} finished rollouts taken from the run directory" in result.stdout
    return RunDirectory.open(directory)


def wait_until(done: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end_session(process: subprocess.Popen[str]) -> None:
    """Whatever the driver left in its own session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_tables_hold_every_step_as_in_an_undisturbed_run(resumed: RunDirectory) -> None:
    assert [line["step"] for line in resumed.metrics()] == [1, 2]
    for table in TABLES:
        steps = resumed.table(table).column("training_step").to_pylist()
        assert set(steps) == {1, 2}, table
        # One file a step: nothing is left under way.
        assert not list((resumed.tables / table).glob("step*/")), table
    trajectories = resumed.table("trajectories").to_pylist()
    keys = [(row["training_step"], row["task_id"], row["rollout"]) for row in trajectories]
    assert len(keys) == len(set(keys)) == STEPS * PROMPTS * GROUP
    assert {(row["training_step"], row["policy_version"]) for row in trajectories} == {(1, 0), (2, 1)}
    assert resumed.checkpoint(2).is_dir()


def test_no_question_is_answered_twice_by_the_judge(resumed: RunDirectory, judge: HoldingJudge) -> None:
    assert judge.answered
    assert set(judge.answered.values()) == {1}
    calls = resumed.table("judge_calls").to_pylist()
    # And the books say what each cost when it was asked, not that its replay was free.
    paid = [call for call in calls if call["requests"]]
    # A reply that was kept but not yet in the books when the driver died is replayed without its cost (docs/faults.md).
    assert 0 <= judge.answered.total() - len(paid) <= 1
    # What else was free repeats a paid question of another rollout that is equal to the letter.
    assert len({call["prompt"] for call in calls} - {call["prompt"] for call in paid}) <= 1


def test_engine_and_learner_agree_after_the_restart(resumed: RunDirectory) -> None:
    first, second = resumed.metrics()
    assert second["engine_gap"] < 0.02
    assert second["canary_gap"] < 0.02
    assert first["rollouts"] == second["rollouts"] == PROMPTS * GROUP


def test_a_finished_run_has_nothing_left_to_do(resumed: RunDirectory) -> None:
    before = resumed.metrics_file.read_text()
    result = draco_here("train", "--resume", str(resumed.path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "finished with step 2; nothing is left to do" in result.stdout
    assert resumed.metrics_file.read_text() == before

"""The program as an operator runs it: `ray start --head`, `ray job submit` of every job, token authentication on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from draco_ray.judging.prompts import load_static_rubric
from draco_ray.runs.directory import RunDirectory
from tests.e2e.test_training import GROUP, PROMPTS, arguments
from tests.support.command import draco_here
from tests.support.rewards import check_rubric_run

# The first test's time includes the start of the head.
pytestmark = [pytest.mark.slow, pytest.mark.deployment]

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = ("agent.max_prompt_length=2048", "agent.max_response_length=1024", "agent.max_turns=2")
TASKS, ROLLOUTS = 2, 2
"""Of the authored rubric."""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until something listens on ``port``; a head that ends before is an error that shows what it said."""
    while True:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Head:
    """A Ray head that jobs are submitted to."""

    environment: dict[str, str]
    """Of whoever submits."""
    pid: int

    def names(self, kind: str) -> set[str]:
        """Names of the ``actors`` or ``tasks`` that the dashboard lists, those of ended jobs included."""
        token = Path(self.environment["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="ascii")
        answer = httpx.get(
            f"{self.environment['RAY_ADDRESS']}/api/v0/{kind}",
            params={"limit": 10_000},
            headers={"Authorization": f"Bearer {token}"},
            trust_env=False,
            timeout=None,
        )
        answer.raise_for_status()
        return {str(entry["name"]) for entry in answer.json()["data"]["result"]["result"]}

    def submit(
        self, *words: str, folder: Path | None = None, unwaited: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Submit a ``draco`` command and wait for its end; the head's agent may come up later than its dashboard.

        Args:
            folder: goes with it, and is where it runs.
            unwaited: id of a job whose end is not waited for.
        """
        options = [] if folder is None else ["--working-dir", str(folder)]
        options += [] if unwaited is None else ["--no-wait", "--submission-id", unwaited]
        command = [*RAY, "job", "submit", *options, "--", str(Path(sys.executable).with_name("draco")), *words]
        while True:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
            if "No available agent" not in done.stderr:
                return done
            time.sleep(1)

    def job(self, *words: str) -> str:
        """What ``ray job`` prints."""
        done = subprocess.run([*RAY, "job", *words], env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with started(tmp_path_factory.mktemp("head")) as started_head:
        yield started_head


@contextmanager
def started(files: Path) -> Iterator[Head]:
    """A head whose token and log lie in the folder ``files``."""
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    token, log = files / "token", files / "head.log"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard = free_port(), free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_worker_maximum_startup_concurrency": "8",
        "DRACO_APPWORLD_PYTHON": os.environ.get(
            "DRACO_APPWORLD_PYTHON", str(REPOSITORY / ".venv-appworld" / "bin" / "python")
        ),
    }
    process = subprocess.Popen(
        [
            *(*RAY, "start", "--head", "--block"),
            *("--disable-usage-stats", "--include-log-monitor=false", "--no-monitor", "--num-cpus=4"),
            *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={folder}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            # Not the default ones, which the Ray of another program may hold.
            *(f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"),
            *("--resources", '{"judge": 8}', "--object-store-memory", str(200 << 20)),
        ],
        env={name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(dashboard, process, log)
        yield Head(environment, process.pid)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_training(head: Head, sandbox_root: Path, scripted_policy: Path, tmp_path: Path) -> None:
    words = arguments(sandbox_root, scripted_policy, tmp_path, "job")[1:]
    less = ["train.steps=1", "data.eval_tasks=1", *SHORT]
    submitted = head.submit("train", *words, *less)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "succeeded" in submitted.stdout + submitted.stderr
    assert "held-out TGC" in submitted.stdout
    run = RunDirectory.open(tmp_path / "job")
    assert run.table("trajectories").num_rows == PROMPTS * GROUP
    assert set(run.table("evaluations").column("training_step").to_pylist()) == {0, 1}
    # They know the run they log for.
    (line, *_) = (run.path / "logs" / "RolloutWorker-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["run"] == "job"
    assert len(check_rubric_run(run, credit=True)) == PROMPTS


def wait_for_rollout(head: Head, run: Path) -> None:
    """Wait until the run, which has its job's name, has finished a rollout."""
    while not any((run / "tables" / "trajectories").glob("step*/*.arrow")):
        status = head.job("status", run.name)
        assert "failed" not in status, head.job("logs", run.name)
        assert "succeeded" not in status, head.job("logs", run.name)
        time.sleep(0.2)


def test_a_job_that_is_stopped_says_how_to_continue_and_does(
    head: Head, sandbox_root: Path, scripted_policy: Path, tmp_path: Path
) -> None:
    """Ray kills it three seconds after SIGTERM: nobody has set RAY_JOB_STOP_WAIT_TIME_S."""
    words = arguments(sandbox_root, scripted_policy, tmp_path, "stopped")[1:]
    submitted = head.submit("train", *words, "train.evaluate_before_after=false", *SHORT, unwaited="stopped")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = tmp_path / "stopped"
    wait_for_rollout(head, run)
    head.job("stop", "stopped")
    assert "was stopped" in head.job("status", "stopped")
    assert f"stopping; continue with: draco train --resume {run}" in head.job("logs", "stopped")
    resumed = head.submit("train", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["step"] for line in RunDirectory.open(run).metrics()] == [1, 2]


def test_a_job_whose_head_dies_leaves_no_driver_and_continues_on_another(
    head: Head, sandbox_root: Path, scripted_policy: Path, tmp_path: Path
) -> None:
    words = arguments(sandbox_root, scripted_policy, tmp_path, "orphan")[1:]
    with started(tmp_path) as dying:
        dying.submit("train", *words, "train.evaluate_before_after=false", *SHORT, unwaited="orphan")
        wait_for_rollout(dying, tmp_path / "orphan")
        children = psutil.Process(dying.pid).children(recursive=True)
        (gcs,) = (child for child in children if child.name() == "gcs_server")
        (driver,) = (child for child in children if "run.name=orphan" in child.cmdline())
        gcs.kill()
        driver.wait(timeout=600)
    resumed = head.submit("train", "--resume", str(tmp_path / "orphan"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["step"] for line in RunDirectory.open(tmp_path / "orphan").metrics()] == [1, 2]


def test_a_job_whose_run_would_go_with_it_is_refused(head: Head, sandbox_root: Path, tmp_path: Path) -> None:
    """As `ray job submit --working-dir FOLDER` unpacks a folder, with run.root as it is by default."""
    (tmp_path / "mine.yaml").write_text("extends: sandbox\n", encoding="utf-8")
    submitted = head.submit("train", "mine.yaml", f"data.root={sandbox_root}", folder=tmp_path)
    assert submitted.returncode != 0
    assert "run.root=runs is inside the files submitted with this job" in submitted.stdout


def test_a_static_rubric_out_of_two_tasks(head: Head, sandbox_root: Path, starter_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "rubric.yaml"
    words = [
        *("sandbox", "--out", str(out), "--tasks", str(TASKS), "--rollouts", str(ROLLOUTS)),
        *("--min-applicability", "0.5", "--min-discrimination", "0"),
        *(f"data.root={sandbox_root}", f"model.path={starter_model}", f"run.root={tmp_path}", "run.name=authored"),
        *("environment.slots=4", "environment.slots_per_worker=4"),
    ]
    result = head.submit("rubric", "author", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{TASKS * ROLLOUTS} of {TASKS * ROLLOUTS} rollouts" in result.stdout

    rubric = load_static_rubric(out)
    assert 1 <= len(rubric) <= 24
    # The judge that proposed for one task alone must not leave that task's words in a set for all.
    assert not [criterion.title for criterion in rubric if "The task reads" in criterion.evaluator_instruction]
    assert all(criterion.title in result.stdout for criterion in rubric)

    run = RunDirectory.open(tmp_path / "authored")
    assert run.table("trajectories").num_rows == TASKS * ROLLOUTS
    calls = Counter((call["training_step"], call["phase"]) for call in run.table("judge_calls").to_pylist())
    assert calls == {
        (0, "stage1"): TASKS,
        (0, "stage2"): TASKS * ROLLOUTS,
        (0, "union"): TASKS + 1,
        (1, "score"): TASKS * ROLLOUTS,
    }

    # The figures beside the criteria are those of the archived verdicts, in falling order of the failure rate.
    titles = {row["criterion"]: row["title"] for row in run.table("criteria").to_pylist() if row["training_step"] == 1}
    verdicts = defaultdict(list)
    for row in run.table("verdicts").to_pylist():
        verdicts[titles[row["criterion"]]].append(row["verdict"])
    rates = {}
    for title, given in verdicts.items():
        applicable = [verdict for verdict in given if verdict]
        assert len(given) == TASKS * ROLLOUTS
        if len(applicable) >= 0.5 * len(given):
            rates[title] = applicable.count(-1) / len(applicable)
    assert {criterion.title for criterion in rubric} == set(rates)
    listed = [rates[criterion.title] for criterion in rubric]
    assert listed == sorted(listed, reverse=True)
    assert f"failed {listed[0]:.1%} of" in out.read_text()

    # What an operator reads in the dashboard: who each actor is, and which phase each call. Not of which task: Ray's
    # metrics keep every name that there ever was.
    actors = {"RolloutWorker-0@authored", "PolicyEngine-0@authored", "JudgeWorker-0@authored", "RubricUnion@authored"}
    assert actors <= head.names("actors")
    called = head.names("tasks")
    assert {"RolloutWorkerActor.rollout", "stage1", "stage2", "union", "score"} <= called
    tasks = set(run.table("trajectories").column("task_id").to_pylist())
    assert not [name for name in called if any(task in name for task in tasks)]

    again = draco_here("rubric", "author", *words)
    assert again.returncode == 2
    assert "already exists" in again.stderr

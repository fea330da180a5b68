"""The program as an operator runs it: `ray start --head`, `ray job submit`, token authentication on."""

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
from pathlib import Path

import pytest

from draco_ray.runs.directory import RunDirectory
from tests.e2e.test_training import GROUP, PROMPTS, arguments

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, head: subprocess.Popen[bytes], log: Path) -> None:
    """Until something listens on ``port``; a head that ends before is an error that shows what it said."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError(f"nothing listens on port {port}: {log.read_text()}")


def submit(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Submit a job and wait for its end; the head's agent may come up later than its dashboard."""
    command = [*RAY, "job", "submit", "--working-dir", str(REPOSITORY / "jobs"), "--", *words]
    deadline = time.monotonic() + 120
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(1)


@pytest.mark.timeout(600)
def test_submitted_to_a_head(sandbox_root: Path, starter_model: Path, tmp_path: Path) -> None:
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    token = tmp_path / "token"
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
    head = subprocess.Popen(
        [
            *(*RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=4"),
            *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={folder}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *("--resources", '{"judge": 8}', "--object-store-memory", str(200 << 20)),
        ],
        env={name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
        stdout=(tmp_path / "head.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(dashboard, head, tmp_path / "head.log")
        words = arguments(sandbox_root, starter_model, tmp_path, "job")[1:]
        submitted = submit([sys.executable, "train.py", *words, "train.steps=1", "data.eval_tasks=1"], environment)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        assert "succeeded" in submitted.stdout + submitted.stderr
        assert "held-out TGC" in submitted.stdout
    finally:
        head.terminate()
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
    run = RunDirectory.open(tmp_path / "job")
    assert run.table("trajectories").num_rows == PROMPTS * GROUP
    # The workers of a cluster that was started elsewhere know the run they log for.
    (line, *_) = (run.path / "logs" / "RolloutWorker-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["run"] == "job"
    assert set(run.table("evaluations").column("training_step").to_pylist()) == {0, 1}

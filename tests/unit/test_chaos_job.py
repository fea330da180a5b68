"""The job that kills a run's processes: it waits for them, as they come back by themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.support.jobs import load_job

JOB = load_job("chaos")
PARENT = """
import subprocess, sys
sys.stdin.readline()
subprocess.run([sys.executable, "-c", "input()", "the engine core"])
"""


@pytest.fixture
def run() -> Iterator[subprocess.Popen[str]]:
    """Stands for a run whose engine's process is on its way back: it starts one when it reads a line."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, text=True)
    yield process
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        child.kill()
    process.kill()
    process.communicate()


def test_a_process_that_is_not_there_yet_is_waited_for(
    run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0

    def processes(driver: int) -> list[int]:
        nonlocal looked
        looked += 1
        if looked == 3:
            assert run.stdin is not None
            run.stdin.write("go\n")
            run.stdin.flush()
        found: list[int] = JOB.processes(driver, "the engine core")
        assert found == [] or looked >= 3
        return found

    monkeypatch.setitem(JOB.FAULTS, "engine core", processes)
    (victim,) = JOB.find("engine core", run)
    assert psutil.Process(victim).ppid() == run.pid


def test_nobody_is_found_in_a_run_that_has_ended(run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOB.FAULTS, "engine core", lambda driver: [])
    run.kill()
    run.wait()
    assert JOB.find("engine core", run) == []

"""The job that does something to a run: it waits for processes that come back by themselves; what it does to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

    def processes(scene: Any) -> list[int]:
        nonlocal looked
        looked += 1
        if looked == 3:
            assert run.stdin is not None
            run.stdin.write("go\n")
            run.stdin.flush()
        found: list[int] = JOB.processes(scene.driver, "the engine core")
        assert found == [] or looked >= 3
        return found

    monkeypatch.setitem(JOB.FAULTS, "engine core", JOB.Fault(find=processes))
    (victim,) = JOB.find("engine core", run)
    assert psutil.Process(victim).ppid() == run.pid


def test_nobody_is_found_in_a_run_that_has_ended(run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOB.FAULTS, "engine core", JOB.Fault(find=lambda scene: []))
    run.kill()
    run.wait()
    assert JOB.find("engine core", run) == []


FORKS = """
import os
if os.fork():
    print("forked", flush=True)
input()
"""


def test_what_a_process_has_just_started_is_not_taken_for_it() -> None:
    """Until it runs its own program, a child has its parent's command line."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, "the engine core"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as core:
        assert core.stdout is not None
        assert core.stdout.readline() == "forked\n"
        scene = SimpleNamespace(driver=os.getpid())
        assert len(JOB.processes(scene.driver, "the engine core")) == 2
        assert JOB.of_words("the engine core")(scene) == [core.pid]
        core.communicate("\n\n")


INTERRUPTED = """
import signal, sys
def first(*_):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
    print("first", flush=True)
signal.signal(signal.SIGINT, first)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[str]]:
    """A process that survives one Ctrl-C."""
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def slept(monkeypatch: pytest.MonkeyPatch, sleep: Any) -> None:
    """What happens while the job sleeps."""
    monkeypatch.setattr(JOB, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


def test_a_process_is_stopped_for_a_while_and_goes_on(
    victim: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def sleep(seconds: float) -> None:
        _, status = os.waitpid(victim.pid, os.WUNTRACED)
        seen.append((seconds, os.WIFSTOPPED(status)))

    slept(monkeypatch, sleep)
    JOB.stop_for_a_while(None, [victim.pid])
    assert seen == [(JOB.STOP_SECONDS, True)]
    victim.send_signal(signal.SIGINT)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "first\n"


def test_the_second_ctrl_c_comes_after_the_first(
    victim: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []

    def sleep(seconds: float) -> None:
        if seconds == JOB.BETWEEN_SIGNALS_SECONDS:
            assert victim.stdout is not None
            heard.append(victim.stdout.readline())

    slept(monkeypatch, sleep)
    JOB.interrupt_twice(None, [victim.pid])
    assert heard == ["first\n"]
    assert victim.wait() == 7


def test_data_is_taken_away_whole(tmp_path: Path) -> None:
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "file").write_text("kept")
    JOB.take_data(SimpleNamespace(world=tmp_path / "world"), [])
    assert not (tmp_path / "world").exists()
    assert (JOB.gone(tmp_path / "world") / "file").read_text() == "kept"


def test_who_may_not_mount_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="cannot be mounted"), JOB.mounted(tmp_path, 1):
        pass


def test_a_small_disk_is_filled_to_the_last_byte(tmp_path: Path) -> None:
    try:
        with JOB.mounted(tmp_path, 1):
            JOB.fill(tmp_path)
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "more").write_bytes(bytes(4096))
    except SystemExit as missing:
        pytest.skip(str(missing))


def test_a_folder_is_read_only_until_the_run_has_ended(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            JOB.make_read_only(SimpleNamespace(run=tmp_path, stack=stack), [])
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(str(error))
        with pytest.raises(OSError, match="Read-only file system"):
            (tmp_path / "file").touch()
    (tmp_path / "file").touch()


def test_each_fault_can_be_asked_for_by_name() -> None:
    assert not [name for name in JOB.FAULTS if "," in name]


def test_the_clock_of_a_process_goes_back_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with ExitStack() as stack:
        JOB.own_clock(tmp_path, stack)
        code = "import sys, time\nprint(time.time(), flush=True)\nsys.stdin.readline()\nprint(time.time())"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            before = float(process.stdout.readline())
            JOB.set_clock_back(SimpleNamespace(world=tmp_path / "world"), [])
            after = float(process.communicate("\n")[0])
    assert -3600 <= after - before < -3000
    assert "PYTHONPATH" not in os.environ


def test_what_is_changed_between_stop_and_resume(tmp_path: Path) -> None:
    specs, run = tmp_path / "data" / "tasks" / "t1" / "specs.json", tmp_path / "run"
    specs.parent.mkdir(parents=True)
    specs.write_text('{"instruction": "Pay."}')
    run.mkdir()
    (run / "run.json").write_text('{"schema_version": 3}')
    (run / "manifest.json").write_text('{"machine": {"machine": "x86_64", "torch": "2.13"}}')
    for between in (JOB.edit_tasks, JOB.upgrade_packages, JOB.another_schema):
        between(run, tmp_path)
    assert json.loads(specs.read_text()) == {"instruction": "Pay. Now."}
    assert json.loads((run / "run.json").read_text()) == {"schema_version": 4}
    assert json.loads((run / "manifest.json").read_text())["machine"] == {"machine": "x86_64", "torch": "0.0.1"}

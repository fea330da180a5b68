"""Processes that print into a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from draco_ray.engine.child import Child, Scrubber
from draco_ray.engine.held import HeldFolder

PROGRAM = """\
import os, socket, time
socket.socket(socket.AF_UNIX).bind(os.path.join(os.environ["SOCKETS"], "left"))
print(os.environ["SOCKETS"], flush=True)
time.sleep(600)
"""
HOLDS = """\
import sys
from draco_ray.engine.held import HeldFolder
folder = HeldFolder()
(folder.path / "left").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def started(log: Path, environment: dict[str, str]) -> tuple[Child, Path]:
    """One that has made its socket, and the folder of that."""
    child = Child([sys.executable, "-c", PROGRAM], environment, log, Scrubber([]), temporary="SOCKETS")
    while not child.last_line:
        assert child.returncode is None
        time.sleep(0.01)
    return child, Path(child.last_line)


def test_what_a_killed_process_leaves_in_its_folder_goes_with_it(tmp_path: Path) -> None:
    child, folder = started(tmp_path / "log", {})
    os.kill(child.pid, signal.SIGKILL)
    assert (folder / "left").is_socket()
    child.end()
    assert not folder.exists()
    child.end()


def test_a_folder_that_was_named_is_left_alone(tmp_path: Path) -> None:
    child, folder = started(tmp_path / "log", {"SOCKETS": str(tmp_path)})
    child.end()
    assert folder == tmp_path
    assert (folder / "left").is_socket()


def test_what_the_owner_of_a_folder_leaves_goes_with_the_next_one_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert left.parent == tmp_path
        first = HeldFolder()
        assert (left / "left").exists()
        owner.kill()
        owner.wait()
    assert (left / "left").exists()
    second = HeldFolder()
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    for folder in (first, second, second):
        folder.remove()
    assert list(tmp_path.iterdir()) == []

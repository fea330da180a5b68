"""Processes that print into a log."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from draco_ray.engine.child import Child, Scrubber

PROGRAM = """\
import os, socket, time
socket.socket(socket.AF_UNIX).bind(os.path.join(os.environ["SOCKETS"], "left"))
print(os.environ["SOCKETS"], flush=True)
time.sleep(600)
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

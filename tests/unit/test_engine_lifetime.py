"""A child process that dies with its parent, even when that one is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

PARENT = """
import multiprocessing, sys, time
from draco_ray.engine.child import die_with_parent

def child(ready):
    die_with_parent()
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=child, args=(ready,))
    process.start()
    ready.wait()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_a_child_goes_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
    finally:
        parent.kill()
        parent.communicate()
    assert psutil.wait_procs([child], timeout=600)[1] == []


def test_a_process_without_such_a_parent_is_left_alone() -> None:
    code = "from draco_ray.engine.child import die_with_parent; die_with_parent(); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"

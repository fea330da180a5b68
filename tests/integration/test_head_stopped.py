"""A Ray of the driver's own whose head is stopped: leaving it would wait for ever."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, os, signal, psutil
from draco_ray.training.cluster import head_address, head_answers, leave_ray, start_ray
start_ray(num_cpus=1, include_dashboard=False)
assert asyncio.run(head_answers(head_address(), 60))
(head,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server"]
os.kill(head.pid, signal.SIGSTOP)
assert not asyncio.run(head_answers(head_address(), 2))
leave_ray(2)
print(head.pid)
"""


def test_a_process_whose_head_is_stopped_ends_and_takes_it_along() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    # A failed assertion ends it with 1, too.
    assert (ended.returncode, bool(ended.stdout)) == (1, True), ended.stderr
    pid = int(ended.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        # Ray's own reaper ends it after its parent.
        psutil.Process(pid).wait(300)

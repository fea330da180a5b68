"""A disk that is really full: one line from whoever writes, and what was written before is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE = 1 << 20
# A mount of its own, which ends with the process.
MOUNTED = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = f'mount -t tmpfs -o size={SIZE} none "$0"'


def mounts_are_allowed(folder: Path) -> bool:
    try:
        return subprocess.run([*MOUNTED, MOUNT, str(folder)], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_is_one_line_and_nothing_is_torn(tmp_path: Path) -> None:
    if not mounts_are_allowed(tmp_path):
        pytest.skip("this host lets no user mount a file system of their own")
    done = subprocess.run(
        [*MOUNTED, f'{MOUNT} && exec "$1" -m tests.support.full_disk "$0"', str(tmp_path), sys.executable],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    before, answers, written, later, created = seen["messages"]
    assert before.startswith(
        f"run directory {tmp_path / 'run'}: its disk has 0.00 GiB free, but a training step may write"
    )
    assert answers.startswith(f"judge replies cannot be stored in {tmp_path / 'run' / 'judge_cache'}: ")
    assert created.startswith(f"run directory {tmp_path}/another-")
    assert "No space left on device; set run.root" in created
    # Nor is a log line that cannot be written a traceback.
    assert done.stderr == ""
    assert written.startswith(f"run directory {tmp_path / 'run'} cannot be written: ")
    # Nobody waits for most writes: who asks next is told.
    assert later == written
    assert all("\n" not in message for message in seen["messages"])
    # What was paid for can be read on, also by a process that opens it now.
    assert (seen["rows of step 1"], seen["first answer"]) == (4, True)

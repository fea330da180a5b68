"""The peak of a process tree, read exactly only where it may have grown."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from draco_ray.training import memory
from draco_ray.training.memory import PeakMemory, tree_memory_bytes

GROWS = "import sys; held = bytearray(b'x' * (96 << 20)); print('grown', flush=True); sys.stdin.read()"


def test_what_a_child_took_counts_after_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(pid: int | None = None) -> int:
        read.append(tree_memory_bytes(pid))
        return read[-1]

    monkeypatch.setattr(memory, "tree_memory_bytes", counted)
    with PeakMemory(every_seconds=0.01) as peak:
        while not peak.peak_bytes:
            time.sleep(0.01)
        before = peak.peak_bytes
        with subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            while peak.peak_bytes < before + (90 << 20):
                time.sleep(0.01)
            readings = len(read)
            child.communicate()
    assert peak.peak_bytes >= before + (90 << 20)
    # Memory that shrinks is not read again.
    assert len(read) <= readings + 1

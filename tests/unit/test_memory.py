"""The peak memory of a process tree."""

from __future__ import annotations

import subprocess
import sys

CHILD = "import sys; held = bytearray(b'x' * (96 << 20)); print('grown', flush=True); sys.stdin.read()"
GROWS = f"""
import subprocess, sys, time
from draco_ray.training import watchdog

watchdog.COST = 0
with watchdog.PeakMemory(every_seconds=0.01) as peak:
    while not peak.peak_bytes:
        time.sleep(0.01)
    before = peak.peak_bytes
    with subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        while peak.peak_bytes < before + (90 << 20):
            time.sleep(0.01)
        child.communicate()
print(peak.peak_bytes - before >> 20)
"""


def test_memory_of_a_child_counts_after_the_child_has_ended() -> None:
    # In a process of its own, which has no other children that come and go.
    grown = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True).stdout
    assert int(grown) >= 90

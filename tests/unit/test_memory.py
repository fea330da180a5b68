"""The peak of a process tree, read exactly only where it may have grown."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from draco_ray.training import memory
from draco_ray.training.memory import AGAIN_SECONDS, SHARE, NodeMemory, PeakMemory, described

CHILD = "import sys; held = bytearray(b'x' * (96 << 20)); print('grown', flush=True); sys.stdin.read()"
GROWS = f"""
import subprocess, sys, time
from draco_ray.training import memory
from draco_ray.training.memory import PeakMemory, tree_memory_bytes

read = []

def counted(pid=None):
    read.append(tree_memory_bytes(pid))
    return read[-1]

memory.tree_memory_bytes = counted
with PeakMemory(every_seconds=0.01) as peak:
    while not peak.peak_bytes:
        time.sleep(0.01)
    before = peak.peak_bytes
    with subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        while peak.peak_bytes < before + (90 << 20):
            time.sleep(0.01)
        readings = len(read)
        child.communicate()
print(peak.peak_bytes - before >> 20, len(read) - readings)
"""


def test_what_a_child_took_counts_after_it_has_ended() -> None:
    # In a process of its own, which has no other children that come and go.
    told = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True).stdout.split()
    grown, readings = map(int, told)
    assert grown >= 90
    # Memory that shrinks is not read again.
    assert readings <= 1


def test_what_grows_at_every_look_is_read_for_a_part_of_the_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, readings, sizes = [0.0], list[float](), itertools.count(1 << 30, 1 << 30)

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    def read(pid: int | None) -> int:
        readings.append(now[0])
        pass_by(2.0)
        return 1

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(memory, "_sum", lambda pid, size: next(sizes))
    monkeypatch.setattr(memory, "tree_memory_bytes", read)
    watched = PeakMemory()
    monkeypatch.setattr(watched, "_done", SimpleNamespace(is_set=lambda: now[0] > 1000, wait=pass_by))
    watched._watch()
    assert 1000 / AGAIN_SECONDS < len(readings) <= 1 + 1000 / (SHARE * 2.0)
    assert readings[0] == 0


def test_nodes_are_named_with_what_they_used_the_largest_first() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    # Of the third nothing was heard.
    assert described(addresses, {"a": 3 << 30, "b": 5 << 29}) == "10.0.0.1 3.0 GiB, 10.0.0.2 2.5 GiB"


async def test_a_head_that_is_gone_is_asked_nothing_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for its answer in a thread, which the end of the run would wait for in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    asked: list[str] = []
    monkeypatch.setattr(memory, "head_address", lambda: address)

    def none_yet() -> list[object]:
        asked.append("nodes")
        return []

    monkeypatch.setattr(ray, "nodes", none_yet)
    nodes = NodeMemory()
    await nodes.look()
    assert asked == []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        await nodes.look()
    assert asked == ["nodes"]
    assert str(nodes) == ""

"""Peak memory of a run on one machine: this process and everything below it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import psutil

GROWTH = 1.02
"""Factor of resident memory at which the exact figure is read anew."""


def tree_memory_bytes(pid: int | None = None) -> int:
    """Proportional set size of a process and its descendants: a page shared by n of them counts once.

    Processes that end while being read count as nothing.
    """
    return _sum(pid, lambda process: process.memory_full_info().pss)


def _sum(pid: int | None, size: Callable[[psutil.Process], int]) -> int:
    total = 0
    root = psutil.Process(pid or os.getpid())
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            total += size(process)
    return total


class PeakMemory:
    """Samples `tree_memory_bytes` in a thread while a ``with`` block runs.

    The kernel walks every page for that, a second of CPU for a run's processes; so it is read only where the sum of
    resident memory, which counts shared pages often but costs nothing, is larger than at the last reading.
    """

    def __init__(self, every_seconds: float = 5.0) -> None:
        self._every = every_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        highest = 0.0
        while not self._done.is_set():
            resident = _sum(None, lambda process: process.memory_info().rss)
            if resident > GROWTH * highest:
                highest = resident
                self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
            self._done.wait(self._every)

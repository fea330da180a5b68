"""Peak memory of a run on one machine: this process and everything below it."""

from __future__ import annotations

import contextlib
import os
import threading

import psutil


def tree_memory_bytes(pid: int | None = None) -> int:
    """Proportional set size of a process and its descendants: a page shared by n of them counts once.

    Processes that end while being read count as nothing.
    """
    total = 0
    root = psutil.Process(pid or os.getpid())
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total


class PeakMemory:
    """Samples `tree_memory_bytes` in a thread while a ``with`` block runs."""

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
        while not self._done.is_set():
            self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
            self._done.wait(self._every)

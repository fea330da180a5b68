"""Peak memory of a run."""

from __future__ import annotations

import contextlib
import threading
import time

import psutil

COST = 30
"""Reading memory may take at most one part in so many of the time: the kernel walks every page."""


def tree_memory_bytes() -> int:
    """Proportional set size of this process and its descendants: a page shared by n of them counts once.

    Processes that end while being read count as nothing.
    """
    total, root = 0, psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total


class PeakMemory:
    """Samples `tree_memory_bytes` in a thread while a ``with`` block runs."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        """``every_seconds``: shortest pause between two samples."""
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
            started = time.monotonic()
            self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
            self._done.wait(max(self._every, COST * (time.monotonic() - started)))

"""Tying a child process to the life of the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def die_with_parent() -> None:
    """Kill this process with SIGKILL as soon as the one that started it has ended, however that ended.

    Does nothing in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()

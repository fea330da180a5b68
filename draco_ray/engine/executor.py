"""vLLM's executors, tied to the life of the process that started them.

vLLM's engine core is a process of its own and does not notice when its parent is killed: an actor that Ray ends with
SIGKILL would leave it behind, with its memory. These executors live in that core process and take it down.

The single-worker one has a second purpose. On CPU vLLM replaces its own single-process executor by one that starts a
third process, to bind threads to cores: 7 more seconds of start and 600 MiB, for a binding that a shared machine does
not want. An executor given as a class is left alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor


def die_with_parent() -> None:
    """Kill this process, without ceremony, as soon as the one that spawned it has ended.

    Does nothing in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


class AttachedExecutor(UniProcExecutor):
    """One worker, inside the engine core's process."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class AttachedMultiprocExecutor(MultiprocExecutor):
    """One worker process a tensor-parallel rank; vLLM ends these itself when the core has gone."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()

"""vLLM's executors, tied to the life of the process that started them.

vLLM's engine core is a process of its own and does not notice when its parent is killed: an actor that Ray ends with
SIGKILL would leave it behind, with its memory. These executors live in that core process and take it down.

The single-worker one has a second purpose. On CPU vLLM replaces its own single-process executor by one that starts a
third process, to bind threads to cores: 7 more seconds of start and 600 MiB, for a binding that a shared machine does
not want. An executor given as a class is left alone.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from draco_ray.engine.child import die_with_parent


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

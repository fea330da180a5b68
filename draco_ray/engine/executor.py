"""vLLM executors that end with the process that started the engine.

vLLM's engine core is a separate process that does not notice when its parent is killed: an actor that Ray kills would
leave it behind, with its memory. These executors run in the core process and kill it.

`AttachedExecutor` has a second purpose: on CPUs vLLM would replace its own single-process executor by one that starts a
third process to bind threads to cores, which takes 7 seconds and 600 MiB. It does not replace an executor that is given
as a class.
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
    """One worker process for each tensor-parallel rank; vLLM ends them when the core has ended."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()

"""An engine core that is forked from its front end's process instead of started as a new interpreter.

A new interpreter imports PyTorch, vLLM and the model's class once more, which takes seconds and memory; a fork needs
neither. vLLM itself forks its core wherever it may; inside a Ray actor it does not, since what it runs there might call
Ray. The core of one worker on CPU calls nothing of Ray's.

A fork is safe only where nothing of the process needs its other threads afterwards: in a process that is the engine's
alone, with one OpenMP thread (libgomp's own threads do not survive a fork), on CPU (CUDA's context does not either).
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkContext, ForkProcess


class _Core(ForkProcess):
    """A forked process that is called by its own name; in a Ray actor only Ray's own call can change it."""

    def run(self) -> None:
        if "ray" in sys.modules:
            import ray

            ray._raylet.setproctitle(f"VLLM::{self.name}")  # type: ignore[attr-defined]  # Compiled; its stubs lack it.
        super().run()


class _Context(ForkContext):
    Process = _Core


@contextlib.contextmanager
def forked_core() -> Iterator[None]:
    """Fork the engine core that vLLM starts inside the block.

    What the parent has imported is kept from the child's garbage collector, which would copy every page it looks at.
    """
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    utils.get_mp_context = _Context
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        utils.get_mp_context = before

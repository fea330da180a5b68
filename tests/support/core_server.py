"""Engine cores of a test process that are forked from a server, which has imported vLLM once.

vLLM starts each as a new interpreter, which imports for 15 to 20 seconds of a slow core what the last one had. The core
is a process as ever, with the variables of whoever starts it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "draco_ray.engine.executor",
    "draco_ray.engine.cpu_lora",
)


class _Environment:
    """This process's variables at the time at which a core is started."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return dict, (dict(os.environ),)


def _run(environment: dict[str, str], target: Callable[..., None], named: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(**named)


class _Core(ForkServerProcess):
    def __init__(self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any]) -> None:
        super().__init__(target=_run, name=name, args=(_Environment(), target, kwargs))


class _Context(ForkServerContext):
    Process = _Core


@contextlib.contextmanager
def forked_cores() -> Iterator[None]:
    """Let vLLM's engines of this process get such cores inside the block."""
    from vllm.v1.engine import utils

    context = _Context()
    context.set_forkserver_preload(list(IMPORTED))
    before = utils.get_mp_context
    utils.get_mp_context = lambda: context
    try:
        yield
    finally:
        utils.get_mp_context = before

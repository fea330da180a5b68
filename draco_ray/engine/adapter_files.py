"""Versions of the LoRA adapter as directories, which is the only form in which vLLM takes one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from draco_ray.errors import EngineError
from draco_ray.records import Adapter
from draco_ray.temp_dirs import try_lock

LAYERS = "base_model.model.model.layers."
WRAPPED_LAYERS = "base_model.model.model.language_model.layers."
WRAPPER = "ForConditionalGeneration"


class AdapterFiles:
    """One engine's adapter versions below ``<root>/<run>/<engine>``, and whatever else is to go with it.

    The root is usually in memory (/dev/shm), so what a killed engine leaves there would cost memory until the machine
    is started anew. A living engine therefore holds a lock on its directory, and every engine that starts removes the
    directories that nobody holds.
    """

    def __init__(self, root: Path, run: str, engine: str) -> None:
        self.directory = root / run / engine
        self._root = root
        self._held: int | None = None
        self._loads: Counter[int] = Counter()

    def claim(self) -> None:
        """Start with an empty directory of this engine's own.

        Raises: EngineError when it cannot be written or belongs to a living engine.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            # One engine at a time: no other may sweep between making a directory and locking it.
            with _locked(self._root):
                self._sweep()
                self.directory.mkdir(parents=True, exist_ok=True)
                self._held = try_lock(self.directory)
        except OSError as error:
            raise EngineError(
                f"adapter directory {self.directory}: {error.strerror}; "
                "set engine.adapter_directory to a folder this user can write"
            ) from error
        if self._held is None:
            raise EngineError(
                f"adapter directory {self.directory}: another engine uses it; expected a run of its own; "
                "set another run.name or end the other run"
            )

    def write(self, adapter: Adapter, architectures: Sequence[str]) -> Path:
        """Write one version to a directory that no other version, nor another load of this one, has ever had.

        vLLM's prefix cache knows an adapter by its path: a path used twice would answer with the old adapter's keys
        and values.
        """
        self._loads[adapter.version] += 1
        again = self._loads[adapter.version] - 1
        path = self.directory / (f"v{adapter.version}-again{again}" if again else f"v{adapter.version}")
        path.mkdir()
        tensors = {
            engine_tensor_name(name, architectures): np.ascontiguousarray(values)
            for name, values in adapter.tensors.items()
        }
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(adapter.config, default=sorted), encoding="utf-8")
        return path

    def discard(self, path: Path) -> None:
        """Remove a version's files."""
        shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything this engine wrote, and the run's directory when no other engine uses it."""
        if self._held is not None:
            _remove(self.directory)
            os.close(self._held)
            self._held = None

    def _sweep(self) -> None:
        for directory in self._root.glob("*/*/"):
            with contextlib.suppress(OSError):  # Another user's.
                held = try_lock(directory)
                if held is not None:
                    _remove(directory)
                    os.close(held)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def engine_tensor_name(name: str, architectures: Sequence[str]) -> str:
    """The name vLLM finds a PEFT tensor under.

    The learner trains a checkpoint's text model alone (``model.layers``). Where the checkpoint is a wrapper around a
    text model and a vision tower, vLLM expects the wrapper's names, and passes over others without a word.
    """
    if name.startswith(LAYERS) and any(architecture.endswith(WRAPPER) for architecture in architectures):
        return WRAPPED_LAYERS + name.removeprefix(LAYERS)
    return name

"""Adapter versions as directories, the only form in which vLLM loads a LoRA adapter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from draco_ray.errors import EngineError
from draco_ray.records import Adapter
from draco_ray.temp_dirs import PrivateTempDir

LAYERS = "base_model.model.model.layers."
WRAPPED_LAYERS = "base_model.model.model.language_model.layers."
WRAPPER = "ForConditionalGeneration"


class AdapterFiles:
    """The adapter versions of one engine, in a private directory that also holds vLLM's sockets.

    The directory is usually in memory (/dev/shm). The next engine that starts removes the files of a killed engine
    (`draco_ray.temp_dirs`).
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._held: PrivateTempDir | None = None
        self._numbers = itertools.count()

    @property
    def directory(self) -> Path:
        """The directory, after `open`."""
        assert self._held is not None
        return self._held.path

    def open(self) -> None:
        """Make the directory. Raises: EngineError if it cannot be written."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            self._held = PrivateTempDir(self._place)
        except OSError as error:
            raise EngineError(
                f"adapter directory {self._place}: {error.strerror}; "
                "set engine.adapter_directory to a folder this user can write"
            ) from error

    def write(self, adapter: Adapter, architectures: Sequence[str]) -> Path:
        """Write one version and return its directory, whose path is used only once.

        vLLM's prefix cache identifies an adapter by its path: if a path were reused, the cache would return keys and
        values of the old adapter.
        """
        path = self.directory / f"v{adapter.version}-{next(self._numbers)}"
        path.mkdir()
        tensors = {
            engine_tensor_name(name, architectures): np.ascontiguousarray(values)
            for name, values in adapter.tensors.items()
        }
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(adapter.config, default=sorted), encoding="utf-8")
        return path

    def remove(self) -> None:
        """Remove everything. Safe to call twice, and before `open`."""
        if self._held is not None:
            self._held.remove()


def engine_tensor_name(name: str, architectures: Sequence[str]) -> str:
    """The name that vLLM expects for a PEFT tensor.

    The learner trains only a checkpoint's text model (``model.layers``). If the checkpoint wraps a text model and a
    vision tower, vLLM expects the wrapper's names and silently ignores others.
    """
    if name.startswith(LAYERS) and any(architecture.endswith(WRAPPER) for architecture in architectures):
        return WRAPPED_LAYERS + name.removeprefix(LAYERS)
    return name

"""Versions of the LoRA adapter as directories, which is the only form in which vLLM takes one."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from draco_ray.errors import EngineError
from draco_ray.records import Adapter

LAYERS = "base_model.model.model.layers."
WRAPPED_LAYERS = "base_model.model.model.language_model.layers."
WRAPPER = "ForConditionalGeneration"


class AdapterFiles:
    """One engine's adapter versions below ``<root>/<run>/<engine>``."""

    def __init__(self, root: Path, run: str, engine: str) -> None:
        self.directory = root / run / engine
        self._loads: Counter[int] = Counter()

    def clear(self) -> None:
        """Start empty: what a killed engine of the same name left behind goes.

        Raises: EngineError when the directory cannot be written.
        """
        self.remove()
        try:
            self.directory.mkdir(parents=True)
        except OSError as error:
            raise EngineError(
                f"adapter directory {self.directory}: {error.strerror}; "
                "set engine.adapter_directory to a folder this user can write"
            ) from error

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
        shutil.rmtree(self.directory, ignore_errors=True)
        try:
            self.directory.parent.rmdir()
        except OSError:
            return


def engine_tensor_name(name: str, architectures: Sequence[str]) -> str:
    """The name vLLM finds a PEFT tensor under.

    The learner trains a checkpoint's text model alone (``model.layers``). Where the checkpoint is a wrapper around a
    text model and a vision tower, vLLM expects the wrapper's names, and passes over others without a word.
    """
    if name.startswith(LAYERS) and any(architecture.endswith(WRAPPER) for architecture in architectures):
        return WRAPPED_LAYERS + name.removeprefix(LAYERS)
    return name

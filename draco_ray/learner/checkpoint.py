"""Checkpoint files: adapter, optimizer and counters.

They do not use pickle, because users also read run directories of other people.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from draco_ray.errors import LearnerError
from draco_ray.runs.checkpoints import (
    ADAPTER,
    ADAPTER_CONFIG,
    OPTIMIZER,
    checkpoint_damage,
    read_updates,
    write_counters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The content of a checkpoint, copied to host memory, so that training can continue while it is written."""

    adapter: Mapping[str, NDArray[Any]]
    adapter_config: Mapping[str, Any]
    """PEFT's ``adapter_config.json``."""
    optimizer: Mapping[str, NDArray[Any]]
    updates: int
    """Number of optimizer updates so far."""

    def write(self, directory: Path) -> None:
        """Write the checkpoint to ``directory``; an existing checkpoint is replaced.

        The directory gets its name only after all files are synced to disk, so no crash leaves half a checkpoint.

        Raises:
            OSError: a file cannot be written.
            LearnerError: the checkpoint is damaged: weights are not finite, or the files differ from what was written.
        """
        folder = directory.with_name(f".{directory.name}.unfinished")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file(dict(self.adapter), folder / ADAPTER, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self.adapter_config, indent=2), encoding="utf-8")
        save_file(dict(self.optimizer), folder / OPTIMIZER)
        write_counters(folder, directory.name, self.updates)
        if (damage := checkpoint_damage(folder)) is not None:
            raise LearnerError(
                f"checkpoint {directory.name} is damaged and was not kept: {damage}; continue the run from the "
                "previous checkpoint"
            )
        for path in (*folder.iterdir(), folder):
            _sync(path)
        replaced = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():
            directory.rename(replaced)
        folder.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync(directory.parent)

    @classmethod
    def read(cls, directory: Path) -> Snapshot:
        """Read a checkpoint. Raises: LearnerError, one line that names the damaged file."""
        if (damage := checkpoint_damage(directory)) is not None:
            raise LearnerError(
                f"checkpoint {directory} is damaged: {damage}; resume the run, which starts from an undamaged "
                "checkpoint"
            )
        return cls(
            adapter=load_file(directory / ADAPTER),
            adapter_config=json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")),
            optimizer=load_file(directory / OPTIMIZER),
            updates=read_updates(directory),
        )


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

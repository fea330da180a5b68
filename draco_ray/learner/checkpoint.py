"""The files of a checkpoint: none of them can hold code, since they are read from run directories of others, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from draco_ray.errors import LearnerError
from draco_ray.learner.checkpoint_files import begin, finish
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
    """What a checkpoint holds, in memory that training does not change any more."""

    adapter: Mapping[str, Tensor]
    adapter_config: Mapping[str, Any]
    """As PEFT writes it."""
    optimizer: Mapping[str, Tensor]
    updates: int

    def write(self, directory: Path) -> None:
        """Make the folder of the checkpoint; it replaces one that is there.

        It appears under its name when its bytes are on the disk, or not at all: neither the end of this process nor
        that of the machine leaves half of one.

        Raises:
            OSError: it cannot be written.
            LearnerError: it is not sound: the weights are not finite, or the disk returns other bytes.
        """
        self.write_files(begin(directory), directory.name)
        finish(directory)

    def write_files(self, folder: Path, name: str) -> None:
        """Write the files of the checkpoint ``name`` into a folder that is there.

        Raises:
            OSError: they cannot be written.
            LearnerError: they are not sound.
        """
        save_file(dict(self.adapter), folder / ADAPTER, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self.adapter_config, indent=2), encoding="utf-8")
        save_file(dict(self.optimizer), folder / OPTIMIZER)
        write_counters(folder, name, self.updates)
        if (damage := checkpoint_damage(folder)) is not None:
            raise LearnerError(f"checkpoint {name} is not kept: {damage}; continue the run from the one before")


def read_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The adapter's tensors, the optimizer's, and the number of updates.

    Raises: LearnerError, one line that names the file which is damaged.
    """
    if (damage := checkpoint_damage(directory)) is not None:
        raise LearnerError(f"checkpoint {directory} is damaged: {damage}; continue the run: it begins from a sound one")
    return load_file(directory / ADAPTER), load_file(directory / OPTIMIZER), read_updates(directory)

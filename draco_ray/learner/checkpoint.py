"""The files of a checkpoint: none of them can hold code, since they are read from run directories of others, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draco_ray.errors import LearnerError
from draco_ray.learner.checkpoint_files import begin, finish

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, COUNTERS = "optimizer.safetensors", "learner.json"


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
        """
        self.write_files(begin(directory))
        finish(directory)

    def write_files(self, folder: Path) -> None:
        """Write the files of the checkpoint into a folder that is there.

        Raises:
            OSError: they cannot be written.
        """
        save_file(dict(self.adapter), folder / ADAPTER, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self.adapter_config, indent=2), encoding="utf-8")
        save_file(dict(self.optimizer), folder / OPTIMIZER)
        (folder / COUNTERS).write_text(json.dumps({"updates": self.updates}), encoding="utf-8")


def read_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The adapter's tensors, the optimizer's, and the number of updates.

    Raises: LearnerError, one line that names the file that cannot be read.
    """
    read: list[Any] = []
    for name in (ADAPTER, OPTIMIZER, COUNTERS):
        path = directory / name
        try:
            if not path.is_file():
                raise OSError("no such file")
            if name == COUNTERS:
                read.append(int(json.loads(path.read_text(encoding="utf-8"))["updates"]))
            else:
                read.append(load_file(path))
        except (OSError, SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
            problem = " ".join(f"{type(error).__name__} {error}".split())
            raise LearnerError(f"checkpoint file {path}: cannot be read ({problem}); resume from another one") from None
    return read[0], read[1], read[2]

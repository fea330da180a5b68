"""The files of a checkpoint: none of them can hold code, since they are read from run directories of others, too."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load_file, save_file
from torch import Tensor

from draco_ray.errors import LearnerError
from draco_ray.observability.logs import private_files
from draco_ray.runs.checkpoints import (
    ADAPTER,
    ADAPTER_CONFIG,
    OPTIMIZER,
    checkpoint_damage,
    read_updates,
    write_counters,
)

PIECE_BYTES = 32 << 20
"""Of a file that is carried."""


def unfinished(directory: Path) -> Path:
    """Where the files of a checkpoint are written before it has its name."""
    return directory.with_name(f".{directory.name}.unfinished")


def begin(directory: Path) -> Path:
    """An empty folder for the files of a checkpoint; `finish` gives it its name."""
    folder = unfinished(directory)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def finish(directory: Path) -> None:
    """Give a checkpoint its name, once its bytes are on the disk; one that is done is left as it is."""
    folder = unfinished(directory)
    if not folder.exists() and directory.exists():
        return
    for path in (*folder.iterdir(), folder):
        _on_disk(path)
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
        folder.rename(directory)
        shutil.rmtree(replaced)
    else:
        os.replace(folder, directory)
    _on_disk(directory.parent)


def _on_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlive the machine's end."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class CheckpointFiles:
    """Reads and writes the files of checkpoints for `draco_ray.learner.carried.Carried`. Every call may be repeated."""

    def __init__(self) -> None:
        private_files()

    def begin(self, directory: Path) -> None:
        """Make room for a checkpoint."""
        begin(directory)

    def write(self, directory: Path, name: str, at: int, data: bytes) -> None:
        """Write a piece of one of its files."""
        file = unfinished(directory) / Path(name).name
        with file.open("r+b" if file.exists() else "wb") as written:
            written.seek(at)
            written.write(data)

    def finish(self, directory: Path) -> None:
        """Let it appear under its name, its bytes on the disk."""
        finish(directory)

    def names(self, directory: Path) -> list[str]:
        """The names of its files."""
        return sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []

    def read(self, directory: Path, name: str, at: int) -> bytes:
        """A piece of one of them; empty behind its end."""
        with (directory / Path(name).name).open("rb") as read:
            read.seek(at)
            return read.read(PIECE_BYTES)


def start_checkpoint_files(node: str) -> Any:
    """The actor on the node of this id, the driver's; it ends with its caller."""
    return (
        ray.remote(CheckpointFiles)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote()
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

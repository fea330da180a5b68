"""Checkpoints of a learner that may run on a host which shares no folder with the driver: their files go through Ray.

The run directory is the driver's. A learner on the driver's node writes there by itself; on another one it writes to a
folder of its own, from which an actor beside the driver gets the files piece by piece, so that neither side ever holds
one whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import ray

from draco_ray.errors import LearnerError
from draco_ray.learner.checkpoint import PIECE_BYTES, Snapshot, start_checkpoint_files
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.temp_dirs import PrivateTempDir


class Checkpoints(Protocol):
    """How a learner's worker writes and reads the checkpoints of the run directory."""

    def save(self, snapshot: Snapshot, directory: Path) -> None:
        """As `Snapshot.write`."""
        ...

    def load(self, learner: LoraLearner, directory: Path) -> None:
        """As `LoraLearner.load`."""
        ...


class Here:
    """For a worker on the driver's node."""

    def save(self, snapshot: Snapshot, directory: Path) -> None:
        """See `Checkpoints`."""
        snapshot.write(directory)

    def load(self, learner: LoraLearner, directory: Path) -> None:
        """See `Checkpoints`."""
        learner.load(directory)


class Carried:
    """For a worker on another node."""

    def __init__(self, files: Any) -> None:
        """
        Args:
            files: handle of a `CheckpointFiles` actor.
        """
        self._files = files

    def save(self, snapshot: Snapshot, directory: Path) -> None:
        """See `Checkpoints`."""
        with PrivateTempDir() as folder:
            snapshot.write_files(folder, directory.name)
            ray.get(self._files.begin.remote(directory))
            for file in sorted(folder.iterdir()):
                with file.open("rb") as read:
                    at = 0
                    while data := read.read(PIECE_BYTES):
                        ray.get(self._files.write.remote(directory, file.name, at, data))
                        at += len(data)
        ray.get(self._files.finish.remote(directory))

    def load(self, learner: LoraLearner, directory: Path) -> None:
        """See `Checkpoints`."""
        with PrivateTempDir() as folder:
            for name in ray.get(self._files.names.remote(directory)):
                with (folder / name).open("wb") as written:
                    while data := ray.get(self._files.read.remote(directory, name, written.tell())):
                        written.write(data)
            try:
                learner.load(folder)
            except LearnerError as error:
                # What cannot be used is in the run directory.
                raise LearnerError(str(error).replace(str(folder), str(directory))) from None


def checkpoints_of(drivers_node: str) -> Checkpoints:
    """How a worker on this node reaches the run directory of a driver on that one."""
    if ray.get_runtime_context().get_node_id() == drivers_node:
        return Here()
    return Carried(start_checkpoint_files(drivers_node))

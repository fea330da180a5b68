"""A checkpoint of a learner on another node than the driver's, through a real Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from draco_ray.errors import LearnerError
from draco_ray.learner import checkpoint as checkpoint_files
from draco_ray.learner.carried import Carried, Here, checkpoints_of
from draco_ray.learner.checkpoint import Snapshot, read_checkpoint, start_checkpoint_files
from draco_ray.training.cluster import start_ray

pytestmark = pytest.mark.slow


class Reader:
    """Of a `LoraLearner`, what `Carried` asks of it."""

    def load(self, directory: Path) -> None:
        self.found = read_checkpoint(directory)


@pytest.fixture(scope="module")
def files() -> Iterator[Any]:
    start_ray(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
    yield start_checkpoint_files(ray.get_runtime_context().get_node_id())
    ray.shutdown()


def snapshot(value: float) -> Snapshot:
    return Snapshot(
        adapter={"weight": torch.full((64, 64), value)},
        adapter_config={"r": 4},
        optimizer={"0.step": torch.tensor(value)},
        updates=int(value),
    )


def test_a_checkpoint_goes_to_the_run_directory_and_back(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several pieces a file.
    monkeypatch.setattr("draco_ray.learner.carried.PIECE_BYTES", 1000)
    carried, directory, reader = Carried(files), tmp_path / "step00001", Reader()
    for value in (1.0, 2.0):
        carried.save(snapshot(value), directory)
        os.kill(ray.get(files.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        carried.load(reader, directory)  # type: ignore[arg-type]
        weights, moments, updates = reader.found
        assert torch.equal(weights["weight"], torch.full((64, 64), value))
        assert (moments["0.step"].item(), updates) == (value, value)
    here = tmp_path / "here" / "step00001"
    Here().save(snapshot(2.0), here)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["here", "step00001"]
    for file in here.iterdir():
        assert (directory / file.name).read_bytes() == file.read_bytes()
        assert (directory / file.name).stat().st_mode & 0o077 == 0


def test_a_checkpoint_that_cannot_be_used_is_named_as_in_the_run_directory(files: Any, tmp_path: Path) -> None:
    directory = tmp_path / "step00001"
    directory.mkdir()
    with pytest.raises(LearnerError, match=f"checkpoint {directory} is damaged: learner.json: it is missing"):
        Carried(files).load(Reader(), directory)  # type: ignore[arg-type]


def test_a_piece_that_is_written_again_changes_nothing(tmp_path: Path) -> None:
    kept, directory = checkpoint_files.CheckpointFiles(), tmp_path / "step00001"
    kept.begin(directory)
    for at in (0, 4, 0, 4):
        kept.write(directory, "file", at, b"abcdefgh"[at : at + 4])
    for _ in range(2):
        kept.finish(directory)
    assert (directory / "file").read_bytes() == b"abcdefgh"
    assert kept.read(directory, "file", 8) == b""


def test_a_worker_beside_the_driver_writes_by_itself(files: Any) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert isinstance(checkpoints_of(here), Here)
    assert isinstance(checkpoints_of(ray.NodeID.from_random().hex()), Carried)

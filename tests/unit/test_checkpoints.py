"""Checkpoints that are damaged are refused wherever they are read, and a run goes on from the newest sound one."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draco_ray.benchmarks.tau.server import find_policy as find_tau_policy
from draco_ray.config.load import dump_config, load_config
from draco_ray.errors import DamagedRun
from draco_ray.lab.analysis.checkpoint_judge import checkpoints_before
from draco_ray.lab.evaluation.policies import Checkpoint, every_checkpoint, find_policy, last_epochs, load_adapter
from draco_ray.runs.checkpoints import (
    ADAPTER,
    ADAPTER_CONFIG,
    COUNTERS,
    OPTIMIZER,
    adapter_damage,
    checkpoint_damage,
    write_counters,
)
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.training.resume import rewind
from tests.support.small_checkpoint import small_checkpoint
from tests.support.tiny_model import build_tiny_model

FILES = (ADAPTER, ADAPTER_CONFIG, OPTIMIZER, COUNTERS)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """With checkpoints after steps 1 to 3, of two updates each."""
    run = RunDirectory.create(tmp_path / "run", dump_config(load_config("sandbox")))
    for step in (1, 2, 3):
        small_checkpoint(run.checkpoint(step), 2 * step)
        RunStore(run).write_metrics(step, {"step": step, "updates": 2, "grad_norm": 0.5})
    return run


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def to_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_queue(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_another_step(path: Path) -> None:
    shutil.copy(path.parent.with_name("step00002") / path.name, path)


HARMS: list[Callable[[Path], None]] = [
    *(truncate, shorten, lengthen, zero, empty, Path.unlink, to_loop, to_nothing, to_folder, to_queue),
    of_another_step,
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_run_goes_on_from_the_newest_sound_checkpoint_and_says_so(
    run: RunDirectory, name: str, harm: Callable[[Path], None]
) -> None:
    folder = run.checkpoint(3)
    harm(folder / name)
    start = rewind(run, reuse=True)
    if name == ADAPTER_CONFIG and harm is of_another_step:
        assert start.step == 3  # It is the same in every step.
        return
    assert (start.step, start.checkpoint) == (2, run.checkpoint(2))
    assert [line["step"] for line in run.metrics()] == [1, 2]
    (line,) = start.damage
    assert "\n" not in line
    assert line.startswith(f"checkpoint {folder} is damaged: {name}: ")
    assert line.endswith("; step00002 is used instead, and the damaged one is moved to .step00003.damaged-1")
    assert (run.checkpoints / ".step00003.damaged-1").is_dir()
    assert rewind(run, reuse=True).damage == ()


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_is_read(tmp_path: Path, name: str) -> None:
    """Every bit of the first 60 bytes, and some of the rest."""
    folder = small_checkpoint(tmp_path / "step00003", 6)
    assert checkpoint_damage(folder) is None
    assert adapter_damage(folder) is None
    path = folder / name
    bits, chosen = 8 * path.stat().st_size, random.Random(name)
    for bit in (*range(480), *(chosen.randrange(480, bits) for _ in range(200))):
        flip(path, bit)
        damage = checkpoint_damage(folder)
        assert damage is not None, bit
        assert "\n" not in damage
        if name in (ADAPTER, ADAPTER_CONFIG):
            assert adapter_damage(folder) is not None, bit
        flip(path, bit)
    assert checkpoint_damage(folder) is None


def test_a_whole_checkpoint_of_another_step_is_damage(run: RunDirectory) -> None:
    shutil.rmtree(run.checkpoint(3))
    shutil.copytree(run.checkpoint(1), run.checkpoint(3))
    assert checkpoint_damage(run.checkpoint(3)) == "learner.json: written for checkpoint 'step00001', not for this one"
    # A copy under another name is one that somebody keeps.
    assert checkpoint_damage(shutil.copytree(run.checkpoint(1), run.path / "best")) is None


def test_values_that_are_not_finite_are_named_by_their_tensor(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, -np.inf):
        folder = small_checkpoint(tmp_path / f"{value}" / "step00001", value=value)
        problem = "adapter_model.safetensors: tensor a.lora_B.weight contains NaN or infinity"
        assert checkpoint_damage(folder) == problem
        # Also where no digest says what was written.
        (folder / COUNTERS).unlink()
        with pytest.raises(DamagedRun, match=problem):
            load_adapter(Checkpoint(name="a", adapter=folder))
    folder = small_checkpoint(tmp_path / "step00002", 4)
    moments = load_file(folder / OPTIMIZER)
    moments["0.exp_avg_sq"][1, 2] = np.nan
    save_file(moments, folder / OPTIMIZER)
    write_counters(folder, folder.name, 4)
    assert checkpoint_damage(folder) == "optimizer.safetensors: tensor 0.exp_avg_sq contains NaN or infinity"


def test_a_checkpoint_without_digests_or_with_parts_of_two_steps_is_damaged(run: RunDirectory) -> None:
    (run.checkpoint(3) / COUNTERS).write_text(json.dumps({"updates": 6}))
    expected = f"{COUNTERS}: expected the keys updates, checkpoint and sha256"
    assert checkpoint_damage(run.checkpoint(3)) == expected
    shutil.copy(run.checkpoint(1) / OPTIMIZER, run.checkpoint(2))
    write_counters(run.checkpoint(2), "step00002", 4)
    assert (
        checkpoint_damage(run.checkpoint(2)) == "optimizer.safetensors: is of update 2, but learner.json is of update 4"
    )
    assert rewind(run, reuse=True).step == 1


def test_a_run_without_a_sound_checkpoint_is_one_line_and_nothing_of_it_changes(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        flip(run.checkpoint(step) / ADAPTER, -1)
    before = sorted(run.path.rglob("*"))
    with pytest.raises(DamagedRun) as refusal:
        rewind(run, reuse=True)
    assert str(refusal.value) == (
        f"{run.checkpoints}: all checkpoints are damaged, the newest is step00003/adapter_model.safetensors: its "
        "SHA-256 differs from the one in learner.json; restore one, or move the folder away to train again from step "
        "1 with the recorded rollouts and replies"
    )
    assert sorted(run.path.rglob("*")) == before
    run.checkpoints.rename(run.path / "away")
    assert rewind(run, reuse=True).step == 0


def test_a_learner_may_have_checkpoints_of_its_own_format(tmp_path: Path) -> None:
    config = load_config("sandbox", ["learner.use=mine.py:Learner"])
    run = RunDirectory.create(tmp_path / "run", dump_config(config))
    run.checkpoint(1).mkdir(parents=True)
    assert rewind(run, reuse=True).step == 1


def test_every_reader_of_an_adapter_refuses_a_damaged_one(run: RunDirectory, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    folder, config = run.checkpoint(2), load_config("sandbox", [f"model.path={model}"])
    alone = shutil.copytree(folder, tmp_path / "alone")
    for each in (folder, alone):
        flip(each / ADAPTER, 8 * (each / ADAPTER).stat().st_size - 3)
        # Nobody needs it to evaluate the adapter.
        (each / OPTIMIZER).unlink()
    readers: list[Callable[[], object]] = [
        lambda: every_checkpoint(run.path, 1),
        lambda: last_epochs(run.path, 2, 1),
        lambda: find_policy(str(folder), tmp_path),
        lambda: find_policy(str(alone), tmp_path),
        lambda: find_tau_policy(str(folder), config),
        lambda: checkpoints_before(run, [3]),
        lambda: load_adapter(Checkpoint(name="a", adapter=folder)),
    ]
    for read in readers:
        with pytest.raises(DamagedRun, match=r"is damaged: adapter_model\.safetensors: its SHA-256 differs"):
            read()
    # A deleted file does not make another checkpoint the last one.
    (run.checkpoint(3) / ADAPTER_CONFIG).unlink()
    with pytest.raises(DamagedRun, match=r"step00003 is damaged: adapter_config\.json: it is missing"):
        find_policy(str(run.path), tmp_path)
    assert find_policy(str(run.checkpoint(1)), tmp_path).checkpoints[0].version == 1

"""`draco verify` on a real deterministic run: changes are found by recomputation, with all digests made right again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draco_ray.runs.checkpoints import file_digest
from draco_ray.runs.directory import RunDirectory
from tests.e2e.test_training import arguments
from tests.support.command import draco, draco_here
from tests.support.tampered import KINDS, tampered

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

FLIPS = int(os.environ.get("DRACO_TEST_FLIPS", "2"))
"""Of each kind."""


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Let what the block starts run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def trained(world: Path, model: Path, root: Path, name: str) -> RunDirectory:
    words = ["engine.deterministic=true", "train.evaluate_before_after=false"]
    result = draco(*arguments(world, model, root, name), *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return RunDirectory.open(root / name)


@pytest.fixture(scope="module")
def run(sandbox_root: Path, starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(sandbox_root, starter_model, tmp_path_factory.mktemp("runs"), "one")


def test_a_run_is_computed_again(run: RunDirectory) -> None:
    result = draco_here("verify", str(run.path))
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^step (\d): .* as recorded; .* byte by byte$", result.stdout, re.MULTILINE) == ["1", "2"]


@pytest.mark.parametrize("seed", range(FLIPS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_found_and_named(run: RunDirectory, tmp_path: Path, kind: str, seed: int) -> None:
    copy, said = tampered(run, tmp_path / "copy", kind, seed)
    result = draco_here("verify", str(copy.path))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert re.search(said, line), line


def test_another_number_of_cores_gives_the_same_adapters(
    run: RunDirectory, sandbox_root: Path, starter_model: Path, tmp_path: Path
) -> None:
    with on_cores({min(os.sched_getaffinity(0))}):
        other = trained(sandbox_root, starter_model, tmp_path, "other")
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    digests = [
        [file_digest(each.checkpoint(step) / name)[0] for step in each.checkpoint_steps() for name in files]
        for each in (run, other)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 4

"""The manifest of a run directory: what it covers, what gets a new digest, and what `draco verify` says of a change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draco_ray.config.schema import DracoConfig
from draco_ray.errors import DamagedRun, StoreError
from draco_ray.judging.prompts import evidence_key
from draco_ray.lab.verify import RecordedJudge, _Relearner, check_digests
from draco_ray.runs import manifest
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.manifest import MANIFEST_FILE, Manifest, forget_steps, other_versions, read_manifest
from tests.support.small_checkpoint import small_checkpoint
from tests.support.small_run import small_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two steps with checkpoints, and a manifest."""
    run = small_run(tmp_path / "run")
    for step in (1, 2):
        small_checkpoint(run.checkpoint(step), updates=step)
    (run.path / "tasks.json").write_text("[]")
    Manifest(run, time.time_ns()).update(2)
    return run


def test_it_covers_what_finished_steps_wrote(run: RunDirectory) -> None:
    found = read_manifest(run)
    assert set(found["metrics"]) == {"1", "2"}
    names = set(found["files"])
    assert {"config.yaml", "run.json", "tasks.json"} <= names
    on_disk = {str(path.relative_to(run.path)) for path in run.tables.rglob("*.parquet")}
    on_disk |= {str(path.relative_to(run.path)) for path in run.checkpoints.glob("step*/*")}
    assert on_disk
    assert on_disk <= names
    check_digests(run, found, dropped=False)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: _flip(run.tables / "verdicts" / "step00002.parquet"), "verdicts/step00002.parquet: its SHA-256"),
        (lambda run: _flip(run.checkpoint(1) / "adapter_model.safetensors"), "adapter_model.safetensors: its SHA-256"),
        (lambda run: (run.tables / "steps" / "step00001.parquet").unlink(), "steps/step00001.parquet: it is missing"),
        (lambda run: (run.path / "tasks.json").write_text("[1]"), "tasks.json: its SHA-256"),
        (lambda run: run.metrics_file.unlink(), "metrics.jsonl: the line of step 1 is missing"),
        (
            lambda run: run.metrics_file.write_text(run.metrics_file.read_text().replace('"kl": 0.002', '"kl": 0.003')),
            "metrics.jsonl: the line of step 2 differs from manifest.json",
        ),
    ],
)
def test_a_change_is_named(run: RunDirectory, damage: Callable[[RunDirectory], object], said: str) -> None:
    damage(run)
    with pytest.raises(DamagedRun, match=said):
        check_digests(run, read_manifest(run), dropped=False)


@pytest.mark.parametrize(
    ("section", "entry", "said"),
    [
        (
            "files",
            "tables/verdicts/step00001.parquet",
            "manifest.json: tables/verdicts/step00001.parquet is missing in the manifest",
        ),
        ("metrics", "1", "manifest.json: step 1 is missing in the manifest"),
    ],
)
def test_what_is_missing_from_it_is_named(run: RunDirectory, section: str, entry: str, said: str) -> None:
    found = read_manifest(run)
    del found[section][entry]
    with pytest.raises(DamagedRun, match=said):
        check_digests(run, found, dropped=False)


def test_versions_of_all_steps_are_kept_and_compared(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_versions(run) == ""
    (run.path / MANIFEST_FILE).write_text(json.dumps(read_manifest(run) | {"machine": {"torch": "1"}}))
    monkeypatch.setattr(manifest, "this_machine", lambda: {"torch": "2"})
    for _ in range(2):
        Manifest(run, time.time_ns()).update(2)
        assert read_manifest(run)["machine"]["torch"] == "1, 2"
    assert other_versions(run) == "torch 1, 2 (here 2)"


def test_bytes_that_change_between_two_drivers_keep_their_digest(run: RunDirectory) -> None:
    path = run.tables / "verdicts" / "step00001.parquet"
    _flip(path)
    os.utime(path, ns=(1, 1))
    Manifest(run, time.time_ns()).update(2)
    with pytest.raises(DamagedRun, match="verdicts/step00001"):
        check_digests(run, read_manifest(run), dropped=False)


def test_a_metrics_line_or_an_earlier_configuration_that_changes_between_two_drivers_is_named(
    run: RunDirectory,
) -> None:
    earlier = run.path / "config.before-resume-1.yaml"
    earlier.write_text("seed: 1\n")
    Manifest(run, time.time_ns()).update(2)
    lines = run.metrics_file.read_text()
    run.metrics_file.write_text(lines.replace('"kl": 0.001', '"kl": 0.009'))
    Manifest(run, time.time_ns()).update(2)
    with pytest.raises(DamagedRun, match=r"metrics\.jsonl: the line of step 1 differs"):
        check_digests(run, read_manifest(run), dropped=False)
    run.metrics_file.write_text(lines)
    check_digests(run, read_manifest(run), dropped=False)
    earlier.write_text("seed: 2\n")
    os.utime(earlier, ns=(1, 1))
    Manifest(run, time.time_ns()).update(2)
    with pytest.raises(DamagedRun, match="config.before-resume-1.yaml: its SHA-256"):
        check_digests(run, read_manifest(run), dropped=False)


def test_steps_that_are_done_again_get_new_digests(run: RunDirectory) -> None:
    forget_steps(run, 1)
    found = read_manifest(run)
    assert set(found["metrics"]) == {"1"}
    assert not [name for name in found["files"] if "step00002" in name]
    assert [name for name in found["files"] if "step00001" in name]
    manifest = Manifest(run, time.time_ns() - 10**10)
    _flip(run.tables / "verdicts" / "step00002.parquet")
    manifest.update(2)
    check_digests(run, read_manifest(run), dropped=False)
    # And once more, by the same process.
    _flip(run.tables / "verdicts" / "step00002.parquet")
    manifest.update(2)
    check_digests(run, read_manifest(run), dropped=False)


def test_dropped_checkpoints_are_no_damage_where_the_run_drops_them(run: RunDirectory) -> None:
    for path in run.checkpoint(1).iterdir():
        path.unlink()
    run.checkpoint(1).rmdir()
    check_digests(run, read_manifest(run), dropped=True)
    with pytest.raises(DamagedRun, match="step00001"):
        check_digests(run, read_manifest(run), dropped=False)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"files": {"a": 1}, "metrics": {}}', '{"files": 3, "metrics": {}}'),
        '{"files": {}, "metrics": {"q": "0"}, "machine": {}}',
    ],
)
def test_a_damaged_manifest_is_named(run: RunDirectory, text: str) -> None:
    (run.path / MANIFEST_FILE).write_text(text)
    with pytest.raises(DamagedRun, match=MANIFEST_FILE):
        read_manifest(run)


def test_a_manifest_survives_another_learners_counters(run: RunDirectory) -> None:
    counters = run.checkpoint(2) / "learner.json"
    counters.write_text(json.dumps({"mine": 3}))
    forget_steps(run, 1)
    Manifest(run, time.time_ns()).update(2)
    names = {Path(name).name for name in read_manifest(run)["files"] if name.startswith("checkpoints/step00002")}
    assert names == {path.name for path in run.checkpoint(2).iterdir()}


def test_it_covers_the_folders_of_another_learners_checkpoint(run: RunDirectory) -> None:
    (run.checkpoint(3) / "shards" / "0").mkdir(parents=True)
    (run.checkpoint(3) / "shards" / "0" / "weights").write_text("w")
    Manifest(run, time.time_ns()).update(2)
    assert "checkpoints/step00003/shards/0/weights" in read_manifest(run)["files"]


class Again:
    """A stand-in for the learner: what it recomputes is the sound checkpoint of step 1."""

    def snapshot(self) -> Again:
        return self

    def write(self, folder: Path) -> None:
        small_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("adapter_model.safetensors", None, "step00001/adapter_model.safetensors: it is missing"),
        ("adapter_model.safetensors", "", "step00001/adapter_model.safetensors: differs from the recomputed file"),
        ("adapter_config.json", "{", "step00001/adapter_config.json: its SHA-256 differs"),
        ("learner.json", "{", "step00001/learner.json: Expecting property name"),
    ],
)
def test_a_checkpoint_that_the_manifest_no_longer_knows_is_compared_all_the_same(
    run: RunDirectory, name: str, text: str | None, said: str
) -> None:
    compared = object.__new__(_Relearner)
    compared._run, compared._learner = run, Again()  # type: ignore[assignment]
    assert "byte by byte" in compared._compare(1)
    path = run.checkpoint(1) / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DamagedRun, match=said):
        compared._compare(1)


@pytest.mark.parametrize("damage", ["folder", "empty", "garbage"])
def test_replies_that_cannot_be_read_are_named_where_they_are(run: RunDirectory, damage: str) -> None:
    evidence_key(run.judge_cache)
    path = run.judge_cache / "replies.sqlite"
    if damage == "folder":
        path.mkdir()
    else:
        path.write_text("" if damage == "empty" else "garbage" * 99)
    with pytest.raises(StoreError, match=f"judge replies in {path} .*; restore the file"):
        RecordedJudge(run, DracoConfig())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

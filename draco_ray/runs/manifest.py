"""``manifest.json``: SHA-256 digests of a run directory's files of finished steps.

The run store updates it after every step. A file keeps its first digest unless this run writes the file again; a
metrics line always keeps its first digest. So a change on disk between a stop and a resume gets no new digest.
`draco verify` compares files and digests.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draco_ray.runs.checkpoints import COUNTERS, file_digest
from draco_ray.runs.directory import STEP_PATTERN, RunDirectory, damaged, read_text, write_private

MANIFEST_FILE = "manifest.json"
REWRITTEN_FILES = ("config.yaml", "run.json", "tasks.json", "task_prompts.json")
"""Files that a resumed run rewrites before its run store starts; each update computes their digests anew."""
PACKAGES = ("draco-ray", "torch", "numpy", "transformers", "peft", "vllm")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""Flags of /proc/cpuinfo on which PyTorch's choice of kernels depends."""


class Manifest:
    """Writes the manifest of one run."""

    def __init__(self, run: RunDirectory, began_ns: int) -> None:
        """
        Args:
            run: its directory.
            began_ns: time when this run started or was resumed, Unix nanoseconds. Files written later get new digests.
        """
        self._run, self._began_ns = run, began_ns
        self._seen: dict[str, int] = {}
        """File written since ``began_ns`` -> its modification time when its digest was computed."""

    def update(self, last: int) -> None:
        """Add the digests of files and metrics that were written since the last update, and write the manifest.

        Args:
            last: the last finished step. Metrics of later steps get no digest yet, because they may still change.

        Raises:
            OSError: a file cannot be read, or the manifest cannot be written.
            DamagedRun: the manifest of an earlier process cannot be read.
        """
        run = self._run
        known = read_manifest(run) if (run.path / MANIFEST_FILE).exists() else {"files": {}, "metrics": {}}
        files: dict[str, str] = known["files"]
        for path in _covered(run):
            name = str(path.relative_to(run.path))
            # A file that the run has just replaced or removed is checked again after the next step.
            with suppress(FileNotFoundError):
                written = path.stat().st_mtime_ns
                if name not in files or (written > self._began_ns and self._seen.get(name) != written):
                    files |= _digests(run, path)
                    self._seen[name] = written
        files |= {name: file_digest(run.path / name)[0] for name in REWRITTEN_FILES if (run.path / name).exists()}
        steps = {str(line["step"]): line_digest(line) for line in run.metrics() if line["step"] <= last}
        machine = _together(known.get("machine", {}), this_machine())
        _write(run, {"machine": machine, "metrics": steps | known["metrics"], "files": dict(sorted(files.items()))})


def read_manifest(run: RunDirectory) -> dict[str, Any]:
    """The manifest's ``files`` (digest by path), ``metrics`` (digest of a metrics line by step) and ``machine``.

    Raises:
        DamagedRun: the manifest is missing, or its format is wrong.
    """
    path = run.path / MANIFEST_FILE
    try:
        found = json.loads(read_text(path))
        for name in ("files", "metrics", "machine"):
            if not all(isinstance(each, str) for each in found[name].values()):
                raise ValueError(f"{name}: expected only strings")
        if strange := [step for step in found["metrics"] if not (step.isascii() and step.isdigit())]:
            raise ValueError(f"metrics: expected step numbers, found {strange[0][:50]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from None
    return dict(found)


def absent_tables(run: RunDirectory) -> str:
    """A message about missing table files of finished steps; empty if none is missing, or if there is no manifest.

    Raises:
        DamagedRun: the manifest cannot be read.
    """
    files = read_manifest(run)["files"] if (run.path / MANIFEST_FILE).exists() else ()
    absent = [name for name in files if name.startswith("tables/") and not (run.path / name).exists()]
    return (
        f"{len(absent)} files of finished steps are missing, first {run.path / absent[0]}; restore them, otherwise "
        "their rows are left out everywhere"
        if absent
        else ""
    )


def forget_steps(run: RunDirectory, last: int) -> None:
    """Remove the steps after ``last``, which will be repeated, from the manifest.

    Raises:
        DamagedRun: it cannot be read.
        OSError: it cannot be written.
    """
    if not (run.path / MANIFEST_FILE).exists():
        return
    found = read_manifest(run)
    later = {name for name in found["files"] if (step := step_of(name)) is not None and step > last}
    found["files"] = {name: digest for name, digest in found["files"].items() if name not in later}
    found["metrics"] = {step: digest for step, digest in found["metrics"].items() if int(step) <= last}
    _write(run, found)


def step_of(name: str) -> int | None:
    """The training step that a file of a run belongs to, by its path."""
    parts = (STEP_PATTERN.fullmatch(part.removesuffix(".parquet")) for part in Path(name).parts)
    return next((int(found[1]) for found in parts if found), None)


def line_digest(line: dict[str, Any]) -> str:
    """SHA-256 of a line of metrics."""
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def this_machine() -> dict[str, str]:
    """Package versions and CPU instructions on which recomputed numbers depend."""
    found = {"machine": platform.machine()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(OSError):
        flags = set(re.split(r"\s+", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")))
        found["instructions"] = " ".join(name for name in INSTRUCTIONS if name in flags)
    return found


def other_versions(run: RunDirectory) -> str:
    """Versions of the finished steps that differ from those of `this_machine`, e.g. ``torch 2.12 (here 2.13)``.

    Raises:
        DamagedRun: the manifest cannot be read.
    """
    made, here = read_manifest(run)["machine"] if (run.path / MANIFEST_FILE).exists() else {}, this_machine()
    return ", ".join(f"{name} {old} (here {here.get(name)})" for name, old in made.items() if old != here.get(name))


def _together(before: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Every version that a step of the run was made with, oldest first: ``2.12, 2.13``."""
    return {
        name: ", ".join(dict.fromkeys([*before.get(name, version).split(", "), version]))
        for name, version in here.items()
    }


def _covered(run: RunDirectory) -> Iterator[Path]:
    """The files to pass to `_digests`; they do not change once written.

    Tables, earlier configurations, the key of the evidence codes, and each checkpoint's counters, or all its files if
    it has no counters.
    """
    yield from run.tables.glob("*/step*.parquet")
    yield from run.tables.glob("*/step*/*.parquet")
    for step in run.checkpoint_steps():
        counters = run.checkpoint(step) / COUNTERS
        yield from [counters] if counters.exists() else _files(run.checkpoint(step))
    yield from run.path.glob("config.before-resume-*.yaml")
    yield from run.judge_cache.glob("evidence_key")


def _files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint; a learner of the user's own may write folders."""
    return [path for path in checkpoint.rglob("*") if path.is_file()]


def _digests(run: RunDirectory, path: Path) -> dict[str, str]:
    """Path in the run directory -> digest, for one file; for a checkpoint's counters, also for its other files."""
    found = {path: file_digest(path)[0]}
    if path.name == COUNTERS:
        try:
            # The learner computed these digests when it wrote the files.
            digests = json.loads(path.read_text(encoding="utf-8"))["sha256"]
            found |= {path.with_name(name): str(digest) for name, digest in digests.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            # The counters are from another kind of learner.
            found |= {each: file_digest(each)[0] for each in _files(path.parent)}
    return {str(each.relative_to(run.path)): digest for each, digest in found.items()}


def _write(run: RunDirectory, tree: dict[str, Any]) -> None:
    write_private(run.path / MANIFEST_FILE, json.dumps(tree, indent=1) + "\n")

"""Builds a sandbox: a complete AppWorld root, all or nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draco_ray.environments.sandbox import population, scenarios
from draco_ray.environments.sandbox.scripts import SPLITS
from draco_ray.errors import ConfigError, WorldError

MANIFEST = "sandbox.json"
DEFAULT_USERS = 28

Progress = Callable[[str], None]


def generator_digest() -> str:
    """A digest of the generator's source: worlds of another generator are not reused."""
    folder = Path(__file__).parent
    sources = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def read_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest of a complete sandbox; None where there is none."""
    path = root / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else None


def world_digest(root: Path) -> str:
    """A digest of what tasks depend on: task files, splits and database rows (not the databases' bytes)."""
    digest = hashlib.sha256()
    for folder in ("tasks", "datasets"):
        for path in sorted((root / "data" / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    for path in sorted((root / "data" / "base_dbs").glob("*.db")):
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        for line in connection.iterdump():
            digest.update(line.encode())
        connection.close()
    return digest.hexdigest()


def build(
    out: Path,
    seed: int = 0,
    users: int = DEFAULT_USERS,
    limit: int | None = None,
    force: bool = False,
    progress: Progress = print,
) -> dict[str, Any]:
    """Make a sandbox in ``out`` and return its manifest; at once if it is there already.

    Args:
        out: the AppWorld root to make. An older sandbox in its place is replaced, anything else is refused.
        seed: equal seeds give equal worlds.
        users: main users of the world.
        limit: scenarios a split at most; None for a full world.
        force: build even if the same world is there.
    Raises: ConfigError for arguments out of range; WorldError if ``out`` holds something that is not a sandbox.
    """
    out = out.absolute()
    if "memory" in str(out):
        raise ConfigError(f'--out is {out}: AppWorld takes a path with "memory" in it for a database in memory')
    if not population.MIN_USERS <= users <= population.MAX_USERS:
        raise ConfigError(f"--users is {users}, expected {population.MIN_USERS} to {population.MAX_USERS}")
    if limit is not None and limit < 1:
        raise ConfigError(f"--scenarios is {limit}, expected at least 1")
    wanted = {
        "seed": seed,
        "users": users,
        "scenarios": limit,
        "generator": generator_digest(),
        "appworld": _appworld(),
    }
    found = read_manifest(out)
    if found and not force and wanted.items() <= found.items():
        progress(f"sandbox: {out} is up to date ({len(found['tasks'])} tasks)")
        return found
    if found is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WorldError(f"{out} exists and holds no {MANIFEST}: not a sandbox, choose another folder or empty it")

    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    aside = out.with_name(f".{out.name}.building-{os.getpid()}")
    try:
        manifest = _build_in(aside, wanted, progress)
        _swap(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return manifest


def _appworld() -> str:
    """The version of AppWorld whose models make the world."""
    try:
        return importlib.metadata.version("appworld")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{sys.executable} has no appworld: run the build with AppWorld's own Python") from None


def _build_in(root: Path, wanted: dict[str, Any], progress: Progress) -> dict[str, Any]:
    # Imported late: it needs AppWorld and takes seconds, an up-to-date sandbox needs neither.
    from draco_ray.environments.sandbox.store import Store

    started = time.monotonic()

    def say(what: str) -> None:
        progress(f"sandbox: {what} [{time.monotonic() - started:.0f} s]")

    store = Store(root, wanted["seed"])
    world = population.populate(wanted["seed"], wanted["users"])
    tasks = scenarios.plan(world, wanted["seed"], wanted["scenarios"])
    counts = Counter(task.split for task in tasks)
    say(f"{len(world.people)} users, tasks: " + ", ".join(f"{split} {counts[split]}" for split in SPLITS))
    rows = store.write_base_dbs(world)
    say(f"base databases, {rows} rows")
    for task in tasks:
        store.write_task(task)
    store.write_datasets(tasks, SPLITS)
    store.write_version()
    say(f"{len(tasks)} tasks")
    store.write_api_docs()
    say("API docs")
    manifest = {
        **wanted,
        "digest": world_digest(root),
        "tasks": {
            task.task_id: {"family": task.family.name, "split": task.split, "difficulty": task.family.difficulty}
            for task in tasks
        },
    }
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _remove_leftovers(out: Path) -> None:
    """Remove what killed builds of this sandbox left beside it."""
    for path in [*out.parent.glob(f".{out.name}.building-*"), *out.parent.glob(f".{out.name}.old-*")]:
        if not Path(f"/proc/{path.name.rsplit('-', 1)[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _swap(aside: Path, out: Path) -> None:
    """Put the new world in place of the old one; at no time is there half a world."""
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    aside.rename(out)
    shutil.rmtree(old, ignore_errors=True)

"""Builds a sandbox: a complete AppWorld root, all or nothing.

The API docs depend only on AppWorld's version. They are copied from the world that is replaced, if possible; otherwise
a second process generates them while this one makes the databases and tasks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draco_ray.errors import ConfigError, WorldError
from draco_ray.sandbox.world import population, scenarios
from draco_ray.sandbox.world.scripts import SPLITS, VARIETIES
from draco_ray.temp_dirs import PrivateTempDir

MANIFEST = "sandbox.json"
API_DOCS = Path("data/api_docs")
DEFAULT_USERS = 28
_CHECKERS = ("__main__.py", "verify.py")
"""Modules that run or check a world but do not shape it."""

Progress = Callable[[str], None]


def generator_digest() -> str:
    """A digest of the generator's source: worlds of another generator are not reused."""
    folder = Path(__file__).parent
    sources = sorted(path for path in folder.glob("*.*") if path.is_file() and path.name not in _CHECKERS)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def read_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest of a complete sandbox; None if ``root`` has no manifest.

    Raises: WorldError if it cannot be read.
    """
    path = root / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        manifest["tasks"].items(), manifest["variety"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WorldError(f"{path} is not the manifest of a sandbox; remove the folder and build it again") from None
    return dict(manifest)


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
    variety: str = VARIETIES[0],
) -> dict[str, Any]:
    """Make a sandbox in ``out`` and return its manifest; returns at once if the same sandbox is there already.

    Args:
        out: the AppWorld root to make. An older sandbox in its place is replaced, anything else is refused.
        seed: equal seeds give equal worlds.
        users: main users of the world.
        limit: maximum number of scenarios per split; None for a full world.
        force: build even if the same world is there.
        variety: one of VARIETIES.
    Raises: ConfigError if AppWorld is missing or would misread ``out``; WorldError if ``out`` holds something that is
        not a sandbox.
    """
    out = out.absolute()
    if "memory" in str(out):
        raise ConfigError(
            f'--out is {out}: AppWorld uses an in-memory database if a path contains "memory"; choose another path'
        )
    wanted = {
        "variety": variety,
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
        raise WorldError(f"{out} has no {MANIFEST}, so it is not a sandbox; choose another folder or empty this one")

    out.parent.mkdir(parents=True, exist_ok=True)
    reusable = found and not force and found.get("appworld") == wanted["appworld"]
    progress(f"sandbox: building {out}, which takes about 20 seconds")
    with PrivateTempDir(out.parent) as folder:
        manifest = _build_in(folder / "new", wanted, out / API_DOCS if reusable else None, progress)
        if out.exists():
            out.rename(folder / "old")
        (folder / "new").rename(out)
    return manifest


def _appworld() -> str:
    """The version of AppWorld whose models make the world."""
    try:
        return importlib.metadata.version("appworld")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{sys.executable} cannot import appworld; run the build with AppWorld's own Python"
        ) from None


def _build_in(root: Path, wanted: dict[str, Any], docs: Path | None, progress: Progress) -> dict[str, Any]:
    """Build a world in a new folder; ``docs``: folder of existing API docs to copy, or None."""
    # Imported late: it needs AppWorld and takes seconds, an up-to-date sandbox needs neither.
    from draco_ray.sandbox.world.store import Store

    started = time.monotonic()

    def say(what: str) -> None:
        progress(f"sandbox: {what} [{time.monotonic() - started:.0f} s]")

    root.mkdir()
    with _api_docs(root, docs):
        store = Store(root)
        world = population.populate(wanted["seed"], wanted["users"])
        tasks = scenarios.plan_tasks(world, wanted["seed"], wanted["scenarios"], wanted["variety"])
        counts = Counter(task.split for task in tasks)
        say(f"{len(world.people)} users, tasks: " + ", ".join(f"{split} {counts[split]}" for split in SPLITS))
        rows = store.write_base_dbs(world)
        say(f"base databases, {rows} rows")
        for task in tasks:
            store.write_task(task)
        store.write_datasets(tasks, SPLITS)
        store.write_version()
        say(f"{len(tasks)} tasks")
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


@contextmanager
def _api_docs(root: Path, there: Path | None) -> Iterator[None]:
    """Copy the API docs into ``root``, or generate them in a separate process while the block runs."""
    from draco_ray.sandbox.world.store import write_api_docs

    if there and there.is_dir():
        shutil.copytree(there, root / API_DOCS)
        yield
        return
    context = multiprocessing.get_context("spawn")
    # Only this process handles Ctrl-C.
    with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        made = pool.submit(write_api_docs, root)
        yield
        made.result()

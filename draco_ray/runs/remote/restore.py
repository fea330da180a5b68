"""From an object store to a folder of this machine; every byte is checked against the manifest."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from draco_ray.config.origin import private
from draco_ray.errors import DamagedRun, StoreError
from draco_ray.runs.checkpoints import file_digest
from draco_ray.runs.remote.manifest import OBJECTS, Entry, Manifest, latest_manifest
from draco_ray.runs.remote.replica import PACK
from draco_ray.runs.remote.store import ObjectStore

TRIES = 5


def restore(
    store: ObjectStore, folder: Path, place: str, wanted: Callable[[str], bool] = lambda path: True
) -> Manifest | None:
    """Make a folder hold the run that is in the store, or a part of it; files that are right already stay.

    Args:
        store: of the run.
        folder: made if there is none; rows and checkpoints that the run does not have are removed.
        place: the store's name in messages.
        wanted: which paths.

    Returns: the manifest; None where there is no run.
    Raises:
        DamagedRun: a file is not what the manifest says, or missing.
        StoreError: the store cannot be used, or the folder not be written.
    """
    for attempt in range(TRIES):
        if (manifest := latest_manifest(store, place)) is None:
            return None
        try:
            _restore(store, manifest, folder, place, wanted)
        except FileNotFoundError as error:
            # The run goes on, and has written other manifests since.
            newer = latest_manifest(store, place)
            if attempt == TRIES - 1 or newer is None or newer.name == manifest.name:
                raise DamagedRun(f"{place}: an object of manifest {manifest.name} is missing: {error}") from None
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written: {error.strerror or error}; make room there") from None
        else:
            return manifest
    raise AssertionError


def _restore(store: ObjectStore, manifest: Manifest, folder: Path, place: str, wanted: Callable[[str], bool]) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = {path: entry for path, entry in manifest.files.items() if wanted(path)}
    shared: dict[str, list[tuple[str, Entry]]] = defaultdict(list)
    for path, entry in files.items():
        file = folder / path
        if (
            file.is_file()
            and not file.is_symlink()
            and file.stat().st_size == entry.size
            and file_digest(file)[0] == entry.sha256
        ):
            continue
        shared[entry.object].append((path, entry))
    for name, members in shared.items():
        if all(entry.object == entry.sha256 and entry.size > PACK for _, entry in members):
            for path, entry in members:
                _fetch(store, folder / path, entry, place)
        else:
            data = store.read(f"{OBJECTS}/{name}")
            for path, entry in members:
                _write(folder / path, data[entry.offset : entry.offset + entry.size], entry, place)
    for inside, _, names in os.walk(folder):
        for each in names:
            path = os.path.relpath(os.path.join(inside, each), folder)
            if path.startswith(("tables/", "checkpoints/")) and wanted(path) and path not in files:
                (folder / path).unlink()


def _write(file: Path, data: bytes, entry: Entry, place: str) -> None:
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise _wrong(place, file, entry)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".{file.name[:200]}.part")
    with open(temporary, "wb", opener=private) as written:
        written.write(data)
    os.replace(temporary, file)


def _fetch(store: ObjectStore, file: Path, entry: Entry, place: str) -> None:
    temporary = file.with_name(f".{file.name[:200]}.part")
    store.fetch(f"{OBJECTS}/{entry.object}", temporary, entry.offset, entry.size)
    if file_digest(temporary)[0] != entry.sha256:
        temporary.unlink()
        raise _wrong(place, file, entry)
    os.replace(temporary, file)


def _wrong(place: str, file: Path, entry: Entry) -> DamagedRun:
    return DamagedRun(
        f"{place}: {file.name} is not what the manifest says (object {entry.object[:16]}); restore that object"
    )

"""Copy a run directory to an object store during the run, and restore it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from draco_ray.config.config_signature import private_opener
from draco_ray.errors import DamagedRun, StoreError
from draco_ray.runs.checkpoints import file_digest
from draco_ray.runs.remote.claim import Claim
from draco_ray.runs.remote.manifest import (
    MANIFESTS_FOLDER,
    OBJECTS_FOLDER,
    Entry,
    Manifest,
    Marker,
    latest_manifest,
    manifest_names,
    read_manifest,
)
from draco_ray.runs.remote.store import CHUNK_BYTES, ObjectStore

SMALL_BYTES, PACK_BYTES = 2**20, 32 * 2**20
"""Sizes in bytes: files of up to `SMALL_BYTES` share objects of about `PACK_BYTES`."""
MANIFESTS_KEPT = 2
"""Number of manifests kept in the store, so that a reader of one finds all its files while the next is written."""
STAGING = ".staging"
DATABASE = ".sqlite"
BUSY_SECONDS = 60.0
MAX_TRIES, PAUSE_SECONDS = 200, 0.05
RESTORE_TRIES = 5

Seen = tuple[int, int, int]
"""Inode, size and modification time of a file, which change when the file is replaced or grows."""


def listing(folder: Path) -> dict[str, Seen]:
    """The files of a run directory that belong to the run, by path with ``/``."""
    found = {}
    for inside, folders, files in os.walk(folder):
        at = os.path.relpath(inside, folder)
        if at in (".", "checkpoints"):
            # Hidden files in these folders belong to this machine, or are unfinished.
            folders[:] = [name for name in folders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".")]
        for name in files:
            if name.endswith((".tmp", *(f"{DATABASE}-{kind}" for kind in ("journal", "wal", "shm")))):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(inside, name))
                if stat.S_ISREG(status.st_mode):
                    path = name if at == "." else f"{at}/{name}"
                    found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def snapshot(folder: Path, staging: Path, known: Mapping[str, Seen]) -> tuple[dict[str, Seen], dict[str, Path]]:
    """Take a consistent snapshot of the files of a run directory.

    Writers of a run directory replace files and never change them, except for logs, which grow, and databases. So a
    hard link keeps a file's present content. If no file was replaced or removed while the links were made, all links
    show the same moment.

    Args:
        folder: the run directory.
        staging: an empty folder on the same file system, for the links.
        known: files that are left out if unchanged.

    Returns: inode, size and time of all files, and the links to the files that were not known.
    Raises:
        StoreError: files are replaced too fast, or a database cannot be read.
    """
    for attempt in range(MAX_TRIES):
        links = staging / str(attempt)
        links.mkdir()
        found = listing(folder)
        new = {path: links / str(index) for index, path in enumerate(found) if known.get(path) != found[path]}
        try:
            for path, link in new.items():
                if not path.endswith(DATABASE):
                    _link(folder / path, link)
            whole = True
        except FileNotFoundError:
            whole = False
        later = listing(folder)
        if whole and all(path.endswith(DATABASE) or _same(seen, later.get(path)) for path, seen in found.items()):
            # Copy databases last, so that they contain the judge replies behind the recorded rows.
            for path, link in new.items():
                if path.endswith(DATABASE):
                    _backup(folder / path, link)
            return found, new
        shutil.rmtree(links)
        time.sleep(PAUSE_SECONDS)
    raise StoreError(f"{folder}: the files change faster than they can be copied")


def _same(seen: Seen, later: Seen | None) -> bool:
    """Whether a file is unchanged, or has only grown (a log)."""
    return later is not None and later[0] == seen[0] and (later[1] > seen[1] or later == seen)


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        # The file system has no hard links.
        shutil.copyfile(file, link, follow_symlinks=False)


def _backup(file: Path, to: Path) -> None:
    """Copy a database consistently; if the file is no database, copy its bytes."""
    try:
        with (
            contextlib.closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as source,
            contextlib.closing(sqlite3.connect(to)) as target,
        ):
            source.execute("PRAGMA trusted_schema = OFF")
            source.backup(target)
    except sqlite3.OperationalError as error:
        raise StoreError(f"{file}: cannot be copied: {error}") from None
    except sqlite3.DatabaseError:
        shutil.copyfile(file, to)


class Copier:
    """Copies one run directory to an object store repeatedly."""

    def __init__(self, store: ObjectStore, folder: Path, claim: Claim) -> None:
        """
        Args:
            store: the store that holds the copy.
            folder: the run directory; it need not exist yet.
            claim: the right to write the copy.
        """
        self._folder, self._claim = folder, claim
        self._latest = latest_manifest(store)
        self._seen: dict[str, Seen] = {}
        """Path -> state of the file when it was last copied. A file in the same state is not copied again."""
        self._stored = {entry.sha256: entry for entry in (self._latest.files if self._latest else {}).values()}
        self._read: dict[str, Manifest] = {}
        self._names = [self._latest.name] if self._latest else []
        """Names of the latest manifest, and of manifests whose write reported an error but may have succeeded."""

    def copy(self, store: ObjectStore) -> bool:
        """Copy the folder's present files to the store; returns whether anything was new.

        Raises:
            StoreError: the store cannot be used, or the folder cannot be read. The next copy will contain the files.
            ClaimLost: another driver has taken over the run.
        """
        if not (self._folder / "config.yaml").is_file():
            return False
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        try:
            seen, links = snapshot(self._folder, staging, self._seen)
            last = self._latest.files if self._latest else {}
            new = self._send(store, links)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        files = {path: new.get(path) or last[path] for path in seen}
        if changed := files != last:
            self._publish(store, files)
        self._seen = seen
        return changed

    def tidy(self, store: ObjectStore) -> None:
        """Remove all but the last `MANIFESTS_KEPT` complete manifests, and the objects that the kept do not name."""
        self._claim.check(store)
        kept: dict[str, Manifest] = {}
        for name in manifest_names(store):
            found = None if len(kept) == MANIFESTS_KEPT else self._read.get(name) or read_manifest(store, name)
            if found is None:
                store.delete(f"{MANIFESTS_FOLDER}/{name}")
            else:
                kept[name] = found
        self._read = kept
        named = {each for manifest in kept.values() for each in manifest.objects}
        for name in store.names(OBJECTS_FOLDER):
            if name not in named:
                store.delete(f"{OBJECTS_FOLDER}/{name}")

    def _publish(self, store: ObjectStore, files: Mapping[str, Entry]) -> None:
        self._claim.check(store)
        number = 1 + (self._latest.number if self._latest else 0)
        manifest = Manifest(self._claim.epoch, number, files)
        name, data = manifest.encoded()
        # Write the marker first: after a kill, the next driver must know that this folder has the manifest's content.
        self._names.append(name)
        Marker(self._claim.url, tuple(self._names)).write(self._folder)
        store.write(f"{MANIFESTS_FOLDER}/{name}", data)
        self._latest, self._names = replace(manifest, name=name), [name]
        self._read[name] = self._latest
        self._stored = {entry.sha256: entry for entry in files.values()}
        self.tidy(store)

    def _send(self, store: ObjectStore, links: Mapping[str, Path]) -> dict[str, Entry]:
        """Upload the contents of files to the store; returns their locations."""
        found: dict[str, Entry] = {}
        small: dict[str, bytes] = {}
        for path, file in links.items():
            if file.stat().st_size > SMALL_BYTES:
                found[path] = self._send_large(store, file)
                continue
            small[path] = file.read_bytes()
            if sum(map(len, small.values())) >= PACK_BYTES:
                found |= self._send_small(store, small)
                small = {}
        return found | self._send_small(store, small)

    def _send_small(self, store: ObjectStore, files: Mapping[str, bytes]) -> dict[str, Entry]:
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
        new = {digest: files[path] for path, digest in digests.items() if digest not in self._stored}
        if new:
            pack = b"".join(new.values())
            name, offset = hashlib.sha256(pack).hexdigest(), 0
            store.write(f"{OBJECTS_FOLDER}/{name}", pack)
            for digest, data in new.items():
                self._stored[digest] = Entry(len(data), digest, name, offset)
                offset += len(data)
        return {path: self._stored[digest] for path, digest in digests.items()}

    def _send_large(self, store: ObjectStore, file: Path) -> Entry:
        digest, size = file_digest(file)
        if digest not in self._stored:
            if store.upload(f"{OBJECTS_FOLDER}/{digest}", file) != digest:
                store.delete(f"{OBJECTS_FOLDER}/{digest}")
                raise StoreError(f"{self._folder}: a file changed while it was copied; it will be copied again")
            self._stored[digest] = Entry(size, digest, digest)
        return self._stored[digest]


def restore(store: ObjectStore, folder: Path, wanted: Callable[[str], bool] = lambda path: True) -> Manifest | None:
    """Download the run from the store into a folder, or some of its files. Files that are already identical are kept.

    Args:
        store: the store that holds the run.
        folder: created if it does not exist; rows and checkpoints that the manifest does not name are removed.
        wanted: whether to download a path.

    Returns: the manifest; None if there is no run.
    Raises:
        DamagedRun: an object is missing, or differs from the manifest.
        StoreError: the store cannot be used, or the folder cannot be written.
    """
    missing: str | None = None
    for _ in range(RESTORE_TRIES):
        manifest = latest_manifest(store)
        if manifest is None or manifest.name == missing:
            break
        try:
            _restore(store, manifest, folder, wanted)
        except FileNotFoundError:
            # The run may still be active: it may have written a newer manifest and removed this one's objects.
            missing = manifest.name
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written: {error.strerror or error}; free disk space there") from None
        else:
            return manifest
    if missing is not None:
        raise DamagedRun(
            f"{store.url}: an object of manifest {missing} is missing; restore the object in {OBJECTS_FOLDER}/"
        )
    return None


def _restore(store: ObjectStore, manifest: Manifest, folder: Path, wanted: Callable[[str], bool]) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = {path: entry for path, entry in manifest.files.items() if wanted(path)}
    by_object: dict[str, list[tuple[Path, Entry]]] = defaultdict(list)
    for path, entry in files.items():
        if not _holds(folder / path, entry):
            by_object[entry.object].append((folder / path, entry))
    fetched = folder / ".object.part"
    for name, members in by_object.items():
        store.fetch(f"{OBJECTS_FOLDER}/{name}", fetched)
        if file_digest(fetched)[0] != name:
            fetched.unlink()
            raise DamagedRun(f"{store.url}: object {name[:16]} differs from the manifest; restore the object")
        for file, entry in members:
            _extract(fetched, file, entry)
        fetched.unlink()
    for path in listing(folder):
        if path.startswith(("tables/", "checkpoints/")) and wanted(path) and path not in files:
            (folder / path).unlink()


def _holds(file: Path, entry: Entry) -> bool:
    if not file.is_file() or file.is_symlink() or file.stat().st_size != entry.size:
        return False
    return file_digest(file)[0] == entry.sha256


def _extract(fetched: Path, file: Path, entry: Entry) -> None:
    """Write a file from the object that holds it."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".{file.name[:200]}.part")
    with open(fetched, "rb") as source, open(temporary, "wb", opener=private_opener) as target:
        source.seek(entry.offset)
        left = entry.size
        while left and (data := source.read(min(CHUNK_BYTES, left))):
            target.write(data)
            left -= len(data)
    os.replace(temporary, file)

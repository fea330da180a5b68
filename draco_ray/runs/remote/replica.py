"""Copying a run directory to an object store while the run goes on."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from draco_ray.errors import StoreError
from draco_ray.runs.checkpoints import file_digest
from draco_ray.runs.remote.claim import Claim, ClaimLost
from draco_ray.runs.remote.frozen import Seen, freeze, staging_folder
from draco_ray.runs.remote.manifest import (
    FOLDER,
    KEPT,
    OBJECTS,
    Entry,
    Manifest,
    latest_manifest,
    manifest_names,
    read_manifest,
)
from draco_ray.runs.remote.marker import STAGING, Marker
from draco_ray.runs.remote.store import ObjectStore

SMALL, PACK = 2**20, 32 * 2**20
"""Bytes: files up to the first share an object of up to the second."""
INTERVAL_SECONDS = 15.0
"""Between two copies; longer where a copy takes long (`SHARE`)."""
SHARE = 0.2
"""Most of the time that copying may take: a large database is not sent again and again."""
SAY_SECONDS = 15.0


@dataclass(slots=True)
class Progress:
    """How far a copy is."""

    files: int = 0
    """Of the run in all."""
    size: int = 0
    """Bytes that are to be sent."""
    sent: int = 0


class Replica:
    """The copy of one run directory in an object store."""

    def __init__(self, store: ObjectStore, folder: Path, url: str, claim: Claim) -> None:
        """
        Args:
            store: what is below ``url``.
            folder: the run directory; it need not be there yet.
            url: of the copy.
            claim: without which nothing is written.
        """
        self._folder, self._url, self._claim = folder, url, claim
        latest = latest_manifest(store, url)
        self._written = [] if latest is None else [latest]
        self._number = 0 if latest is None else latest.number
        self._seen: dict[str, Seen] = {}
        """Of the files that the last manifest names."""
        self._attempted: list[str] = []
        """Manifests of which it is not known whether they are in the store."""
        self._stored = {entry.sha256: entry for entry in (latest.files if latest is not None else {}).values()}
        self.progress = Progress()

    def copy(self, store: ObjectStore) -> bool:
        """Bring what is in the folder now into the store; returns whether anything was new.

        Raises:
            StoreError: the store cannot be used, or the folder not be read. Nothing is lost: the next copy has it.
            ClaimLost: another driver has taken the run over.
        """
        if not (self._folder / "config.yaml").is_file():
            return False
        with staging_folder(self._folder, STAGING) as staging:
            frozen = freeze(self._folder, staging, self._seen)
            last = self._written[-1].files if self._written else {}
            new = self._send(store, frozen.changed)
            files = {path: new.get(path) or last[path] for path in frozen.seen}
        if not self._written or files != self._written[-1].files:
            self._publish(store, files)
            self._seen = dict(frozen.seen)
            return True
        self._seen = dict(frozen.seen)
        return False

    def tidy(self, store: ObjectStore) -> None:
        """Remove what killed writers have left: manifests before the last ones, and objects that those do not name."""
        self._claim.check(store)
        kept: list[Manifest] = []
        for name in manifest_names(store):
            found = None
            if len(kept) < KEPT:
                found = read_manifest(name, store.read(f"{FOLDER}/{name}"), self._url)
            if found is None:
                store.delete(f"{FOLDER}/{name}")
            else:
                kept.append(found)
        self._written = kept[::-1]
        named = {each for manifest in kept for each in manifest.objects}
        for name in store.names(OBJECTS):
            if name not in named:
                store.delete(f"{OBJECTS}/{name}")

    def _publish(self, store: ObjectStore, files: Mapping[str, Entry]) -> None:
        self._claim.check(store)
        self._number += 1
        manifest = Manifest(self._claim.epoch, self._number, files)
        name, data = manifest.encoded()
        before = self._written[-1].name if self._written else None
        # Whoever is killed from here on can tell that what is in the store is of this folder.
        self._attempted.append(name)
        Marker(self._url, before, tuple(self._attempted)).write(self._folder)
        store.write(f"{FOLDER}/{name}", data)
        Marker(self._url, name).write(self._folder)
        self._attempted = []
        self._written.append(replace(manifest, name=name))
        self._stored = {entry.sha256: entry for entry in files.values()}
        self._claim.check(store)
        while len(self._written) > KEPT:
            dropped = self._written.pop(0)
            store.delete(f"{FOLDER}/{dropped.name}")
            for each in dropped.objects - {each for kept in self._written for each in kept.objects}:
                store.delete(f"{OBJECTS}/{each}")

    def _send(self, store: ObjectStore, changed: Mapping[str, Path]) -> dict[str, Entry]:
        """Bring the bytes of files into the store: where they are."""
        sizes = {path: file.stat().st_size for path, file in changed.items()}
        self.progress = Progress(len(changed), sum(sizes.values()))
        found: dict[str, Entry] = {}
        small: dict[str, bytes] = {}
        for path, file in changed.items():
            if sizes[path] > SMALL:
                found[path] = self._send_alone(store, file)
            else:
                small[path] = file.read_bytes()
                if sum(map(len, small.values())) >= PACK:
                    found |= self._send_together(store, small)
                    small = {}
            self.progress.sent += sizes[path]
        return found | self._send_together(store, small)

    def _send_together(self, store: ObjectStore, files: Mapping[str, bytes]) -> dict[str, Entry]:
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
        pack, at = bytearray(), {}
        for path, digest in digests.items():
            if digest not in self._stored and digest not in at:
                at[digest] = len(pack)
                pack += files[path]
        if at:
            data = bytes(pack)
            name = hashlib.sha256(data).hexdigest()
            store.write(f"{OBJECTS}/{name}", data)
            sizes = {digest: len(files[path]) for path, digest in digests.items()}
            self._stored |= {digest: Entry(sizes[digest], digest, name, offset) for digest, offset in at.items()}
        return {path: self._stored[digest] for path, digest in digests.items()}

    def _send_alone(self, store: ObjectStore, file: Path) -> Entry:
        digest, size = file_digest(file)
        if (known := self._stored.get(digest)) is not None:
            return known
        if store.upload(f"{OBJECTS}/{digest}", file) != digest:
            store.delete(f"{OBJECTS}/{digest}")
            raise StoreError(f"{self._folder}: a file was changed in place while it was copied; it is copied again")
        entry = Entry(size, digest, digest)
        self._stored[digest] = entry
        return entry


class Copying:
    """Copies in a thread, for as long as a run goes on."""

    def __init__(
        self,
        replica: Replica,
        store: ObjectStore,
        stopped: threading.Event,
        say: Callable[[str], object],
        lost: Callable[[], object],
    ) -> None:
        """
        Args:
            replica: what is copied.
            store: where to; it gives up soon once ``stopped`` is set.
            stopped: ends the thread.
            say: takes a line for people.
            lost: is called when another driver has taken the run over.
        """
        self._replica, self._store, self._stopped, self._say, self._lost = replica, store, stopped, say, lost
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, also in the midst of a copy."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        wait, said = 0.0, ""
        while not self._stopped.wait(wait):
            began = time.monotonic()
            try:
                self._replica.copy(self._store)
            except ClaimLost as error:
                self._say(str(error))
                self._lost()
                return
            except (StoreError, OSError) as error:
                if str(error) != said and not self._stopped.is_set():
                    said = str(error)
                    self._say(said)
            wait = max(INTERVAL_SECONDS, (time.monotonic() - began) * (1 / SHARE - 1))

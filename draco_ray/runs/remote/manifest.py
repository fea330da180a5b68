"""Manifests: the files of one copy of a run, and where the store holds their contents."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter

from draco_ray.errors import DamagedRun
from draco_ray.runs.directory import write_private
from draco_ray.runs.remote.store import ObjectStore

SCHEMA_VERSION = 1
MANIFESTS_FOLDER, OBJECTS_FOLDER = "manifests", "objects"
MARKER_FILE = ".store.json"
_NAME = re.compile(r"(\d{6})-(\d{8})-([0-9a-f]{32})\.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of a file's content."""

    size: int
    sha256: str
    object: str
    """Name, in ``objects/``, of the object that holds the content: the object's SHA-256."""
    offset: int = 0


_ENTRIES = TypeAdapter(dict[str, Entry])


@dataclass(frozen=True, slots=True)
class Manifest:
    """A run as it was at one moment."""

    epoch: int
    """Increases with every driver that takes over the run, so an earlier driver's manifest is never the latest."""
    number: int
    files: Mapping[str, Entry]
    """The files by their path in the run directory, with ``/``."""
    name: str = ""
    """Name of the manifest's object in ``manifests/``; empty if it is not in the store yet."""

    @property
    def objects(self) -> set[str]:
        """Names of the objects that hold the manifest's files."""
        return {entry.object for entry in self.files.values()}

    @property
    def checkpoint_steps(self) -> list[int]:
        """Training steps that have a checkpoint, ascending."""
        found = (re.match(r"checkpoints/step(\d+)/", path) for path in self.files)
        return sorted({int(match[1]) for match in found if match})

    @property
    def begun(self) -> bool:
        """Whether the run has begun: a step has rows or metrics, or there is a checkpoint."""
        return any(path == "metrics.jsonl" or path.startswith(("tables/", "checkpoints/")) for path in self.files)

    def encoded(self) -> tuple[str, bytes]:
        """Name and content of the manifest's object."""
        files = {path: asdict(entry) for path, entry in sorted(self.files.items())}
        tree = {"schema_version": SCHEMA_VERSION, "epoch": self.epoch, "number": self.number, "files": files}
        data = json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return f"{self.epoch:06d}-{self.number:08d}-{hashlib.sha256(data).hexdigest()[:32]}.json", data


def manifest_names(store: ObjectStore) -> list[str]:
    """Names of the manifests, the latest first."""
    return sorted((name for name in store.names(MANIFESTS_FOLDER) if _NAME.fullmatch(name)), reverse=True)


def latest_manifest(store: ObjectStore) -> Manifest | None:
    """The latest complete manifest; None if there are no manifests.

    Raises:
        DamagedRun: no manifest is complete, or the latest has another schema version.
    """
    names = manifest_names(store)
    for name in names:
        try:
            found = read_manifest(store, name)
        except FileNotFoundError:
            continue
        if found is not None:
            return found
    if names:
        raise DamagedRun(f"{store.url}: all {len(names)} manifests are damaged; restore one in {MANIFESTS_FOLDER}/")
    return None


def read_manifest(store: ObjectStore, name: str) -> Manifest | None:
    """One manifest; None if its content does not match the digest in its name.

    Raises:
        DamagedRun: its schema has another version, or it names a path outside a run.
        FileNotFoundError: it is gone.
    """
    data = store.read(f"{MANIFESTS_FOLDER}/{name}")
    if (match := _NAME.fullmatch(name)) is None or hashlib.sha256(data).hexdigest()[:32] != match[3]:
        return None
    try:
        tree = json.loads(data.decode("utf-8", "surrogatepass"))
        if tree["schema_version"] != SCHEMA_VERSION:
            raise DamagedRun(
                f"{store.url}: manifest {name} has schema version {tree['schema_version']!r}, expected "
                f"{SCHEMA_VERSION}; use the draco-ray that wrote it"
            )
        files = _ENTRIES.validate_python(tree["files"])
        for path in files:
            _check_inside(path)
        return Manifest(int(match[1]), int(match[2]), files, name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise DamagedRun(f"{store.url}: manifest {name} is damaged: {problem}; remove it") from None


def _check_inside(path: str) -> None:
    """Refuse a path that leads out of the run directory. Raises: ValueError."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\0" in path or ".." in parts or str(PurePosixPath(path)) != path:
        raise ValueError(f"{path[:100]!r} is not a file of a run directory")


@dataclass(frozen=True, slots=True)
class Marker:
    """A file in a local run directory that names its copy in a store. It is not copied."""

    url: str
    manifests: tuple[str, ...] = ()
    """Names of the manifests that describe the folder's content. These are the last one that was written from the
    folder or restored to it, and those whose write reported an error but may have succeeded."""

    def write(self, folder: Path) -> None:
        """Write the marker into a folder."""
        write_private(folder / MARKER_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Marker | None:
        """A folder's marker; None if it has none."""
        try:
            tree = json.loads((folder / MARKER_FILE).read_text(encoding="utf-8"))
            return cls(str(tree["url"]), tuple(tree["manifests"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

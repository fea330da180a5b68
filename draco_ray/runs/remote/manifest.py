"""The manifest of a run in an object store: which files it consists of, and which bytes they are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from draco_ray.errors import DamagedRun
from draco_ray.runs.remote.store import ObjectStore

SCHEMA_VERSION = 1
FOLDER, OBJECTS = "manifests", "objects"
KEPT = 2
"""Manifests that stay whole in the store: who reads one while the next is written finds all of it."""
_NAME = re.compile(r"(\d{6})-(\d{8})-([0-9a-f]{32})\.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the bytes of a file are."""

    size: int
    sha256: str
    object: str
    """Name below ``objects/``: the SHA-256 of that object."""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """A run as it was at one moment."""

    epoch: int
    """Grows with every driver that takes the run over: what an earlier one writes after that counts for nothing."""
    number: int
    files: Mapping[str, Entry]
    """By path in the run directory, with ``/``."""
    name: str = ""
    """Of its object, in ``manifests/``; empty for one that is not in the store."""

    @property
    def objects(self) -> set[str]:
        """Names of the objects that hold its files."""
        return {entry.object for entry in self.files.values()}

    @property
    def checkpoint_steps(self) -> list[int]:
        """Training steps that have a checkpoint, ascending."""
        found = (re.match(r"checkpoints/step(\d+)/", path) for path in self.files)
        return sorted({int(match[1]) for match in found if match})

    @property
    def begun(self) -> bool:
        """Whether the run has begun: a step has rows or metrics, or a checkpoint was written."""
        return any(path == "metrics.jsonl" or path.startswith(("tables/", "checkpoints/")) for path in self.files)

    def encoded(self) -> tuple[str, bytes]:
        """The name of its object, and what that holds."""
        files = {path: asdict(entry) for path, entry in sorted(self.files.items())}
        tree = {"schema_version": SCHEMA_VERSION, "epoch": self.epoch, "number": self.number, "files": files}
        data = json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return f"{self.epoch:06d}-{self.number:08d}-{hashlib.sha256(data).hexdigest()[:32]}.json", data


def manifest_names(store: ObjectStore) -> list[str]:
    """Names of the manifests, the latest first."""
    return sorted((name for name in store.names(FOLDER) if _NAME.fullmatch(name)), reverse=True)


def latest_manifest(store: ObjectStore, place: str) -> Manifest | None:
    """The latest manifest that is whole; None where there is none.

    Raises:
        DamagedRun: none is whole, or the latest has another schema version.
    """
    names = manifest_names(store)
    for name in names:
        try:
            data = store.read(f"{FOLDER}/{name}")
        except FileNotFoundError:
            continue
        if (found := read_manifest(name, data, place)) is not None:
            return found
    if names:
        raise DamagedRun(f"{place}: none of its {len(names)} manifests is whole; restore one below {FOLDER}/")
    return None


def read_manifest(name: str, data: bytes, place: str) -> Manifest | None:
    """A manifest from its object; None if it is not whole.

    Raises:
        DamagedRun: its schema has another version, or it names what is no file of a run.
    """
    if (match := _NAME.fullmatch(name)) is None or hashlib.sha256(data).hexdigest()[:32] != match[3]:
        return None
    try:
        tree = json.loads(data.decode("utf-8", "surrogatepass"))
        if tree["schema_version"] != SCHEMA_VERSION:
            raise DamagedRun(
                f"{place}: manifest {name} has schema version {tree['schema_version']!r}, expected {SCHEMA_VERSION}; "
                "use the draco-ray that wrote it"
            )
        files = {_inside(path): _entry(entry) for path, entry in tree["files"].items()}
        return Manifest(int(match[1]), int(match[2]), files, name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedRun(f"{place}: manifest {name} is damaged: {str(error)[:200]}; remove it") from None


def _entry(tree: Mapping[str, object]) -> Entry:
    size, offset, names = tree["size"], tree["offset"], (tree["sha256"], tree["object"])
    if type(size) is not int or type(offset) is not int or size < 0 or offset < 0:
        raise ValueError("a size is no number of bytes")
    if not all(isinstance(name, str) and re.fullmatch(r"[0-9a-f]{64}", name) for name in names):
        raise ValueError("a checksum is none")
    return Entry(size, str(names[0]), str(names[1]), offset)


def _inside(path: str) -> str:
    """A path, if it leads to a file in the run directory. Raises: ValueError."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\0" in path or ".." in parts or str(PurePosixPath(path)) != path:
        raise ValueError(f"{path[:100]!r} is no file of a run directory")
    return path

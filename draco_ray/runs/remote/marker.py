"""A file in a run's local folder that says which copy in an object store it is ahead of. It is not copied."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from draco_ray.runs.directory import write_private

FILE, STAGING = ".store.json", ".staging"


@dataclass(frozen=True, slots=True)
class Marker:
    """Where a folder's copy is, and which one."""

    url: str
    manifest: str | None
    """Name of the last one that was written from this folder, or that it was restored from."""
    writing: tuple[str, ...] = ()
    """Names of those that were being written."""

    def of(self, manifest: str | None) -> bool:
        """Whether the folder has everything that a manifest in the store names."""
        return manifest is not None and manifest in (self.manifest, *self.writing)

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        write_private(folder / FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Marker | None:
        """That of a folder; None if it has none."""
        try:
            tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
            return cls(str(tree["url"]), tree.get("manifest"), tuple(tree.get("writing") or ()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

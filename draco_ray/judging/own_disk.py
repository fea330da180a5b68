"""Whether a folder lies on a disk of this machine: SQLite relies on its locks and on the order of its writes."""

from __future__ import annotations

import re
from pathlib import Path

from draco_ray.errors import StoreError

SHARED_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse")
)
"""Types of file systems that several machines share, or of which nobody knows what is behind them."""
OWN_FUSE = frozenset(("fuse.fuse-overlayfs",))
"""Of a container's own disk."""
MOUNTS = Path("/proc/mounts")


def check_own_disk(folder: Path, mounts: str | None = None) -> None:
    """Check that judge replies may be kept in a folder.

    Args:
        folder: need not be there.
        mounts: what /proc/mounts says; None: of this machine.

    Raises:
        StoreError: it lies on a file system that machines share.
    """
    if mounts is None:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.exists() else ""
    kind, mounted = file_system_of(folder.resolve(), mounts)
    if kind in OWN_FUSE or kind.partition(".")[0] not in SHARED_FILE_SYSTEMS:
        return
    raise StoreError(
        f"judge replies would be kept in {folder.resolve()}, on {mounted}, whose file system ({kind}) machines share: "
        "SQLite, which keeps them, may lose there what was paid for: name a folder on a disk of this machine "
        "(--out, or judge.cache of a training run)"
    )


def file_system_of(path: Path, mounts: str) -> tuple[str, str]:
    """Type and mount point of the file system on which an absolute path lies; empty where nothing says so.

    Args:
        path: need not be there.
        mounts: lines of /proc/mounts.
    """
    found = ("", Path())
    for line in mounts.splitlines():
        if len(words := line.split()) < 3:
            continue
        at = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[1]))
        # Of two at one place the later hides the earlier.
        if path.is_relative_to(at) and len(at.parts) >= len(found[1].parts):
            found = (words[2], at)
    return found[0], str(found[1])

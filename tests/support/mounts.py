"""File systems that this machine is made to have."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest


def mounted(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[str, str]) -> None:
    """Let these be all mounts, each a mount point and a type of file system, in their order."""
    found = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)

"""Fakes the machine's mounts."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest


def patch_mounts(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[str, str]) -> None:
    """Replace the machine's mounts by these (mount point, type of file system), in this order."""
    found = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)

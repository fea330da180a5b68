"""One process at a time works in a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from draco_ray.errors import ConfigError, StoreError
from draco_ray.runs.directory import RunDirectory, damaged


@contextlib.contextmanager
def sole_driver(run: RunDirectory) -> Iterator[None]:
    """Refuse to work on a run directory that another process works on.

    Raises:
        ConfigError: one does.
        StoreError: it cannot be written.
    """
    lock = run.path / ".lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"run directory {run.path} cannot be written: {error.strerror}; make it writable, and continue the run"
            ) from None
        raise damaged(lock, error.strerror) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run directory {run.path}: another process is working in it; end that one") from None
        yield
    finally:
        os.close(descriptor)

"""Output files of commands (``--out``), written atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from draco_ray.errors import ConfigError


def check_writable(path: Path) -> None:
    """Check, before any work, that a file can be written.

    Raises:
        ConfigError: ``path`` is a folder, or its own folder cannot be made or written.
    """
    if path.is_dir():
        raise ConfigError(f"--out {path}: this is a folder; expected a file, e.g. {path / 'NAME'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: cannot be written: no permission to write in {path.parent}")


def create_output_folder(path: Path) -> Path:
    """Create the output folder, before any work.

    Raises:
        ConfigError: ``path`` is a file, or cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be created as a folder: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--out {path}: cannot be written: no permission")
    return path


@contextlib.contextmanager
def atomic_output_file(path: Path) -> Iterator[Path]:
    """A temporary file that is renamed to ``path`` if the block succeeds and removed if it fails.

    Raises:
        ConfigError: as `check_writable`, or a full disk.
    """
    check_writable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader never sees a part of it."""
    temporary = path.with_name(f".{path.name}.unfinished")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def escape_csv_formula(text: str) -> str:
    """A text as a CSV cell that spreadsheets do not run as a formula: an apostrophe marks it as text."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text

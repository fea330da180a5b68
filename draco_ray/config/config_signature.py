"""Detects whether this user wrote a run directory's configuration, by a signature with a key in the user's home.

Run directories may be shared. Their configuration names programs, endpoints and isolation, so another user's
configuration must not be run without confirmation. Used by `draco_ray.config.load`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
"""Version of the schema of run directories; run directories of other versions are refused."""
RUN_FILE = "run.json"
_KEY_BYTES = 32


def sign_config(run: Path, *configs: str) -> None:
    """Write ``run.json``: the schema version, the configuration's digest, and this user's signature of it.

    While a configuration is replaced, ``configs`` are the old and the new one, and ``run.json`` has both digests and
    signatures.
    """
    signatures = [_signature(each, create=True) for each in configs]
    origin: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "config_sha256": " ".join(map(_digest, configs)),
        "signature": " ".join(filter(None, signatures)) or None,
    }
    write_private(run / RUN_FILE, json.dumps(origin) + "\n")


def is_run_directory(path: Path) -> bool:
    """Whether this folder is a run directory."""
    beside = ("metrics.jsonl", "tables", "checkpoints", "judge_cache")
    return (path / RUN_FILE).exists() or (
        (path / "config.yaml").exists() and any((path / name).exists() for name in beside)
    )


def is_ours(run: Path, config_yaml: str) -> bool:
    """Whether the run directory has this user's signature of this configuration."""
    found, mine = _written(run, "signature"), _signature(config_yaml, create=False)
    return mine is not None and any(hmac.compare_digest(each.encode(), mine.encode()) for each in (found or "").split())


def config_edit_problem(run: Path, config_yaml: str) -> str | None:
    """A message if a run's configuration is not what the run wrote; None if it is unchanged, or if that is unknown."""
    if not config_yaml.strip():
        return "the file is empty; restore it from a copy"
    if (known := _written(run, "config_sha256")) is None or _digest(config_yaml) in known.split():
        return None
    return "undo the edit; to change settings use `draco train --resume DIR KEY=VALUE --allow-changed-config`"


def _written(run: Path, key: str) -> str | None:
    try:
        if not (run / RUN_FILE).is_file():
            return None
        found = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def find_escaping_symlink(run: Path) -> Path | None:
    """A link in the run directory that leads out of it, or None."""
    inside = Path(os.path.realpath(run))
    for folder, folders, files in os.walk(run):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                return path
    return None


def write_private(path: Path, text: str) -> None:
    """Write a file of a run directory atomically and durably, readable by its owner only. Raises: OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # Sync the folder, which holds the new name.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def create_once(path: Path, content: bytes) -> None:
    """Create a private file, durably, unless it exists; the first of several processes wins. Raises: OSError."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Write a draft and link it to the path, so that the file appears with its whole content or not at all.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(draft, "wb", opener=private_opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` for files that only this user can read; does not follow links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _signature(text: str, *, create: bool) -> str | None:
    key = _key(create=create)
    return None if key is None else hmac.new(key, text.encode("utf-8"), hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes | None:
    """This user's key; None if it does not exist or cannot be stored, so that no run counts as this user's."""
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "draco-ray" / "key"
    with contextlib.suppress(OSError):
        if create:
            create_once(path, secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
        return key if len(key) == _KEY_BYTES else None
    return None

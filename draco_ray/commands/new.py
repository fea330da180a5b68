"""``draco new``: a folder to begin with."""

from __future__ import annotations

import shutil
from pathlib import Path

from draco_ray.errors import ConfigError

TEMPLATE = Path(__file__).with_name("environment_template")


def new_environment(folder: Path) -> list[Path]:
    """Write an environment of tools, ready to be trained in, and a test that does so.

    Returns: its files. Raises: ConfigError where the folder holds something already, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [path for path in sorted(TEMPLATE.iterdir()) if path.is_file()]
        return [Path(shutil.copyfile(path, folder / path.name)) for path in files]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None

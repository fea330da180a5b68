"""``draco new``: writes a template folder to start from."""

from __future__ import annotations

import shutil
from pathlib import Path

from draco_ray.config.machine import cores, has_gpu
from draco_ray.config.schema import AlgorithmConfig
from draco_ray.errors import ConfigError

PROMPTS_PER_STEP = 2
SLOTS_PER_CORE = 16
"""Environment slots per CPU core."""
TEMPLATE = Path(__file__).with_name("environment_template")


def new_environment(folder: Path) -> list[Path]:
    """Write an environment of tools that is ready for training, and a test that trains in it.

    Returns: its files. Raises: ConfigError: the folder is not empty, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is not an empty folder; choose another one")
        folder.mkdir(parents=True, exist_ok=True)
        files = [path for path in sorted(TEMPLATE.iterdir()) if path.is_file()]
        written = [Path(shutil.copyfile(path, folder / path.name)) for path in files]
        configuration = folder / "environment.yaml"
        configuration.write_text(_for_this_machine(configuration.read_text(encoding="utf-8")), encoding="utf-8")
        return written
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None


def _for_this_machine(text: str) -> str:
    """Fill in the template's configuration: as many slots as a step and the cores can use; CPU if there is no GPU."""
    slots = min(PROMPTS_PER_STEP * AlgorithmConfig().group_size, SLOTS_PER_CORE * cores())
    for mark, value in (("SLOTS", slots), ("GROUP", AlgorithmConfig().group_size), ("PROMPTS", PROMPTS_PER_STEP)):
        text = text.replace(f"{{{mark}}}", str(value))
    return text.replace("{EXTENDS}\n", "" if has_gpu() else "extends: cpu # no GPU was found on this machine\n")

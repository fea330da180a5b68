"""Finds components by name, for configuration keys such as ``algorithm.rule``.

A name is a built-in one, one that an installed package registers as an entry point, ``package.module:attribute``, or
``folder/file.py:attribute`` for a file that is not installed. Components are only imported when needed.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from draco_ray.errors import ConfigError


def find_component(key: str, name: str, built_in: Mapping[str, str]) -> Any:
    """The component called ``name``.

    Args:
        key: the configuration key; packages register components for it in the entry-point group ``draco_ray.<key>``.
        name: a built-in name, one of an installed package, ``package.module:attribute``, or
            ``folder/file.py:attribute``.
        built_in: names of built-in components -> their paths.

    Raises:
        ConfigError: there is no such component, or its module cannot be imported.

    >>> find_component("algorithm.rule", "statistics:mean", {})([1, 3])
    2
    """
    # Built-in components are paths, not entry points: Ray ships this package's folder without installed metadata.
    known = built_in if name in built_in or ":" in name else {**installed(key), **built_in}
    module_name, colon, attribute = known.get(name, name).rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"{key}={name!r}: unknown{hint}; expected {', '.join(sorted(known))}, or your own as "
            "package.module:attribute or folder/file.py:attribute"
        )
    try:
        module = _file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}={name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{key}={name!r}: {module_name} has no {attribute!r}") from None


def installed(key: str) -> dict[str, str]:
    """Names that installed packages register for a key -> paths; of equal names the first on the import path wins."""
    return {each.name: f"{each.module}:{each.attr}" for each in reversed(entry_points(group=f"draco_ray.{key}"))}


def _file(path: Path) -> ModuleType:
    """Import a file as a module whose name is the same in every process."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    name = f"draco_part_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

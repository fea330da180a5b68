"""Stands in for torchvision where none is installed: importing any part of it works, using it does not.

vLLM's module of the Qwen3.5 family imports image processing on its way to the language model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from enum import Enum

__version__ = "0.0.0"


class InterpolationMode(Enum):
    """transformers has a table with these names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Part(types.ModuleType):
    """A module whose every name exists."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Part(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(Finder())

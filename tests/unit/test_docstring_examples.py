"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "draco_ray"
NEEDS_APPWORLD = ("sandbox.world", "sandbox.execute")
"""Modules that only AppWorld's own Python can import."""
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if re.search(r"^ *>>> ", path.read_text("utf-8"), re.M)]
MODULES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("module", [each for each in MODULES if not each.startswith(NEEDS_APPWORLD)])
def test_the_examples_run(module: str) -> None:
    name = "draco_ray" if module == "__init__" else f"draco_ray.{module}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0

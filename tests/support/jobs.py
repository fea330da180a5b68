"""The scripts of ``jobs/`` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

JOBS = Path(__file__).parents[2] / "jobs"


def load_job(name: str) -> ModuleType:
    """Import ``jobs/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

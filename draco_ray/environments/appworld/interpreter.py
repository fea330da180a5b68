"""Where AppWorld's own Python lives: its pins clash with everything else, so it has an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

from draco_ray.errors import WorldError

VARIABLE = "DRACO_APPWORLD_PYTHON"


def appworld_python(configured: str | None) -> str:
    """Path of the interpreter of AppWorld's virtual environment.

    Args:
        configured: ``environment.appworld_python``; None looks at DRACO_APPWORLD_PYTHON, then at
            ``.venv-appworld/bin/python`` in the working directory and beside the package.
    Raises: WorldError when there is none.
    """
    named = configured or os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise WorldError(f"AppWorld's Python {named!r} is not an executable file: fix environment.appworld_python")
        # Not resolved: a virtual environment is known by the path of its own `python` link.
        return os.path.abspath(named)
    for base in (Path.cwd(), Path(__file__).resolve().parents[3]):
        candidate = base / ".venv-appworld" / "bin" / "python"
        if candidate.exists():
            return str(candidate)
    raise WorldError(f"AppWorld's Python was not found: run `make setup`, or set {VARIABLE} to its interpreter")

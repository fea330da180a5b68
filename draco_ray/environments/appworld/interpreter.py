"""AppWorld's own Python: its pins clash with everything else, so it has a virtual environment of its own.

It runs code of this package too. An installed package lies among all others, in the very versions that clash, so
AppWorld's Python imports it through a folder that holds nothing but a link to it
(`draco_ray.environments.jail.launch.link_package`).
"""

from __future__ import annotations

import os
from pathlib import Path

from draco_ray.environments.jail.launch import PACKAGE
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
    for base in (Path.cwd(), PACKAGE.parent):
        candidate = base / ".venv-appworld" / "bin" / "python"
        if candidate.exists():
            return str(candidate)
    raise WorldError(f"AppWorld's Python was not found: run `make setup`, or set {VARIABLE} to its interpreter")

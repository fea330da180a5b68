"""The Python of a package that has a virtual environment of its own, because its pins clash with everything else."""

from __future__ import annotations

import os
from pathlib import Path

from draco_ray.environments.jail.launch import PACKAGE
from draco_ray.errors import WorldError


def own_python(configured: str | None, *, of: str, key: str, variable: str, folder: str, made_by: str) -> str:
    """Path of the interpreter of a package's virtual environment.

    Args:
        configured: the value of the configuration's ``key``; None looks at the environment ``variable``, then at
            ``<folder>/bin/python`` in the working directory and beside this package.
        of: whose it is, for messages.
        made_by: what makes the virtual environment.
    Raises: WorldError when there is none.
    """
    named = configured or os.environ.get(variable)
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise WorldError(f"{of} Python {named!r} is not an executable file: fix {key}, or {variable}")
        # Not resolved: a virtual environment is known by the path of its own `python` link.
        return os.path.abspath(named)
    for base in (Path.cwd(), PACKAGE.parent):
        candidate = base / folder / "bin" / "python"
        if candidate.exists():
            return str(candidate)
    raise WorldError(f"{of} Python was not found: run `{made_by}`, or set {variable} to its interpreter")

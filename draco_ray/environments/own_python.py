"""Finds the Python of a package that needs its own virtual environment because its pinned dependencies conflict."""

from __future__ import annotations

import os
from pathlib import Path

from draco_ray.environments.jail.launch import PACKAGE
from draco_ray.errors import WorldError


def own_python(configured: str | None, *, of: str, key: str, variable: str, folder: str, made_by: str) -> str:
    """Path of the interpreter of a package's virtual environment.

    Args:
        configured: the value of ``key`` in the configuration; None: the environment ``variable``, else
            ``<folder>/bin/python`` in the working directory or beside this package.
        of: the package's name with 's, for messages.
        made_by: the command that creates the virtual environment.
    Raises: WorldError: there is none.
    """
    named = configured or os.environ.get(variable)
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise WorldError(f"{of} Python {named!r} is not an executable file; correct {key} or {variable}")
        # Do not resolve links: Python finds its virtual environment by the path of the `python` link.
        return os.path.abspath(named)
    for base in (Path.cwd(), PACKAGE.parent):
        candidate = base / folder / "bin" / "python"
        if candidate.exists():
            return str(candidate)
    raise WorldError(f"{of} Python was not found; run `{made_by}`, or set {variable} to its interpreter")

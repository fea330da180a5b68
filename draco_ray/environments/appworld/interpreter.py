"""Finds AppWorld's Python: its pinned dependencies conflict with ours, so it has its own virtual environment.

AppWorld's Python also runs code of this package. The folder where this package is installed may contain conflicting
versions of dependencies, so AppWorld's Python imports this package from a folder that contains only a link to it
(`draco_ray.environments.jail.launch.link_package`).
"""

from __future__ import annotations

from draco_ray.environments.own_python import own_python

PYTHON_VARIABLE = "DRACO_APPWORLD_PYTHON"


def appworld_python(configured: str | None) -> str:
    """Path of the interpreter of AppWorld's virtual environment.

    Args:
        configured: ``environment.appworld_python``; None: DRACO_APPWORLD_PYTHON, else ``.venv-appworld/bin/python`` in
            the working directory or beside the package.
    Raises: WorldError: there is none.
    """
    return own_python(
        configured,
        of="AppWorld's",
        key="environment.appworld_python",
        variable=PYTHON_VARIABLE,
        folder=".venv-appworld",
        made_by="make setup",
    )

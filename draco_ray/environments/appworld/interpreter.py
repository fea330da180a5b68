"""AppWorld's own Python: its pins clash with everything else, so it has a virtual environment of its own.

It runs code of this package too. An installed package lies among all others, in the very versions that clash, so
AppWorld's Python imports it through a folder that holds nothing but a link to it
(`draco_ray.environments.jail.launch.link_package`).
"""

from __future__ import annotations

from draco_ray.environments.own_python import own_python

VARIABLE = "DRACO_APPWORLD_PYTHON"


def appworld_python(configured: str | None) -> str:
    """Path of the interpreter of AppWorld's virtual environment.

    Args:
        configured: ``environment.appworld_python``; None looks at DRACO_APPWORLD_PYTHON, then at
            ``.venv-appworld/bin/python`` in the working directory and beside the package.
    Raises: WorldError when there is none.
    """
    return own_python(
        configured,
        of="AppWorld's",
        key="environment.appworld_python",
        variable=VARIABLE,
        folder=".venv-appworld",
        made_by="make setup",
    )

"""Programs that the documentation shows, up to their ``if __name__ == "__main__"``: their imports and definitions."""

from __future__ import annotations

import os
import runpy
import typing

import typing_extensions

from tests.support.adapters import emit


def main() -> None:
    """Print what each program defines."""
    # See skyrl_batch.
    typing.TypedDict = typing_extensions.TypedDict
    emit({path: sorted(runpy.run_path(path, run_name="shown")) for path in os.environ["PROGRAMS"].split()})


if __name__ == "__main__":
    main()

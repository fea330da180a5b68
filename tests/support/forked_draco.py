"""The ``draco`` command in a process that is forked for it, as `tests.support.standing_ray.draco_forked` asks."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # This folder's files are not to be imported by their bare names.
    sys.path.pop(0)
    # As a new interpreter opens them: those of the fork server are a file's, in which one can go back.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    from draco_ray.cli import main

    main()

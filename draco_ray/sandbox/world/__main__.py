"""Builds the sandbox, run by AppWorld's own Python: ``python -m draco_ray.sandbox.world '{"out": FOLDER, ...}'``.

The argument holds `build`'s arguments in JSON, which `draco sandbox build` has checked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from draco_ray.errors import DracoError
from draco_ray.sandbox.world.build import build


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: str) -> int:
    """Make a complete AppWorld root.

    Returns the exit status: 0, 2 if it cannot be made, 130 when interrupted.
    """
    options = json.loads(arguments)
    # Tasks run under other user ids, which must be able to read the world; it holds no secrets.
    os.umask(0o022)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C: clean up first
    try:
        build(**options | {"out": Path(options["out"]), "progress": _say})
    except (DracoError, OSError) as error:
        print(f"draco: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draco: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

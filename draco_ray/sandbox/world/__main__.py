"""Builds the sandbox, run by AppWorld's own Python: ``python -m draco_ray.sandbox.world --out FOLDER``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from draco_ray.errors import DracoError
from draco_ray.sandbox.world.build import DEFAULT_USERS, build
from draco_ray.sandbox.world.scripts import VARIETIES


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Make a complete AppWorld root.

    Returns the exit status: 0, 2 for unusable arguments, 130 when interrupted.
    """
    parser = argparse.ArgumentParser(prog="sandbox", description="Make a complete AppWorld root.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; an older sandbox in it is replaced")
    parser.add_argument("--variety", default=VARIETIES[0], help="kind of tasks: " + " or ".join(VARIETIES))
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same world")
    parser.add_argument("--users", type=int, default=DEFAULT_USERS, help="number of main users of the world")
    parser.add_argument(
        "--scenarios", type=int, default=None, help="maximum number of scenarios per split (default: a full world)"
    )
    parser.add_argument("--force", action="store_true", help="rebuild an existing world")
    options = parser.parse_args(arguments)
    # Tasks run under other user ids, which must be able to read the world; it holds no secrets.
    os.umask(0o022)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C: clean up first
    try:
        build(options.out, options.seed, options.users, options.scenarios, options.force, _say, options.variety)
    except (DracoError, OSError) as error:
        print(f"draco: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draco: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

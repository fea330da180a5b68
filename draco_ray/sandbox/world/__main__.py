"""Command line of the sandbox, run by AppWorld's own Python: ``python -m draco_ray.sandbox.world …``."""

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
    """Run ``build`` or ``verify``.

    Returns the exit status: 0, 1 for failing tasks, 2 for unusable arguments, 130 when interrupted.
    """
    parser = argparse.ArgumentParser(prog="sandbox", description="A generated AppWorld world.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="make a complete AppWorld root")
    make.add_argument("--out", type=Path, required=True, help="folder to write; an older sandbox in it is replaced")
    make.add_argument("--variety", default=VARIETIES[0], help="kind of tasks: " + " or ".join(VARIETIES))
    make.add_argument("--seed", type=int, default=0, help="the same seed gives the same world")
    make.add_argument("--users", type=int, default=DEFAULT_USERS, help="number of main users of the world")
    make.add_argument(
        "--scenarios", type=int, default=None, help="maximum number of scenarios per split (default: a full world)"
    )
    make.add_argument("--force", action="store_true", help="rebuild an existing world")
    check = commands.add_parser(
        "verify",
        help="run every task and check that the reference solution passes, and doing nothing or a fatal fault fails",
    )
    check.add_argument("--root", type=Path, required=True, help="a folder made by build")
    check.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    # Tasks run under other user ids, which must be able to read the world; it holds no secrets.
    os.umask(0o022)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C: clean up first
    try:
        if options.command == "build":
            build(options.out, options.seed, options.users, options.scenarios, options.force, _say, options.variety)
            return 0
        from draco_ray.sandbox.world.verify import verify

        failing = verify(options.root, options.jobs, _say)
    except (DracoError, OSError) as error:
        print(f"draco: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draco: interrupted", file=sys.stderr)
        return 130
    _say("verify: all tasks passed the checks" if not failing else f"verify: {len(failing)} failing tasks")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a node manager starts as a Python worker where there is a fork server: it asks that one for a forked worker.

Nothing but the standard library is imported here, and it stands for the worker until that ends. Where the worker is to
be another one than the fork server can make (an interpreter of its own, a container, Java), or the fork server does not
answer, this process becomes Ray's own start of a worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

SOCKET = "DRACO_FORK_SERVER"
"""Variable with the path of the fork server's socket."""
OWN_START = "DRACO_OWN_WORKER_START"
"""Variable with the path of the program that Ray would have started."""
AT_START = ("PYTHON", "LD_", "RAY_", "OMP_")
"""Prefixes of variables that are read when a process starts or a library is loaded,"""
NOT_AT_START = ("RAY_TRAIN_", "RAY_WARN_")
"""and of Ray Train's own, which are read when they are needed; it gives them to all of its actors."""
LENGTH = struct.Struct("!I")
"""Of a request, before it."""
FORK_SECONDS = 600.0
"""For the fork server to answer, most of which it imports; after that it is taken to stand still."""
FORKED = b"+"
"""What a client is told first."""
STATUS = struct.Struct("!i")
"""A worker's end, as `os.waitpid` gives it."""


def wanted(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """What to fork.

    Args:
        arguments: of Ray's start of a worker.

    Returns: the worker's program with its arguments, and variables to set; None: it is nothing to fork.
    """
    rest, context, language = [], "{}", ""
    for argument in arguments:
        name, _, value = argument.partition("=")
        match name:
            case "--serialized-runtime-env-context":
                context = value
            case "--language":
                language = value
            case _:
                rest.append(argument)
    given: Mapping[str, Any] = json.loads(context)
    variables: Mapping[str, str] = given.get("env_vars") or {}
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    if (
        language != "PYTHON"
        or not rest
        or not rest[0].endswith(".py")
        or given.get("command_prefix")
        or given.get("override_worker_entrypoint")
        or given.get("py_executable", sys.executable) != sys.executable
        or any(name.startswith(AT_START) and not name.startswith(NOT_AT_START) for name in changed)
        # A reference to another variable, which Ray expands.
        or any("$" in value for value in changed.values())
    ):
        return None
    return rest, changed


def ask(path: str, arguments: Sequence[str], variables: Mapping[str, str], seconds: float = FORK_SECONDS) -> int:
    """Have a worker forked and wait until it ends; returns its exit code.

    Raises: OSError: nothing was forked: there is no fork server, it could not, or did not in so many seconds.
    """
    request = json.dumps(
        {
            "arguments": arguments,
            "environment": {**os.environ, **variables},
            "folder": os.getcwd(),
            "niceness": os.nice(0),
            "group": os.getpgrp(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
    ).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(seconds)
        server.connect(path)
        socket.send_fds(server, [LENGTH.pack(len(request))], [0, 1, 2])
        server.sendall(request)
        if server.recv(1) != FORKED:
            raise ConnectionError("the fork server has ended")
        server.settimeout(None)
        status = server.recv(STATUS.size)
    # Without a status the fork server was killed: the worker lives on, and Ray knows it by now.
    return os.waitstatus_to_exitcode(*STATUS.unpack(status)) if status else 1


def main() -> NoReturn:
    """Fork, or become what Ray would have started."""
    asked = wanted(sys.argv[1:])
    if asked is not None:
        try:
            code = ask(os.environ[SOCKET], *asked)
        except OSError as error:
            print(f"no forked worker: {error}", file=sys.stderr)
        else:
            if code < 0:
                os.kill(os.getpid(), -code)
            sys.exit(code)
    os.execv(sys.executable, [sys.executable, os.environ[OWN_START], *sys.argv[1:]])


if __name__ == "__main__":
    main()

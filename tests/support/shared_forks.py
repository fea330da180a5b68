"""One fork server for all the nodes that a test starts on this machine, which are several Rays' or come and go.

Each node that `draco train` starts has one of its own, which imports for itself; there is one node then.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import ray._private.services

from draco_ray.workers import ask_fork_server, fork_server
from draco_ray.workers.forked import CLIENT, NIL_JOB, REGISTER_SECONDS, WAITING

SERVE = "serve"


@contextlib.contextmanager
def shared_fork_server(modules: Sequence[str]) -> Iterator[str]:
    """The path of the socket of one that imports these; when the block is left it ends, and workers that are left."""
    here = [sys.executable, "-m", "tests.support.shared_forks", SERVE]
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="forks") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(at := f"{folder}/socket")
        listener.listen(WAITING)
        # It ends with its node manager, whose place this takes.
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as holder, open(os.devnull, "wb") as imported:
            server = subprocess.Popen(
                [*here, str(listener.fileno()), str(imported.fileno()), *modules],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if Path(path).exists()),
                    "RAY_RAYLET_PID": str(holder.pid),
                    "RAY_JOB_ID": NIL_JOB,
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno(), imported.fileno()],
                process_group=0,
            )
            yield at
        server.wait()


@contextlib.contextmanager
def forking_from(at: str) -> Iterator[None]:
    """Let nodes that this process starts inside the block fork their workers there."""
    services = ray._private.services
    once = services.start_raylet
    signature = inspect.signature(once)

    @wraps(once)
    def start_raylet(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        given.arguments["env_updates"] = {
            **(given.arguments.get("env_updates") or {}),
            ask_fork_server.SOCKET: at,
            ask_fork_server.OWN_START: given.arguments["setup_worker_path"],
            "RAY_worker_register_timeout_seconds": str(REGISTER_SECONDS),
        }
        given.arguments["setup_worker_path"] = str(CLIENT)
        return once(*given.args, **given.kwargs)

    services.start_raylet = start_raylet
    try:
        yield
    finally:
        services.start_raylet = once


def _serve() -> None:
    """Be the server. What Ray's library has read of its variables when it was loaded, each worker has it read again."""
    once = fork_server.become

    def become(request: fork_server.Request) -> None:
        from ray._raylet import Config  # type: ignore[attr-defined]  # Not in its stubs.

        os.environ.clear()
        os.environ.update(request.environment)
        Config.initialize("")
        once(request)

    fork_server.become = become
    fork_server.main()


def main() -> None:
    """Serve, or be `ray`, whose nodes fork their workers from the server that listens where the first word says."""
    if sys.argv[1] == SERVE:
        del sys.argv[1]
        _serve()
        return
    from ray.scripts.scripts import main as ray

    with forking_from(sys.argv.pop(1)):
        ray()


if __name__ == "__main__":
    main()

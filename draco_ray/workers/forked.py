"""Workers of a Ray on this machine that are forked from one process, which has imported what they need.

A new worker of Ray's is a new interpreter: PyTorch, vLLM, LiteLLM and Ray Train are imported once more by every actor,
which on a small machine is most of a short run. A fork has them at once, and shares their memory.

Only for a Ray that is started here, and without GPUs: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import ray
import ray._private.services
import ray._private.worker

from draco_ray.workers import ask_fork_server

HERE = Path(__file__).parent
CLIENT = HERE / "ask_fork_server.py"
SERVER = HERE / "fork_server.py"
NIL_JOB = "ff" * 4
"""Ray's library keeps the job that it finds in the environment when it is loaded; one of this serves any."""
WAITING = 64
"""Clients that may wait while modules are imported."""
REGISTER_SECONDS = 900
"""For a worker to register. Ray gives a minute, on a busy machine less than the imports take; it forgets one that is
late, and a driver waits for ever for the first ones of its node."""


@contextlib.contextmanager
def forked_workers(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Let a Ray that is started inside the block fork its Python workers, for as long as it lives.

    Args:
        modules: imported once for all of them; one that cannot be is left to the worker that needs it.
        environment: variables that these modules read when they are imported.
    """
    services, driver = ray._private.services, ray._private.worker
    once, join = services.start_raylet, driver.connect
    signature = inspect.signature(once)
    importing: list[int] = []

    @wraps(once)
    def start_raylet(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        session = Path(given.arguments["session_dir"])
        at = session / "sockets" / "fork_server"
        given.arguments["env_updates"] = {
            **(given.arguments.get("env_updates") or {}),
            ask_fork_server.SOCKET: str(at),
            ask_fork_server.OWN_START: given.arguments["setup_worker_path"],
            "RAY_worker_register_timeout_seconds": str(REGISTER_SECONDS),
        }
        given.arguments["setup_worker_path"] = str(CLIENT)
        # Before the node manager starts: its first workers ask at once, and wait.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(at))
            at.chmod(0o600)
            listener.listen(WAITING)
            started = once(*given.args, **given.kwargs)
            log = session / "logs" / "fork_server.log"
            importing.append(_start_server(listener, started.process.pid, log, modules, environment))
        return started

    @wraps(join)
    def connect(*arguments: Any, **named: Any) -> Any:
        # Ray waits for the first workers itself, but lets no signal's handler run meanwhile.
        for pipe in importing:
            select.select([pipe], [], [])
        return join(*arguments, **named)

    services.start_raylet, driver.connect = start_raylet, connect
    try:
        yield
    finally:
        services.start_raylet, driver.connect = once, join
        for pipe in importing:
            os.close(pipe)


def _start_server(
    listener: socket.socket, raylet: int, log: Path, modules: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Returns a pipe whose end is read once it has imported all, or has ended."""
    pipe, held = os.pipe()
    with log.open("ab") as file, open(held, "wb"):
        subprocess.Popen(
            [sys.executable, str(SERVER), str(listener.fileno()), str(held), *modules],
            env={
                **os.environ,
                **environment,
                # What is imported is this process's, also where it found that by its own working directory.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if Path(path).exists()),
                # As a worker would find them, for Ray's library reads them when it is loaded.
                "RAY_RAYLET_PID": str(raylet),
                "RAY_JOB_ID": NIL_JOB,
            },
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[listener.fileno(), held],
            # Ctrl-C at a terminal is for this process, which ends the node manager, and that the rest.
            process_group=0,
        )
    return pipe

"""A Ray as `draco train` starts it on this machine, which stands until its standard input ends; prints its address.

Runs that join it do not start its daemons each, nor import PyTorch, vLLM and Ray Train once more; with `draco_forked`
not even in the command itself, which is forked where the workers are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from draco_ray.workers import ask_fork_server
from tests.support.command import descendants, draco

FORKED = (
    sys.executable,
    ask_fork_server.__file__,
    "--language=PYTHON",
    str(Path(__file__).with_name("forked_draco.py")),
)
"""Waits for a forked command as Ray does for a worker."""
standing: dict[str, tuple[int, str]] = {}
"""By the address of a Ray that stands the process that has started it, and the socket of what forks its workers."""


def joining(address: str) -> dict[str, str]:
    """Variables of a program that joins the one at that address, as on a cluster."""
    # A Ray that `ray.init` has started asks for the token that it has made in ~/.ray.
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


def draco_forked(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as `tests.support.command.draco` does, forked by the Ray that stands and that it joins.

    It is a process of its own, with its own variables, and has imported what workers need before it begins. So it shows
    nothing of what a command imports, nor of how one is ended from outside: signals reach the one that waits for it.
    """
    variables = environment or {}
    address = variables.get("RAY_ADDRESS") or os.environ["RAY_ADDRESS"]
    asked = {**variables, ask_fork_server.SOCKET: standing[address][1]}
    return draco(*arguments, environment=asked, timeout=timeout, program=FORKED)


def workers_on(address: str) -> list[psutil.Process]:
    """Of the Ray that stands there: actors of what has joined it, and idle ones."""
    pid, _ = standing[address]
    agents = {each.pid for each in descendants(pid, "Agent")}
    return [each for each in descendants(pid, "ray::") if each.pid not in agents]


@contextmanager
def standing_ray() -> Iterator[str]:
    """The address of one, for as long as the block lasts."""
    command = [sys.executable, "-m", "tests.support.standing_ray"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        said = process.stdout.readline().split()
        assert said, f"no Ray: exit code {process.wait()}"
        address, socket = said
        standing[address] = process.pid, socket
        yield address
        del standing[address]
        process.stdin.close()


def main() -> None:
    """Stand until the standard input ends."""
    import ray
    import ray._private.worker

    from draco_ray.config.load import load_config
    from draco_ray.training.cluster import connect

    connect(load_config("sandbox", ["ray.dashboard=false"]))
    node: Any = ray._private.worker._global_node
    print(ray.get_runtime_context().gcs_address, f"{node.get_session_dir_path()}/sockets/fork_server", flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()

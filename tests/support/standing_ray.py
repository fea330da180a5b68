"""A Ray as `draco train` starts it on this machine, which stands until its standard input ends; prints its address.

Runs that join it do not start its daemons each, nor import PyTorch, vLLM and Ray Train once more.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def joining(address: str) -> dict[str, str]:
    """Variables of a program that joins the one at that address, as on a cluster."""
    # A Ray that `ray.init` has started asks for the token that it has made in ~/.ray.
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


@contextmanager
def standing_ray() -> Iterator[str]:
    """The address of one, for as long as the block lasts."""
    command = [sys.executable, "-m", "tests.support.standing_ray"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip()
        assert address, f"no Ray: exit code {process.wait()}"
        yield address
        process.stdin.close()


def main() -> None:
    """Stand until the standard input ends."""
    import ray

    from draco_ray.config.load import load_config
    from draco_ray.training.cluster import connect

    connect(load_config("sandbox", ["ray.dashboard=false"]))
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Two runs that join a real cluster at the same moment, which has room for one."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

RUN = """
import sys
import ray
from rich.console import Console
from draco_ray.config.load import load_config
from draco_ray.training import cluster
from draco_ray.training.cluster import connect_ray

cluster.CHECK_SECONDS, cluster.LOG_SECONDS = 0.2, 1.0
address, root, name = sys.argv[1:]
config = load_config("sandbox", [f"ray.address={address}", f"data.root={root}", f"run.name={name}"])
sys.stdin.readline()
connect_ray(config, console=Console(width=1000))
print("has room", flush=True)
sys.stdin.readline()
places = ray.remote(num_cpus=2)(cluster.StartLock).remote()
ray.get(places.__ray_ready__.remote())
cluster.release_start_lock()
print("has begun", flush=True)
sys.stdin.readline()
"""


class Run:
    """A driver that does the next thing when it is told."""

    def __init__(self, address: str, root: Path, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, address, str(root), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self) -> str:
        return self.lines.get()

    def says_at_last(self, unlike: str | tuple[str, ...]) -> str:
        """The first line that begins otherwise."""
        while (line := self.says()).startswith(unlike):
            pass
        return line


OTHER = "another run is starting on the Ray cluster, waiting for "


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    head = {"num_cpus": 2, "resources": {"judge": 4}, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    both = [Run(cluster.address, tmp_path, name) for name in ("one", "other")]
    yield both
    for run in both:
        run.process.kill()
        run.process.communicate()
    cluster.shutdown()


def test_of_two_runs_that_start_at_once_one_waits_until_the_other_has_its_places(runs: list[Run]) -> None:
    for run in runs:
        run.go_on()
    said = [run.says() for run in runs]
    assert "has room\n" in said
    first, second = runs if said[0] == "has room\n" else reversed(runs)
    (waiting,) = (line for line in said if line != "has room\n")
    assert waiting.startswith(OTHER)
    first.go_on()
    assert first.says() == "has begun\n"
    # What the first has taken is counted now.
    assert "rollout workers" in second.says_at_last(OTHER)
    # A killed run keeps neither its places nor the lock.
    first.process.kill()
    assert second.says_at_last("not enough free resources") == "has room\n"
    third = Run(*second_again(second))
    try:
        third.go_on()
        assert third.says().startswith(OTHER)
        second.process.kill()
        assert third.says_at_last(("another", "not enough free resources")) == "has room\n"
    finally:
        third.process.kill()
        third.process.communicate()


def second_again(run: Run) -> tuple[str, Path, str]:
    """What starts a run like this one, under another name."""
    address, root, _ = run.process.args[3:]  # type: ignore[index]
    return str(address), Path(str(root)), "third"

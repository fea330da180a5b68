"""Whether a run's processes fit on the nodes of a cluster, and what is printed while they do not."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import pytest
import ray
from ray.exceptions import ActorHandleNotFoundError
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.errors import ClusterError
from draco_ray.training import cluster
from draco_ray.training.cluster import CHECK_SECONDS, bundles, unplaced, wait_for_room

PAPER = load_config("qwen3.6-27b")
NODE = {"GPU": 8.0, "CPU": 54.0}
"""Just enough for it: two engines of two GPUs, four learner workers, 48 rollout workers."""


class Cluster:
    """What is free on each node at each check; the last one repeats. Time passes while somebody sleeps."""

    def __init__(self, *looks: Sequence[Mapping[str, float]]) -> None:
        self.looks = list(looks)
        self.now = 0.0
        self.asked: list[Sequence[Mapping[str, float]]] = []

    def free(self) -> Sequence[Mapping[str, float]]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, *, autoscaled: bool = False) -> list[str]:
        """The lines printed until there is room."""
        text = io.StringIO()
        with (
            patch.object(cluster, "time", self),
            patch.object(cluster, "_free", self.free),
            patch.object(cluster, "request_resources", lambda bundles: self.asked.append(bundles)),
        ):
            wait_for_room(PAPER, Console(file=text, width=1000), autoscaled=autoscaled)
        return text.getvalue().splitlines()


def test_a_run_that_has_room_says_nothing_and_asks_nobody() -> None:
    cluster = Cluster([NODE])
    assert cluster.wait(autoscaled=True) == []
    assert (cluster.now, cluster.asked) == (0.0, [])


def test_another_runs_gpus_are_not_free_and_what_is_waited_for_is_said_once_a_minute() -> None:
    # The other one holds half of the node's GPUs, for longer than a minute.
    busy = [{"GPU": 4.0, "CPU": 54.0}]
    cluster = Cluster(*[busy] * 15, [NODE])
    first, second = cluster.wait()
    assert (
        "4 of 4 learner workers (1 GPUs and 1 CPUs each, on one node) do not fit into 4 GPUs and 54 CPUs on 1 nodes"
        in first
    )
    assert "another run may use the rest" in first
    assert "waiting for 60 s: " in second
    assert cluster.now == 15 * CHECK_SECONDS


def test_gpus_that_are_free_on_too_many_nodes_are_no_room() -> None:
    scattered = [{"GPU": 1.0, "CPU": 54.0}] * 8
    assert unplaced(bundles(PAPER), scattered) == {"engines": 2}
    assert unplaced(bundles(PAPER), [{"GPU": 2.0, "CPU": 20.0}] * 4) == {}
    # The engines get the pairs, although the learner's workers could take them.
    assert unplaced(bundles(PAPER), [{"GPU": 1.0, "CPU": 60.0}] * 4 + [{"GPU": 2.0, "CPU": 2.0}] * 2) == {}
    assert unplaced(bundles(PAPER), []) == {"engines": 2, "learner workers": 4, "rollout workers": 48}


def test_nodes_that_scale_from_zero_are_asked_for_and_waited_for() -> None:
    head = {"CPU": 0.0}
    cluster = Cluster([head], [head], [head, NODE])
    (line,) = cluster.wait(autoscaled=True)
    assert "2 of 2 engines (2 GPUs and 1 CPUs each, on one node)" in line
    assert "nodes were requested" in line
    wanted, after = cluster.asked
    assert sum(bundle["GPU"] for bundle in wanted) == 8
    assert sum(bundle["CPU"] for bundle in wanted) == 54
    # From then on the run's own processes request what they need.
    assert after == []


def test_the_time_it_has_is_that_of_the_start() -> None:
    cluster = Cluster([{"CPU": 0.0}])
    with pytest.raises(
        ClusterError,
        match=r"^not enough free resources on the Ray cluster after watch.start_seconds=7200: 2 of 2 engines",
    ):
        cluster.wait(autoscaled=True)
    assert cluster.now >= 7200
    assert cluster.asked[-1] == []


def test_a_run_on_cpus_needs_room_for_its_cpus() -> None:
    sandbox = load_config("sandbox")
    asked = bundles(sandbox)
    assert all(gpus == 0 for of in asked.values() for gpus, _ in of)
    assert unplaced(asked, [{"CPU": 1000.0}]) == {}


def test_a_lock_of_a_ray_session_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(lock: object) -> None:
        raise ActorHandleNotFoundError("of another session")

    monkeypatch.setattr(cluster, "_start_locks", [object()])
    monkeypatch.setattr(ray, "kill", kill)
    cluster.release_start_lock()
    assert cluster._start_locks == []

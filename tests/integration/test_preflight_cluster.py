"""Two real Ray nodes: one of them does not see what it should."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ClusterError
from draco_ray.training import cluster, preflight
from draco_ray.training.cluster import connect_ray, wait_for_room

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


HEAD = {"num_cpus": 2, "resources": {"judge": 4}, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def two_node_cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    cluster.add_node(num_cpus=0, object_store_memory=80 << 20)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def two_nodes(two_node_cluster: Cluster) -> Iterator[Cluster]:
    """The same ones for every test, which leaves them."""
    yield two_node_cluster
    ray.shutdown()


def waits_while_another_holds_the_cpus(config: DracoConfig) -> None:
    """What real Ray reports as free: an actor holds every CPU until the second check."""

    @ray.remote(num_cpus=2)
    class Other:
        def there(self) -> None:
            pass

    other: Any = Other.remote()  # type: ignore[attr-defined]
    ray.get(other.there.remote())
    text, looks = io.StringIO(), 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            ray.kill(other)
        time.sleep(0.2)

    with patch.object(cluster, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)):
        wait_for_room(config, Console(file=text, width=1000))
    assert looks >= 1
    assert text.getvalue().startswith("not enough free resources on the Ray cluster, waiting for ")
    assert "rollout workers" in text.getvalue()
    assert "do not fit into 0 GPUs and 0 CPUs on 2 nodes; another run may use the rest" in text.getvalue()


def test_a_cluster_knows_the_run_and_every_node_is_asked(
    two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "world").mkdir()
    config = load_config("sandbox", [f"data.root={tmp_path / 'world'}", f"ray.address={two_nodes.address}"])
    run = tmp_path / "run"
    run.mkdir()
    # As in a submitted job that names one of the variables itself, which Ray lets nobody repeat.
    submitted = {"runtime_env": {"env_vars": {"LITELLM_LOCAL_MODEL_COST_MAP": "true"}}, "metadata": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(submitted))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("DRACO_RUN_DIRECTORY", str(run))
    before = signal.getsignal(signal.SIGTERM)
    assert connect_ray(config)["judge"] == 4
    # Ray's own would end this process with a stack trace.
    assert signal.getsignal(signal.SIGTERM) is before
    waits_while_another_holds_the_cpus(config)
    seen = ray.get(ray.remote(num_cpus=0)(lambda: dict(os.environ)).remote())
    assert seen["DRACO_RUN_DIRECTORY"] == str(run)
    assert seen["LITELLM_LOCAL_MODEL_COST_MAP"] == "true"

    assert len(ray.nodes()) == 2
    preflight.check_session(config, run)
    assert list(run.iterdir()) == []

    monkeypatch.setattr(preflight, "probe_node", lambda paths: "/shared/world")
    with pytest.raises(
        ClusterError, match=r"^node .*: /shared/world does not exist; every node with CPUs or GPUs needs it"
    ):
        preflight.check_session(config, run)
    # A node for judges alone needs neither data nor model.
    preflight.check_nodes(config, [node for node in ray.nodes() if not node["Resources"].get("CPU")])
    assert list(run.iterdir()) == []


def test_a_run_that_names_no_cluster_starts_its_own(
    two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray by itself joins what was started last on the machine, and refuses the resources that a new one is given."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    alone = ["ray.object_store_mib=80", "ray.dashboard=false"]
    connect_ray(load_config("sandbox", [f"data.root={tmp_path}", *alone]))
    assert signal.getsignal(signal.SIGTERM) is before
    assert ray.get_runtime_context().gcs_address != two_nodes.address
    assert len(ray.nodes()) == 1

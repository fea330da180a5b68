"""Two real Ray nodes: one of them does not see what it should."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from draco_ray.config import DracoConfig
from draco_ray.configuration import load_config
from draco_ray.errors import ClusterError
from draco_ray.training import preflight

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=0, object_store_memory=80 << 20)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_every_node_is_asked(two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "world").mkdir()
    config: DracoConfig = load_config("sandbox", [f"data.root={tmp_path / 'world'}"])
    run = tmp_path / "run"
    run.mkdir()
    assert len(ray.nodes()) == 2
    preflight.check_session(config, run)
    assert list(run.iterdir()) == []

    def on_another_host(marker: str, paths: list[str]) -> tuple[str | None, str]:
        """A node with a folder of its own under the same path: nobody sees what it writes."""
        return None, str(Path(marker).with_name("written-elsewhere"))

    monkeypatch.setattr(preflight, "probe_node", on_another_host)
    with pytest.raises(ClusterError, match=r"^node .*: has a run directory .* of its own; set run.root"):
        preflight.check_session(config, run)
    monkeypatch.setattr(preflight, "probe_node", lambda marker, paths: ("no /shared/world", marker))
    with pytest.raises(ClusterError, match=r"^node .*: no /shared/world; every node must see it under this path"):
        preflight.check_session(config, run)
    assert list(run.iterdir()) == []

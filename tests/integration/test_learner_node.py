"""A learner whose node is lost: it goes on when another comes, and until then it is said what has no place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from draco_ray.config.schema import ModelConfig
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.ray_lora import RayLoraLearner
from draco_ray.training.cluster import pending_demand
from tests.integration.test_learner_ray import (
    CONFIG,
    assert_same_adapter,
    make_group,
    model,
    train,
    train_alone,
)

pytestmark = [pytest.mark.slow, pytest.mark.deployment]
__all__ = ["model"]

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A cluster whose head, where the driver is, has no room for a worker."""
    head = NODE | {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


async def test_a_lost_node_costs_nothing_but_time_when_another_comes(
    nodes: Cluster, model: ModelConfig, tmp_path: Path
) -> None:
    alone = LoraLearner(model, CONFIG, seed=0)
    node = nodes.add_node(**NODE)
    learner = RayLoraLearner(model, CONFIG, run=tmp_path / "run", seed=0)
    await learner.start()
    await train(learner, 0)
    train_alone(alone, 0)
    await learner.checkpoint(tmp_path / "run" / "step00001")
    await learner.accumulate(ray.put(make_group(1, 0)))
    alone.accumulate(make_group(1, 0))
    assert pending_demand() == ""

    nodes.remove_node(node, allow_graceful=False)
    while not (waiting := pending_demand()):  # noqa: ASYNC110 (Ray tells nobody)
        await asyncio.sleep(0.5)
    assert waiting == "no node has free resources for 2 x 1 CPU"
    updated = asyncio.create_task(learner.step())
    nodes.add_node(**NODE)
    metrics = await updated
    assert metrics.grad_norm == pytest.approx(alone.step().grad_norm, rel=1e-3)
    assert metrics.update == 3
    assert_same_adapter(await (await learner.weights(2)), alone.adapter(2))
    assert pending_demand() == ""
    await learner.stop()

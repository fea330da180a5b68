"""An engine on vLLM that joins a run, and one that is lost with its node under a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.actor import EngineClient, start_policy_engines
from draco_ray.engine.canary import CanaryReading, Scorer, run_canary
from draco_ray.engine.fleet import EngineFleet
from draco_ray.learner.lora_learner import LoraLearner
from tests.support.probes import probe_of
from tests.support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
PROBE = [int(token) for token in np.random.default_rng(0).integers(3, 500, 50)]
PROMPT = list(range(20, 60))
LONG = 900
LORA = LearnerConfig(gpus_per_worker=0, lora_rank=8, lora_alpha=16, gradient_checkpointing=False)


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A cluster whose head, where the driver is, has no room for an engine."""
    head = NODE | {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


async def test_an_engine_joins_with_the_current_adapter_and_takes_over_what_another_loses(
    nodes: Cluster, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = ModelConfig(path=str(build_tiny_model(tmp_path / "model")), dtype="float32")
    config = EngineConfig(
        engines=2,
        min_engines=1,
        gpus_per_engine=0,
        kv_cache_gib=0.1,
        max_num_seqs=8,
        temperature=0.0,
        adapter_directory=tmp_path / "adapters",
    )
    learner = LoraLearner(model, LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: torch.from_numpy(values) + 0.05 * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(moved, "version 1")
    probe = probe_of(learner, PROBE)

    async def canary(scorer: Scorer) -> CanaryReading:
        return await run_canary(scorer, [probe], version=1, moved=True, tolerance=0.01)

    node = nodes.add_node(**NODE)
    engines = start_policy_engines(config, model, max_model_len=1024, lora_rank=8, seed=0, run_name="joins")
    fleet = EngineFleet(engines, config)
    clients = [EngineClient(index, "joins", 2) for index in range(2)]
    await fleet.start()
    (first,) = [place.worker for place in fleet.workers.pooled if place.up]
    await fleet.load(ray.put(learner.adapter(1)))
    await fleet.prove(canary)

    nodes.add_node(**NODE)
    while fleet.workers.up < 2:  # noqa: ASYNC110 (a driver looks at the load of the engines, too)
        await asyncio.sleep(0.5)
    assert [reading.engine for reading in fleet._proven.values()] == [f"engine-{first}", f"engine-{1 - first}"]

    expected = await clients[1 - first].sample(PROMPT, max_tokens=LONG)
    under_way = asyncio.create_task(clients[first].sample(PROMPT, max_tokens=LONG))
    while (await fleet.statistics())[first].running == 0:
        assert not under_way.done()
    nodes.remove_node(node, allow_graceful=False)
    taken_over = await under_way
    assert taken_over.token_ids == expected.token_ids
    assert taken_over.policy_version == 1
    while fleet.workers.up == 2:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    # Two syncs go on without it, though the second asks every engine that is up for a proof.
    await fleet.load(ray.put(learner.adapter(1)))
    assert [reading.engine for reading in await fleet.prove(canary)] == [f"engine-{1 - first}"]
    await fleet.stop()

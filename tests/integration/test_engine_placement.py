"""Tensor-parallel engines that take turns with the learner, on a real Ray: which GPUs each of them is given.

The GPUs are Ray's bookkeeping only: no vLLM is started, the actor's engine is a stand-in that starts at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from draco_ray.config.load import load_config
from draco_ray.engine import actor
from draco_ray.training.cluster import start_ray

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

CONFIG = load_config(
    overrides=[
        *("engine.colocate=true", "engine.engines=2", "engine.tensor_parallel=2", "engine.gpus_per_engine=1.2"),
        *("engine.cpus_per_engine=0", "learner.workers=4", "learner.gpus_per_worker=0.4"),
    ]
)


@pytest.fixture
def four_gpus() -> Iterator[None]:
    start_ray(num_cpus=2, num_gpus=4, include_dashboard=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("four_gpus")
def test_each_gpu_has_one_rank_of_an_engine_and_one_learner_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(actor.PolicyEngineActor):
        """Says which GPUs its engine would see, and dies when told to."""

        async def visible(self) -> list[str]:
            async def start() -> None:
                return None

            engine: Any = SimpleNamespace(start=start, dead=False)
            self._engine = engine
            begin: Any = self.start
            await begin()
            return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

        @ray.method(max_task_retries=0)
        async def die(self) -> None:
            os._exit(1)

    monkeypatch.setattr(actor, "PolicyEngineActor", Watched)
    engines = actor.start_policy_engines(
        CONFIG.engine, CONFIG.model, max_model_len=100, lora_rank=8, seed=0, run_name="placement"
    )
    seen = ray.get([engine.visible.remote() for engine in engines])
    assert [len(gpus) for gpus in seen] == [2, 2]
    assert sorted(gpu for gpus in seen for gpu in gpus) == ["0", "1", "2", "3"]

    class Worker:
        """A learner worker, as far as Ray is concerned."""

        def gpus(self) -> list[Any]:
            return list(ray.get_gpu_ids())

    worker: Any = ray.remote(Worker)
    worker = worker.options(num_gpus=CONFIG.learner.gpus_per_worker, num_cpus=0)
    workers = [worker.remote() for _ in range(CONFIG.learner.workers)]
    assert sorted(str(gpu) for gpus in ray.get([worker.gpus.remote() for worker in workers]) for gpu in gpus) == [
        *("0", "1", "2", "3")
    ]

    # An engine that is replaced beside the learner gets the GPUs that it had: nothing else is free.
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(engines[0].die.remote())
    assert ray.get(engines[0].visible.remote()) == seen[0]

"""An engine of two tensor-parallel ranks, two processes on the CPU: the adapter is split, and still the learner's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import run_canary
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.learner.lora_learner import LoraLearner
from tests.support.probes import probe_of
from tests.support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

PROMPT = list(range(20, 120))


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "Worker_TP" in child.name()]


async def test_two_ranks_sample_what_the_learner_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    model = ModelConfig(path=str(build_tiny_model(tmp_path / "model")), dtype="float32")
    learner = LoraLearner(model, LearnerConfig(gpus_per_worker=0, lora_rank=8, lora_alpha=16), seed=0)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: torch.from_numpy(values) + 0.05 * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(moved, "a perturbed copy")
    config = EngineConfig(
        gpus_per_engine=0, tensor_parallel=2, kv_cache_gib=0.1, max_num_seqs=8, adapter_directory=tmp_path / "adapters"
    )
    engine = VllmEngine(config, model, max_model_len=1024, lora_rank=8, seed=0, name="engine-0")
    await engine.start()
    try:
        processes = ranks()
        assert len(processes) == 2
        await engine.load_adapter(learner.adapter(1))
        reading = await run_canary(engine, [probe_of(learner, PROMPT)], version=1, moved=True, tolerance=1e-3)
        assert reading.shift_mean > 0.1
        sample = await engine.sample(PROMPT, max_tokens=40, seed=3)
        trained = learner.token_logprobs(PROMPT + sample.token_ids)[len(PROMPT) :]
        np.testing.assert_allclose(sample.logprobs, trained, atol=1e-3)

        # A step's turns (`engine.colocate`): both ranks sleep and wake, take the next adapter, and serve that.
        monkeypatch.setattr(engine, "_config", config.model_copy(update={"colocate": True}))
        await engine.sleep()
        waiting = asyncio.create_task(engine.sample(PROMPT, max_tokens=20, seed=0))
        await engine.wake()
        assert (await waiting).policy_version == 1
        learner.policy.load_adapter({name: 2 * values for name, values in moved.items()}, "a perturbed copy")
        await engine.load_adapter(learner.adapter(2))
        await run_canary(engine, [probe_of(learner, PROMPT)], version=2, moved=True, tolerance=1e-2)
        assert ranks() == processes
    finally:
        await engine.stop()
    # Children of the engine core, whose end they notice.
    assert psutil.wait_procs(processes, timeout=600)[1] == []

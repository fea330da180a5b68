"""An engine on vLLM's second model runner beside a learner, with `second_runner` on the path; prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import run_canary
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.errors import CanaryFailed
from draco_ray.learner.lora_learner import LoraLearner
from tests.support.probes import probe_of
from tests.support.tiny_model import build_tiny_model

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 500, 140)]


def perturb_adapter(learner: LoraLearner, version: int) -> None:
    """Perturb the learner's adapter at random."""
    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: torch.from_numpy(values) + 0.05 * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(tensors, f"version {version}")


async def played(folder: Path) -> dict[str, Any]:
    model = ModelConfig(path=str(build_tiny_model(folder / "model")), dtype="float32")
    learner = LoraLearner(model, LearnerConfig(gpus_per_worker=0, lora_rank=8, lora_alpha=16), seed=0)
    config = EngineConfig(gpus_per_engine=0, kv_cache_gib=0.1, max_num_seqs=4, adapter_directory=folder / "adapters")
    # The engine's core is forked, which is safe here: it needs no other thread of this process.
    engine = VllmEngine(config, model, max_model_len=256, lora_rank=8, seed=0, name="engine-0")
    await engine.start()
    llm, cached = engine._running(), []
    generate = llm.generate

    async def watched(*arguments: Any, **options: Any) -> Any:
        async for output in generate(*arguments, **options):
            if output.finished:
                cached.append(output.num_cached_tokens)
            yield output

    llm.generate = watched
    found: dict[str, Any] = {"second": engine._running().vllm_config.use_v2_model_runner, "gaps": [], "versions": []}
    try:
        draws = await asyncio.gather(*(engine.sample(PROMPT, max_tokens=8, seed=seed) for seed in (1, 1, 2)))
        found["draws"] = [list(draw.token_ids) for draw in draws]
        for version in (1, 2):
            perturb_adapter(learner, version)
            await engine.load_adapter(learner.adapter(version))
            reading = await run_canary(engine, [probe_of(learner, PROMPT)], version=version, moved=True, tolerance=1e-3)
            assert reading.live
            # The second request uses what the first one left in the prefix cache.
            sample = await engine.sample(PROMPT, max_tokens=8, seed=3)
            later = await engine.sample(PROMPT + sample.token_ids, max_tokens=4, seed=3)
            found["versions"] += [sample.policy_version, later.policy_version]
            found["read_from_cache"] = cached[-1]
            whole = PROMPT + sample.token_ids + later.token_ids
            expected = learner.token_logprobs(whole)[len(PROMPT) :]
            found["gaps"].append(float(np.abs(np.array([*sample.logprobs, *later.logprobs]) - expected).max()))
        perturb_adapter(learner, 3)
        try:
            await run_canary(engine, [probe_of(learner, PROMPT)], version=3, moved=True, tolerance=1e-3)
        except CanaryFailed as error:
            found["caught"] = str(error)
    finally:
        await engine.stop()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(asyncio.run(played(Path(sys.argv[1])))))

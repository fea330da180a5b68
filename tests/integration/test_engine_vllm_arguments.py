"""What `engine.vllm` hands to vLLM, on real engines: drafted tokens, a KV cache of 8 bits, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import run_canary
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.errors import ConfigError, EngineError
from draco_ray.learner.lora_learner import LoraLearner
from tests.support.probes import probe_of
from tests.support.tiny_model import VOCABULARY, build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

PROMPT = [int(token) for token in np.random.default_rng(0).permutation(np.arange(3, VOCABULARY))]
"""Every token once: whatever is sampled first has followers to draft."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TEMPERATURE = 0.4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    torch.set_num_threads(1)
    return ModelConfig(path=str(build_tiny_model(tmp_path_factory.mktemp("model"))), dtype="float32")


@asynccontextmanager
async def engine_with(model: ModelConfig, folder: Path, **vllm: Any) -> AsyncIterator[VllmEngine]:
    config = EngineConfig(gpus_per_engine=0, kv_cache_gib=0.1, max_num_seqs=16, adapter_directory=folder, vllm=vllm)
    engine = VllmEngine(config, model, max_model_len=1024, lora_rank=8, seed=0, name="engine-0")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def trained(model: ModelConfig) -> LoraLearner:
    """A learner whose adapter has moved away from the base model."""
    learner = LoraLearner(model, LearnerConfig(gpus_per_worker=0, lora_rank=8, lora_alpha=16), seed=0)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: torch.from_numpy(values) + 0.05 * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(moved, "a perturbed copy")
    return learner


def logits_of(model: ModelConfig, samples: list[list[int]]) -> list[torch.Tensor]:
    """For each sample, which may end early, a row of logits for each of its tokens; the prompt is read once."""
    policy = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    found = []
    with torch.inference_mode():
        read = policy(torch.tensor([PROMPT]), use_cache=True)
        cache, length = read.past_key_values, len(PROMPT)
        for sample in samples:
            later = policy(torch.tensor([sample]), past_key_values=cache, use_cache=True).logits[0, :-1]
            cache.crop(length)
            found.append(torch.cat([read.logits[0, -1:], later]))
    return found


def surprise(logits: list[torch.Tensor], samples: list[list[int]], temperature: float) -> float:
    """How much less likely than expected the samples are at a temperature, in standard deviations."""
    excess, variance = 0.0, 0.0
    for rows, sample in zip(logits, samples, strict=True):
        logp = torch.log_softmax(rows / temperature, dim=-1)
        entropy = -(logp.exp() * logp).sum(dim=-1)
        excess += float((-logp.gather(1, torch.tensor(sample)[:, None])[:, 0] - entropy).sum())
        variance += float(((logp.exp() * logp**2).sum(dim=-1) - entropy**2).sum())
    return excess / variance**0.5


async def test_drafted_tokens_are_sampled_from_the_policy(model: ModelConfig, tmp_path: Path) -> None:
    async with engine_with(model, tmp_path, speculative_config=DRAFTS) as engine:
        drawn = await asyncio.gather(
            *(engine.sample(PROMPT, max_tokens=6, seed=seed, temperature=TEMPERATURE) for seed in range(300))
        )
        # The same statistic finds tokens of another temperature.
        other = await asyncio.gather(
            *(engine.sample(PROMPT, max_tokens=6, seed=seed, temperature=1.0) for seed in range(300))
        )
        learner = trained(model)
        await engine.load_adapter(learner.adapter(1))
        await run_canary(engine, [probe_of(learner, PROMPT)], version=1, moved=True, tolerance=1e-3)
        sample = await engine.sample(PROMPT, max_tokens=60, seed=3)
    np.testing.assert_allclose(
        sample.logprobs, learner.token_logprobs(PROMPT + sample.token_ids)[len(PROMPT) :], atol=1e-3
    )
    cold, warm = ([list(one.token_ids) for one in draws] for draws in (drawn, other))
    assert abs(surprise(logits_of(model, cold), cold, TEMPERATURE)) < 4
    assert abs(surprise(of_warm := logits_of(model, warm), warm, 1.0)) < 4
    assert surprise(of_warm, warm, TEMPERATURE) > 20


async def test_a_kv_cache_of_eight_bits_is_bounded_by_the_canary(model: ModelConfig, tmp_path: Path) -> None:
    if not torch.cpu._is_avx512_supported():
        # vLLM's kernel needs it, and says so; a name that vLLM knows and cannot use is one line as well.
        with pytest.raises(EngineError, match=r"with engine.vllm=\{'kv_cache_dtype': 'fp8'\}") as refused:
            async with engine_with(model, tmp_path, kv_cache_dtype="fp8"):
                pass
        assert "\n" not in str(refused.value)
        return
    learner = trained(model)
    async with engine_with(model, tmp_path, kv_cache_dtype="fp8") as engine:
        await engine.load_adapter(learner.adapter(1))
        reading = await run_canary(engine, [probe_of(learner, PROMPT)], version=1, moved=True, tolerance=0.5)
        sample = await engine.sample(PROMPT, max_tokens=40, seed=3)
    gaps = np.abs(np.asarray(sample.logprobs) - learner.token_logprobs(PROMPT + sample.token_ids)[len(PROMPT) :])
    # A cache of 32 bits agrees to 0.001 nats.
    assert 1e-3 < float(gaps.mean()) < 0.5
    assert reading.shift_mean > 0.1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"kv-cache-dtype": "fp8"},
            r"^engine\.vllm\.kv-cache-dtype: vLLM has no such argument; did you mean kv_cache_d",
        ),
        ({"zzzz": 1}, r"^engine\.vllm\.zzzz: vLLM has no such argument; see vLLM's AsyncEngineArgs for all names"),
        (
            {"kv_cache_dtype": "fp3"},
            r"^engine engine-0: vLLM cannot load model .* with engine\.vllm=\{'kv_cache_dtype': 'fp3'\}: .*",
        ),
        (
            {"block_size": "many"},
            r"^engine engine-0: vLLM cannot load model .* with engine\.vllm=\{'block_size': 'many'\}: .*",
        ),
    ],
)
async def test_what_vllm_does_not_take_is_one_clear_line(
    model: ModelConfig, tmp_path: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises((ConfigError, EngineError), match=problem) as refused:
        async with engine_with(model, tmp_path, **arguments):
            pass
    assert "\n" not in str(refused.value)
    # Nothing of the attempt is left.
    assert not any(tmp_path.rglob("*.safetensors"))

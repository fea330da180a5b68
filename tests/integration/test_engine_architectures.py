"""Adapters of the paper's two model families: what PEFT trains is what vLLM samples from."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from draco_ray.config import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import run_canary
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.learner.learner import Learner
from tests.support.tiny_model import VOCABULARY, tiny_tokenizer

pytestmark = pytest.mark.slow

STUB = Path(__file__).resolve().parents[1] / "support" / "torchvision_stub"
PROBE = [int(token) for token in np.random.default_rng(0).integers(3, 500, 300)]
SHARED = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Sharper than a fresh model, so that a wrong weight shows, and no sharper than bfloat16 can follow.
    "initializer_range": 0.04,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def qwen2() -> PreTrainedModel:
    """Qwen2.5-32B's family: attention with biases."""
    return Qwen2ForCausalLM(Qwen2Config(hidden_size=128, intermediate_size=256, **SHARED))


def qwen3_5() -> PreTrainedModel:
    """Qwen3.6-27B's family: three gated delta-net layers to one of attention, wrapped with a vision tower."""
    text = {
        **SHARED,
        "hidden_size": 256,
        "intermediate_size": 384,
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


@pytest.mark.parametrize("architecture", [qwen2, qwen3_5])
async def test_engine_and_learner_agree_in_bfloat16_with_an_adapter_on_all_linear_layers(
    architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("torchvision") is None:
        # Also for the engine core: a spawned process gets this one's sys.path.
        monkeypatch.syspath_prepend(str(STUB))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    path = tmp_path / "model"
    architecture().to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    model = ModelConfig(path=str(path), dtype="bfloat16")

    learner = Learner(model, LearnerConfig(gpus_per_worker=0, gradient_checkpointing=False), seed=0)
    untrained = learner.adapter(0).tensors
    trained = {name: torch.from_numpy(values) + 0.03 * torch.randn(values.shape) for name, values in untrained.items()}
    learner.policy.load_adapter(trained, "a trained one")

    config = EngineConfig(gpus_per_engine=0, kv_cache_gib=0.25, max_num_seqs=4, adapter_directory=tmp_path / "adapters")
    engine = VllmEngine(config, model, max_model_len=512, lora_rank=16, seed=0, name="engine-0", run_name="run")
    await engine.start()
    try:
        await engine.load_adapter(learner.adapter(1))
        expected = learner.token_logprobs(PROBE)[1:]
        reading = await run_canary(engine, [PROBE], [expected], version=1, moved=True, tolerance=0.02)
        assert reading.shift_mean > 0.1
        prompts = [PROBE[: 100 + rollout] for rollout in range(4)]
        samples = await asyncio.gather(*(engine.sample(prompt, max_tokens=60, seed=1) for prompt in prompts))
        gaps = [
            np.abs(np.asarray(sample.logprobs) - learner.token_logprobs(prompt + sample.token_ids)[len(prompt) :])
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        assert np.concatenate(gaps).mean() < 0.02
    finally:
        await engine.stop()

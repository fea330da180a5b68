"""Adapters of the paper's two model families: what PEFT trains is what vLLM samples from."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import run_canary
from draco_ray.engine.sampler import Sample
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import TrainingSample
from tests.support.probes import probe_of
from tests.support.tiny_model import VOCABULARY, tiny_tokenizer

pytestmark = [pytest.mark.slow]

STUB = Path(__file__).resolve().parents[1] / "support" / "torchvision_stub"
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
"""Before the first of these tests has imported what stands in for it."""
PROBE = [int(token) for token in np.random.default_rng(0).integers(3, 500, 300)]
SHARED = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Sharper than a fresh model, so that a wrong weight shows, and no sharper than bfloat16 can follow.
    "initializer_range": 0.04,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA = {
    **SHARED,
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Three to one, as theirs: the KV cache has groups of layers of two sizes.
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def qwen2() -> PreTrainedModel:
    """Qwen2.5-32B's family: attention with biases."""
    return Qwen2ForCausalLM(Qwen2Config(hidden_size=128, intermediate_size=256, **SHARED))


def qwen3_5() -> PreTrainedModel:
    """Qwen3.6-27B's family: three gated delta-net layers to one of attention, wrapped with a vision tower."""
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=DELTA, vision_config=VISION))


def qwen3_moe() -> PreTrainedModel:
    """Qwen3-30B-A3B's family: experts alone behind attention."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS, **SHARED))


def qwen3_5_moe() -> PreTrainedModel:
    """Qwen3.6-35B-A3B's family: gated delta nets, experts, and one that all tokens share.

    A token passes all experts: where a fresh router chooses, the delta nets' rounding changes its choices.
    """
    text = {**DELTA, **EXPERTS, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 128}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=VISION))


async def plain_vllm_logprobs(engine: VllmEngine, checkpoint: Path) -> np.ndarray:
    """By vLLM's own interface, from the files as they are."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest

    llm = engine._running()
    request = LoRARequest("checkpoint", 1000, str(checkpoint))
    await llm.add_lora(request)
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    outputs = [o async for o in llm.generate(tokens_input(PROBE), parameters, "plain", lora_request=request)]
    return np.asarray(outputs[-1].prompt_logprobs.logprobs)


def plain_peft_logprobs(model: Path, checkpoint: Path) -> np.ndarray:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    token_ids = torch.tensor([PROBE])
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, checkpoint).eval()(input_ids=token_ids).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0].numpy()


def a_group(rollouts: Sequence[Sample], prompts: Sequence[list[int]]) -> list[TrainingSample]:
    """Rollouts of an engine as they are trained on, every other one to be made likelier."""
    made = []
    for rollout, (sample, prompt) in enumerate(zip(rollouts, prompts, strict=True)):
        mask_T = np.arange(len(prompt) + len(sample.token_ids)) >= len(prompt)
        made.append(
            TrainingSample(
                group="step0/t",
                task_id="t",
                rollout=rollout,
                policy_version=1,
                token_ids_T=np.asarray(prompt + sample.token_ids),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, (-1.0) ** rollout, 0.0).astype(np.float32),
                logprob_T=np.asarray([0.0] * len(prompt) + sample.logprobs, dtype=np.float32),
                prompt_length=len(prompt),
            )
        )
    return made


@pytest.mark.parametrize(
    "architecture",
    [qwen2, qwen3_5, *(pytest.param(moe, marks=pytest.mark.deployment) for moe in (qwen3_moe, qwen3_5_moe))],
)
async def test_engine_and_learner_agree_in_bfloat16_with_an_adapter_on_all_linear_layers(
    architecture: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_TORCHVISION:
        # A spawned engine core gets this process's sys.path; the process in which vLLM inspects the model does not.
        monkeypatch.syspath_prepend(str(STUB))
        monkeypatch.setenv("PYTHONPATH", str(STUB), prepend=os.pathsep)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    path = tmp_path / "model"
    architecture().to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    model = ModelConfig(path=str(path), dtype="bfloat16")

    settings = LearnerConfig(gpus_per_worker=0, gradient_checkpointing=False, learning_rate=0.01)
    learner = LoraLearner(model, settings, seed=0)
    untrained = learner.adapter(0).tensors
    trained = {name: torch.from_numpy(values) + 0.03 * torch.randn(values.shape) for name, values in untrained.items()}
    learner.policy.load_adapter(trained, "a trained one")

    config = EngineConfig(gpus_per_engine=0, kv_cache_gib=0.25, max_num_seqs=4, adapter_directory=tmp_path / "adapters")
    engine = VllmEngine(config, model, max_model_len=512, lora_rank=16, seed=0, name="engine-0")
    await engine.start()
    try:
        await engine.load_adapter(learner.adapter(1))
        expected = learner.token_logprobs(PROBE)[1:]
        reading = await run_canary(engine, [probe_of(learner, PROBE)], version=1, moved=True, tolerance=0.02)
        assert reading.shift_mean > 0.1
        prompts = [PROBE[: 100 + rollout] for rollout in range(4)]
        samples = await asyncio.gather(*(engine.sample(prompt, max_tokens=60, seed=1) for prompt in prompts))
        gaps = [
            np.abs(np.asarray(sample.logprobs) - learner.token_logprobs(prompt + sample.token_ids)[len(prompt) :])
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        assert np.concatenate(gaps).mean() < 0.02

        # One training step on what the engine sampled, and the engine has it.
        assert learner.policy.packs
        learner.accumulate(a_group(samples, prompts))
        assert learner.step().skipped is None
        await engine.load_adapter(learner.adapter(2))
        before, expected = expected, learner.token_logprobs(PROBE)[1:]
        stepped = np.asarray(await engine.logprobs(PROBE, adapter=True))
        assert np.abs(stepped - expected).mean() < 0.02
        assert np.abs(stepped - expected).mean() < np.abs(stepped - before).mean()

        learner.save(tmp_path / "checkpoint")
        assert np.abs(await plain_vllm_logprobs(engine, tmp_path / "checkpoint") - expected).mean() < 0.02
        assert np.abs(plain_peft_logprobs(path, tmp_path / "checkpoint") - expected).mean() < 0.02
        again = LoraLearner(model, LearnerConfig(gpus_per_worker=0, gradient_checkpointing=False), seed=1)
        again.load(tmp_path / "checkpoint")
        assert np.array_equal(again.token_logprobs(PROBE)[1:], expected)
    finally:
        await engine.stop()

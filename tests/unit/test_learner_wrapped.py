"""A checkpoint that wraps the text model, as Qwen3.6's does: what is trained loads wherever its users load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import LearnerError
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.runs.checkpoints import write_counters

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "initializer_range": 0.2,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
TOKENS = list(range(3, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("wrapped")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION)).save_pretrained(path)
    return ModelConfig(path=str(path), dtype="float32")


def learner_of(model: ModelConfig, seed: int) -> LoraLearner:
    return LoraLearner(model, LearnerConfig(gpus_per_worker=0, lora_rank=2, lora_alpha=4), seed=seed)


@pytest.fixture(scope="module")
def trained(model: ModelConfig) -> LoraLearner:
    learner = learner_of(model, 0)
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.from_numpy(values) + 0.1 * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(noise, "noise")
    return learner


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, Qwen3_5ForConditionalGeneration])
def test_it_loads_in_plain_peft_around_the_text_model_and_around_the_wrapper(
    kind: Any, model: ModelConfig, trained: LoraLearner, tmp_path: Path
) -> None:
    trained.save(tmp_path / "step00001")
    base = kind.from_pretrained(model.path, dtype=torch.float32)
    token_ids = torch.tensor([TOKENS])
    with torch.no_grad():
        peft = PeftModel.from_pretrained(base, str(tmp_path / "step00001")).eval()
        logprobs = peft(input_ids=token_ids).logits[0, :-1].log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(trained.token_logprobs(TOKENS)[1:], logprobs.numpy(), atol=1e-4)
    assert np.abs(trained.token_logprobs(TOKENS) - trained.token_logprobs(TOKENS, adapter=False)).max() > 0.01


def test_it_is_loaded_again_and_one_with_other_names_is_refused(
    model: ModelConfig, trained: LoraLearner, tmp_path: Path
) -> None:
    trained.save(tmp_path / "step00001")
    again = learner_of(model, 1)
    again.load(tmp_path / "step00001")
    assert again.token_logprobs(TOKENS).tolist() == trained.token_logprobs(TOKENS).tolist()
    file = tmp_path / "step00001" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert len(tensors) == 2 * len(trained.adapter(0).tensors)
    assert sum("language_model" in name for name in tensors) == len(tensors) // 2
    save_file(tensors | {"more": torch.zeros(1)}, file)
    write_counters(file.parent, file.parent.name, trained.updates)
    with pytest.raises(LearnerError, match="1 tensors do not fit this model, first more"):
        again.load(tmp_path / "step00001")

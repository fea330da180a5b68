"""Learners in double precision, and their reference: the whole model on padded sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.learner.context_parallel import ContextParallelGroup
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.loss import grpo_loss
from draco_ray.records import TrainingSample

WORDS = 61
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MODELS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "qwen2": (modeling_qwen2, COMMON),
    "qwen3": (modeling_qwen3, COMMON | {"head_dim": 8}),
    "qwen3_5_text": (modeling_qwen3_5, COMMON | DELTA | {"head_dim": 8}),
}
CASES: dict[str, list[tuple[int, list[int]]]] = {
    "a group": [(12, [20, 3, 11, 7])],
    "a group of one": [(9, [14])],
    "replies of one token": [(5, [1, 1, 1])],
    "prompts shorter than the convolution": [(1, [6, 4]), (2, [1, 9]), (3, [5, 5])],
    "several groups": [(12, [20, 3]), (4, [8]), (30, [2, 1, 16])],
    "more than a chunk of the delta rule": [(70, [80, 5, 66]), (64, [64, 1])],
}
"""Name -> for each group the prompt's tokens, and the tokens of each rollout after the prompt."""


class DoubleTorch:
    """Replaces the module torch in a model's code: its float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def use_double_precision(kind: str, setattr_: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make a kind of model compute its norms, gates and states in double precision, until `setattr_` is undone."""
    setattr_(MODELS[kind][0], "torch", DoubleTorch())
    setattr_(torch.Tensor, "float", torch.Tensor.double)


def save_models(folder: Path) -> None:
    """One model of each kind, in a folder of its name."""
    for name, (_, values) in MODELS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **values)).save_pretrained(folder / name)


def learner_of(
    folder: Path,
    kind: str,
    *,
    shared: ContextParallelGroup | None = None,
    reduce: Callable[[Tensor], object] | None = None,
    **changes: Any,
) -> LoraLearner:
    """A learner in double precision with a non-zero adapter.

    Args:
        shared: the workers that share its rows.
        reduce: sums a tensor over all workers.
        changes: keys of its configuration.
    """
    values: dict[str, Any] = {"gradient_checkpointing": False, "logprob_chunk_tokens": 16, "kl_coefficient": 0.1}
    config = LearnerConfig(gpus_per_worker=0, lora_rank=3, lora_alpha=6, **values | changes)
    learner = LoraLearner(
        ModelConfig(path=str(folder / kind), dtype="float32"), config, seed=0, reduce=reduce, context=shared
    )
    generator = torch.Generator().manual_seed(5)
    noise = {
        name: torch.from_numpy(array) + 0.1 * torch.randn(array.shape, generator=generator)
        for name, array in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(noise, "noise")
    learner.policy.peft.to(torch.float64)
    assert learner.policy.packs
    return learner


def samples_of(groups: list[tuple[int, list[int]]], *, equal: bool = False, system: int = 0) -> list[TrainingSample]:
    """Rollouts of groups, shuffled. Every reply ends in a valid token; with `equal` all replies are the same.

    The first ``system`` tokens of all prompts are the same.
    """
    random = np.random.default_rng(0)
    samples = []
    for group, (prompt, replies) in enumerate(groups):
        ids_P = random.integers(0, WORDS, prompt)
        ids_P[:system] = np.arange(system) % WORDS
        for rollout, reply in enumerate(replies):
            if equal:
                random = np.random.default_rng(1)
            mask_T = np.concatenate([np.zeros(prompt, dtype=bool), random.random(reply) < 0.6])
            mask_T[-1] = True
            samples.append(
                TrainingSample(
                    group=f"step0/t_{group}",
                    task_id=f"t_{group}",
                    rollout=rollout,
                    policy_version=0,
                    token_ids_T=np.concatenate([ids_P, random.integers(0, WORDS, reply)]),
                    loss_mask_T=mask_T,
                    advantage_T=np.where(mask_T, random.normal(size=len(mask_T)), 0.0).astype(np.float32),
                    logprob_T=np.where(mask_T, -4.0, 0.0).astype(np.float32),
                    prompt_length=prompt,
                )
            )
    order = np.random.default_rng(2).permutation(len(samples))
    return [samples[index] for index in order]


def oracle(
    learner: LoraLearner, folder: Path, kind: str, samples: list[TrainingSample], old: list[np.ndarray], at: Path
) -> tuple[list[Tensor], float, Tensor]:
    """Log-probs of each sample, the loss and its gradient: plain PEFT around the model as it is, on a padded batch."""
    learner.save(at)
    base = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float64, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, str(at), is_trainable=True).to(torch.float64)
    state = {name: value.detach() for name, value in learner.policy.peft.named_parameters() if "lora_" in name}
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert state.keys() == trained.keys()
    for name, parameter in trained.items():
        parameter.data = state[name].clone()  # the checkpoint is in single precision
    length = max(len(sample.token_ids_T) for sample in samples)
    ids_BT = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids_BT[row, : len(sample.token_ids_T)] = torch.from_numpy(sample.token_ids_T)

    def logprobs() -> list[Tensor]:
        logits_BTW = model(input_ids=ids_BT).logits
        every_BT = logits_BTW[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None])[:, :, 0]
        return [
            every_BT[row, torch.from_numpy(np.flatnonzero(sample.loss_mask_T) - 1)]
            for row, sample in enumerate(samples)
        ]

    found = logprobs()
    with torch.no_grad(), model.disable_adapter():
        reference = logprobs()
    push = [torch.from_numpy(sample.advantage_T[sample.loss_mask_T]).double() for sample in samples]
    total = grpo_loss(
        torch.cat(found),
        torch.from_numpy(np.concatenate(old)),
        torch.cat(reference),
        torch.cat(push),
        torch.zeros(()),
        learner._config,
    ).total
    gradients = torch.autograd.grad(total, [trained[name] for name in sorted(trained)])
    return [one.detach() for one in found], total.item(), torch.cat([one.flatten() for one in gradients])


def gradient_of(learner: LoraLearner) -> Tensor:
    """The gradient that `accumulate` has summed, for the whole adapter."""
    return torch.cat(
        [parameter.grad.flatten() for parameter in learner.policy.parameters if parameter.grad is not None]
    )

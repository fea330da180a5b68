"""flash-linear-attention's own kernels without a GPU: Triton's interpreter runs them, in NumPy.

python tests/support/fla_interpreted.py FOLDER_WITH_FLA SCRATCH: one update of a learner whose delta nets they compute,
and the same update with transformers' own code. Prints JSON.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import numpy as np
import torch
import triton.runtime.autotuner
import triton.runtime.interpreter
from transformers import AutoConfig, AutoModelForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.lab.planning.memory import saved_activation_bytes
from draco_ray.lab.planning.model_shape import read_shape
from draco_ray.learner import model
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.packing import InputSequence, concatenate
from draco_ray.records import TrainingSample

WORDS, PROMPT = 64, 20
LENGTHS = (90, 33)
"""Lengths of two rollouts that share their prompt, with full and partial chunks of 64 tokens."""
CONFIG = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    # The gradient of the first layer passes through the second.
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}


def patch_interpreter() -> None:
    """Supply what the interpreter lacks: timings of configurations, and loops that count in its own integers."""
    triton.runtime.autotuner.Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]

    def counted(*bounds: Any) -> Iterator[Any]:
        ends = [int(bound.handle.data.item()) if hasattr(bound, "handle") else int(bound) for bound in bounds]
        return map(triton.runtime.interpreter._implicit_cvt, builtins.range(*ends))

    import fla.ops.common.chunk_delta_h

    fla.ops.common.chunk_delta_h.range = counted


def samples() -> list[TrainingSample]:
    random = np.random.default_rng(0)
    prompt = random.integers(0, WORDS, PROMPT)
    made = []
    for rollout, length in enumerate(LENGTHS):
        mask_T = np.arange(length) >= PROMPT
        made.append(
            TrainingSample(
                group="g",
                task_id="t",
                rollout=rollout,
                policy_version=0,
                token_ids_T=np.concatenate([prompt, random.integers(0, WORDS, length - PROMPT)]),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, 1.0 - rollout, 0.0).astype(np.float32),
                logprob_T=-mask_T.astype(np.float32),
                prompt_length=PROMPT,
            )
        )
    return made


def kept_by_layer(learner: LoraLearner, index: int) -> int:
    """Bytes that a layer keeps for the backward pass of a row, without parameters."""
    layer: Any = learner.policy.peft.get_base_model().get_decoder().layers[index]
    known = {parameter.untyped_storage()._cdata for parameter in learner.policy.peft.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    forward = layer.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer.forward = watched
    logprob_V, _ = learner.policy.logprobs(row())
    layer.forward = forward
    del logprob_V
    return sum(kept.values())


def row() -> Any:
    return concatenate([InputSequence(one.token_ids_T, one.loss_mask_T, PROMPT) for one in samples()])


def learned(folder: Path) -> tuple[torch.Tensor, torch.Tensor, LoraLearner]:
    """Log-probs of all sampled tokens, the adapter's gradient, and the learner."""
    learner = LoraLearner(
        ModelConfig(path=str(folder), dtype="float32"),
        LearnerConfig(gpus_per_worker=0, lora_rank=1, gradient_checkpointing=False),
        seed=0,
    )
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: torch.from_numpy(values) + 0.1 * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(moved, "moved")
    logprobs = torch.cat([torch.from_numpy(values) for values in learner.old_logprobs(samples())])
    learner.accumulate(samples())
    return (
        logprobs,
        torch.cat([gradient.flatten() for each in learner.policy.parameters if (gradient := each.grad) is not None]),
        learner,
    )


def noting(asked: list[str], name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that its calls are recorded in ``asked`` by name."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return kernel(*args, **kwargs)

    return noted


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **CONFIG)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    patch_interpreter()
    asked: list[str] = []
    import fla.modules.causal_conv1d as convolutions
    from fla.ops.gated_delta_rule.chunk import ChunkGatedDeltaRuleFunction as Rule

    for name, place, attribute in (("rule", Rule, "apply"), ("convolution", convolutions, "causal_conv1d")):
        setattr(place, attribute, noting(asked, name, getattr(place, attribute)))
    # A learner on the CPU does not use the kernels, even if they are installed.
    expected, expected_gradient, _ = learned(folder)
    on_cpu = len(asked)
    model.KERNEL_DEVICES = ("cuda", "cpu")
    found, gradient, learner = learned(folder)
    shape = read_shape(config.to_dict(), "toy")
    layer = next(layer for layer in shape.layers if layer.kind == "linear_attention")
    tokens = len(row().token_ids_T)
    print(
        json.dumps(
            {
                "asked_on_cpu": on_cpu,
                "asked": {name: asked.count(name) for name in ("rule", "convolution")},
                "logprobs": float((found - expected).abs().max()),
                "gradient": float((gradient - expected_gradient).abs().max() / expected_gradient.abs().max()),
                "kept": kept_by_layer(learner, 1),
                "planned": tokens * saved_activation_bytes(shape, layer, 4, 1, kernels=True),
                "planned_without": tokens * saved_activation_bytes(shape, layer, 4, 1, kernels=False),
            }
        )
    )


if __name__ == "__main__":
    main()

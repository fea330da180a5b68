"""The planner's arithmetic against real transformers models, the learner's adapter, and tensors of a real update."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from draco_ray.config.schema import AgentConfig, AlgorithmConfig, DracoConfig, LearnerConfig, ModelConfig
from draco_ray.engine.model_config import PUBLIC_CONFIGS, lora_target
from draco_ray.lab.planning.memory import (
    LearnerMemory,
    chunk_bytes,
    learner_memory,
    saved_activation_bytes,
    shared_prompt_bytes,
    total,
)
from draco_ray.lab.planning.model_shape import ModelShape, read_shape
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.packing import InputSequence, concatenate
from draco_ray.records import TrainingSample

# They are of what a learner takes on GPUs, and real updates of many models.
pytestmark = pytest.mark.deployment

TOKENS = 256
PROMPT = 64
WORDS = 320
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": WORDS,
    "hidden_size": 320,
    "intermediate_size": 1728,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
"""Qwen2.5-32B's proportions at a sixteenth of its width, with rank 1 for its 16."""
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": WORDS,
    "hidden_size": 320,
    "intermediate_size": 1088,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
"""Qwen3.6-27B's proportions at a sixteenth of its width."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
QWEN3_MOE = QWEN2 | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 64, "num_attention_heads": 8}
"""Qwen3-30B-A3B's kind of layers."""
QWEN3_5_MOE = QWEN3_5 | EXPERTS | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 96}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe bias": QWEN3_MOE | {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3_5_moe": QWEN3_5_MOE,
    "mixtral": QWEN2 | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
}
TOYS = {"qwen2": QWEN2, "qwen3_5": QWEN3_5, "qwen3_moe": QWEN3_MOE, "qwen3_5_moe": QWEN3_5_MOE}
DENSE = ("qwen2", "qwen3_5")


def transformers_config(values: dict[str, Any]) -> PreTrainedConfig:
    values = dict(values)
    config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return config


def count(module: torch.nn.Module, adapter: bool) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if ("lora_" in name) == adapter)


COUNTED: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "qwen2 tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen3": QWEN2 | {"model_type": "qwen3", "head_dim": 32},
    "qwen3 bias": QWEN2 | {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    "qwen3_5": QWEN3_5,
    "qwen3_5 interval": QWEN3_5 | {"num_hidden_layers": 5, "full_attention_interval": 2},
    "llama": QWEN2 | {"model_type": "llama"},
    "llama bias": QWEN2 | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "mistral": QWEN2 | {"model_type": "mistral", "head_dim": 32},
    "gemma2": QWEN2 | {"model_type": "gemma2", "head_dim": 32, "tie_word_embeddings": True},
    "gemma3": QWEN2 | {"model_type": "gemma3_text", "head_dim": 32, "tie_word_embeddings": True},
    "phi3": QWEN2 | {"model_type": "phi3", "pad_token_id": 0},
    # Their full width; the layers repeat.
    "Qwen2.5-32B": PUBLIC_CONFIGS["Qwen/Qwen2.5-32B-Instruct"] | {"num_hidden_layers": 4},
    "Qwen3.6-27B": PUBLIC_CONFIGS["Qwen/Qwen3.6-27B"] | {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("target", ["all-linear", r".*\.(q_proj|in_proj_qkv|down_proj)"])
def test_parameters_equal_those_of_the_real_model_and_its_adapter(name: str, target: str) -> None:
    config = transformers_config(COUNTED[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        lora = LoraConfig(r=3, target_modules=target, task_type="CAUSAL_LM")
        peft = get_peft_model(model, lora)
    shape = read_shape(config.to_dict(), name)
    assert shape.parameters == count(peft, adapter=False)
    assert shape.adapter_parameters(target, 3) == count(peft, adapter=True)


@pytest.mark.parametrize("target", ["all-linear", r"model\.layers\.[02]\..*\.(q_proj|in_proj_qkv|o_proj)"])
@pytest.mark.parametrize("name", MIXTURES)
def test_of_a_mixture_of_experts_the_adapter_is_on_what_is_beside_the_experts(name: str, target: str) -> None:
    config = transformers_config(MIXTURES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        modules = lora_target(config.to_dict(), target, name)
        peft = get_peft_model(model, LoraConfig(r=3, target_modules=modules, task_type="CAUSAL_LM"))
    shape = read_shape(config.to_dict(), name)
    assert shape.parameters == count(peft, adapter=False)
    assert shape.adapter_parameters(target, 3) == count(peft, adapter=True)
    adapted = [name for name, _ in peft.named_parameters() if "lora_" in name]
    assert not any("experts" in name or ".gate." in name or "router" in name for name in adapted)
    experts = [parameter for name, parameter in peft.named_parameters() if ".experts." in name]
    assert shape.experts is not None
    spared = sum(p.numel() for p in experts) * (1 - shape.experts.active / shape.experts.number)
    assert shape.active_parameters == shape.parameters - round(spared)


@pytest.mark.parametrize(("kind", "values"), [("qwen3_5", QWEN3_5), ("qwen3_5_moe", QWEN3_5_MOE)])
def test_a_multimodal_wrapper_counts_as_its_language_model(kind: str, values: dict[str, Any]) -> None:
    wrapper = AutoConfig.for_model(kind, text_config={k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(wrapper)
    assert read_shape(wrapper.to_dict(), "wrapper").parameters == count(model, adapter=False)


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made inside the block that are alive at one time, at most; views count once."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, int] = {}
        self._now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._notice(leaf.untyped_storage())
        return result

    def _notice(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._alive.pop(key)


def settings(path: str, *, dtype: Any, checkpointing: bool, base: Any = "model") -> DracoConfig:
    return DracoConfig(
        model=ModelConfig(path=path, dtype=dtype),
        agent=AgentConfig(max_prompt_length=PROMPT, max_response_length=TOKENS - PROMPT),
        algorithm=AlgorithmConfig(group_size=2),
        learner=LearnerConfig(
            gpus_per_worker=0,
            lora_rank=1,
            micro_batch_tokens=TOKENS,
            logprob_chunk_tokens=32,
            gradient_checkpointing=checkpointing,
            base_precision=base,
        ),
    )


def samples(prompt: int = PROMPT) -> list[TrainingSample]:
    """A group of two, which with the usual prompt fills a row; its segments are then whole chunks of the delta rule."""
    made = []
    for rollout, length in enumerate((2 * prompt, 3 * prompt)):
        mask_T = np.arange(length) >= prompt
        made.append(
            TrainingSample(
                group="step0/t",
                task_id="t",
                rollout=rollout,
                policy_version=0,
                token_ids_T=np.arange(length) % WORDS,
                loss_mask_T=mask_T,
                advantage_T=mask_T.astype(np.float32),
                logprob_T=-mask_T.astype(np.float32),
                prompt_length=prompt,
            )
        )
    return made


class Measured:
    """A learner of a toy model, what the plan says of it, and what its tensors take."""

    def __init__(self, directory: Path, *, dtype: str, checkpointing: bool, base: str = "model") -> None:
        self.config = settings(str(directory), dtype=dtype, checkpointing=checkpointing, base=base)
        self.shape: ModelShape = read_shape(AutoConfig.from_pretrained(directory).to_dict(), "toy")
        self.plan: LearnerMemory = learner_memory(self.config, self.shape)
        self.learner = LoraLearner(self.config.model, self.config.learner, seed=0)
        self.parameters = list(self.learner.policy.peft.parameters())

    def accumulate(self, prompt: int) -> None:
        """Gradients of a group, four times as many tokens as its prompt has."""
        assert self.learner.accumulate(samples(prompt))["computed_tokens"] == 4 * prompt

    def item(self, name: str) -> int:
        return next(item.bytes for item in self.plan.resident if item.name == name)

    @functools.cached_property
    def update(self) -> tuple[int, list[torch.Tensor]]:
        """The peak of what an update makes beside the gradients, which are there before it; and these, of it alone."""
        trained = self.learner.policy.parameters
        gradients = [torch.zeros_like(parameter) for parameter in trained]
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        with LiveBytes([*self.parameters, *self.learner.policy.peft.buffers(), *gradients]) as live:
            self.accumulate(PROMPT)
        return live.peak, [gradient.clone() for gradient in gradients]

    def saved(self) -> list[int]:
        """Bytes that each layer keeps for its backward, parameters apart."""
        known = {parameter.untyped_storage()._cdata for parameter in self.parameters}
        layers: Any = self.learner.policy.peft.get_base_model().get_decoder().layers
        kept: list[dict[int, torch.Tensor]] = [{} for _ in layers]

        def watched(forward: Any, mine: dict[int, torch.Tensor]) -> Any:
            def keep(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.untyped_storage()._cdata not in known:
                    mine[tensor.untyped_storage()._cdata] = tensor
                return tensor

            def run(*args: Any, **kwargs: Any) -> Any:
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    return forward(*args, **kwargs)

            return run

        with pytest.MonkeyPatch.context() as patch:
            for layer, mine in zip(layers, kept, strict=True):
                patch.setattr(layer, "forward", watched(layer.forward, mine))
            self.learner.policy.logprobs(
                concatenate([InputSequence(o.token_ids_T, o.loss_mask_T, PROMPT) for o in samples()])
            )
        return [sum(tensor.untyped_storage().nbytes() for tensor in mine.values()) for mine in kept]


Measure = Callable[..., Measured]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """What is measured of a toy, loaded once for all tests."""
    torch.set_num_threads(1)

    @functools.cache
    def saved(name: str, dtype: str) -> Path:
        directory = tmp_path_factory.mktemp("toy")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(transformers_config(TOYS[name])).to(getattr(torch, dtype))
        model.save_pretrained(directory)
        return directory

    @functools.cache
    def loaded(name: str, dtype: str, checkpointing: bool, base: str) -> Measured:
        return Measured(saved(name, dtype), dtype=dtype, checkpointing=checkpointing, base=base)

    def measured(name: str, *, dtype: str = "bfloat16", checkpointing: bool = True, base: str = "model") -> Measured:
        return loaded(name, dtype, checkpointing, base)

    return measured


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TOYS)
def test_what_a_layer_keeps_is_what_the_plan_says(measure: Measure, name: str, dtype: str) -> None:
    measured = measure(name, dtype=dtype, checkpointing=False)
    # The first one's norm has nothing to keep: nothing below it is trained.
    for layer, kept in list(zip(measured.shape.layers, measured.saved(), strict=True))[1:]:
        width, tolerance = (2, 0.03) if dtype == "bfloat16" else (4, 0.07)
        planned = TOKENS * saved_activation_bytes(measured.shape, layer, width, 1, kernels=False)
        planned += shared_prompt_bytes(measured.config, measured.shape, layer)
        assert planned == pytest.approx(kept, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "checkpointing", "base"),
    [(name, checkpointing, "model") for name in TOYS for checkpointing in (False, True)]
    + [(name, True, "int8") for name in DENSE],
)
def test_the_peak_of_a_real_update_is_within_the_plan(
    measure: Measure, name: str, checkpointing: bool, base: str
) -> None:
    measured = measure(name, checkpointing=checkpointing, base=base)
    planned, (peak, _) = total(measured.plan.backward), measured.update
    # A weight that is made whole is there beside less than all that the plan counts with it.
    whole = sum(item.bytes for item in measured.plan.backward if item.keys == "learner.base_precision")
    assert (whole > 0) == (base != "model")
    assert 0.98 * peak < planned < 1.15 * peak + whole


@pytest.mark.parametrize("name", TOYS)
def test_what_is_kept_on_the_host_is_what_the_plan_says_and_changes_nothing(
    measure: Measure, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure(name)
    keys = measured.config.learner.model_copy(update={"offload_activations": True})
    config = measured.config.model_copy(update={"learner": keys})
    kept: list[int] = []

    class Copies(torch.autograd.graph.saved_tensors_hooks):
        """In the place of `save_on_cpu`, which copies nothing that is on the CPU already."""

        def __init__(self, pin_memory: bool) -> None:
            assert not pin_memory
            super().__init__(self._keep, lambda tensor: tensor.clone())

        def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel() * tensor.element_size())
            return tensor.clone()

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Copies)
    offloading = LoraLearner(config.model, config.learner, seed=0)
    offloading.accumulate(samples())
    planned = learner_memory(config, measured.shape)
    assert 0.8 * total(planned.host) < sum(kept) <= total(planned.host)
    assert planned.peak < measured.plan.peak
    _, gradients = measured.update
    for offloaded, plain in zip(offloading.policy.parameters, gradients, strict=True):
        assert offloaded.grad is not None
        assert torch.equal(offloaded.grad, plain)


@pytest.mark.parametrize("base", ["model", "int8", "fp8"])
def test_weights_gradients_and_optimizer_take_what_the_plan_says(measure: Measure, base: str) -> None:
    measured = measure("qwen3_5", base=base)
    measured.learner.policy.peft.zero_grad()
    measured.accumulate(2)
    named = list(measured.learner.policy.peft.named_parameters())
    base = sum(p.numel() * p.element_size() for name, p in named if "lora_" not in name)
    adapter = sum(p.numel() * p.element_size() for name, p in named if "lora_" in name)
    gradients = sum(p.grad.numel() * p.grad.element_size() for _, p in named if p.grad is not None)
    measured.learner.step()
    states = measured.learner._optimizer.state.values()
    optimizer = sum(value.numel() * value.element_size() for state in states for value in state.values())
    assert measured.item("base weights") == base
    assert measured.item("adapter (float32)") == adapter
    assert measured.item("gradients") == gradients
    assert measured.item("optimizer") == optimizer


def test_an_update_copies_the_gradients_as_often_as_planned(measure: Measure) -> None:
    measured = measure("qwen2")
    # However few tokens: what an update copies is of the adapter's size.
    measured.accumulate(2)
    measured.learner.step()
    measured.accumulate(2)
    states = measured.learner._optimizer.state.values()
    known = [value for state in states for value in state.values()]
    known += [p.grad for p in measured.parameters if p.grad is not None]
    with LiveBytes([*measured.parameters, *known]) as live:
        measured.learner.step()
    assert live.peak <= total(measured.plan.update)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("entropy", [0.0, 0.01])
def test_a_chunk_of_log_probs_takes_what_the_plan_says(dtype: Any, entropy: float) -> None:
    from draco_ray.learner.model import token_logprobs

    words, chunk = 20000, 8
    head = torch.nn.Linear(4, words, bias=False, dtype=getattr(torch, dtype)).requires_grad_(False)
    hidden = torch.randn(3 * chunk, 4, dtype=head.weight.dtype, requires_grad=True)
    target = torch.arange(3 * chunk)
    with LiveBytes([head.weight, hidden, target]) as live:
        token_logprobs(hidden, head, target, chunk_tokens=chunk, entropy_gradient=entropy > 0)
    config = settings("toy", dtype=dtype, checkpointing=True)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"entropy_coefficient": entropy})})
    planned = chunk * words * chunk_bytes(config)
    assert 0.98 * live.peak < planned < 1.25 * live.peak

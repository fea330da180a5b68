"""Facts from a model's ``config.json`` for training and serving: its experts, its heads, its adapted layers.

Experts and routers of a mixture of experts stay frozen; only the other linear layers are adapted. PEFT would adapt all
experts of a layer as one tensor, some with twice the rank, which vLLM does not accept
(docs/decisions/engines-and-adapters.md).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from draco_ray.config.schema import LearnerConfig
from draco_ray.errors import ConfigError

SHAPES: dict[str, dict[str, Any]] = json.loads(
    files("draco_ray.engine").joinpath("model_shapes.json").read_text(encoding="utf-8")
)
"""Shapes of the presets' models by hub name, stored because the base install cannot build models to measure them."""
PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {name: known["config"] for name, known in SHAPES.items()}
"""Values from these models' public ``config.json`` that determine their size and maximum context length."""

FAMILIES = ("qwen3_moe", "qwen3_5_moe", "mixtral")
"""Model types of mixtures of experts for which learner and engine were compared; others are refused."""
NUMBER_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of ``config.json`` for the number of experts of a layer."""
EXPERT_SUFFIXES = ("", ".gate_up_proj", ".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
"""Suffixes of the names of one expert's matrices, or of the matrices of all experts of a layer."""
ROUTERS = ("gate", "router", "shared_expert_gate")
MLPS = ("mlp", "block_sparse_moe")
"""Names of the experts' parent module, in memory and in checkpoints."""
HEAD_KEYS = ("num_attention_heads", "linear_num_value_heads")
"""Keys of ``config.json`` for numbers of heads, which are divided among workers that share a micro-batch."""
KV_HEADS_KEY = "num_key_value_heads"
SPLIT_KEYS = (
    "num_attention_heads",
    KV_HEADS_KEY,
    "linear_num_value_heads",
    "linear_num_key_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Keys of ``config.json`` for sizes that tensor parallelism divides among GPUs."""
MAX_SIZES = {"num_hidden_layers": 10_000, "hidden_size": 1 << 20, "vocab_size": 1 << 24}
"""Required keys of ``config.json``, for which transformers has defaults, and their maximum values."""


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a ``config.json`` that describes the language model."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def number_of_experts(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The key in ``config.json`` for the number of experts of a layer, and that number; None for a dense model."""
    for key in NUMBER_KEYS:
        if isinstance(number := language_config(config).get(key), int) and number > 1:
            return key, number
    return None


def expert_family(config: Mapping[str, Any], source: str) -> str | None:
    """The model type of a mixture of experts, by its ``config.json``; None for a dense model.

    Raises: ConfigError: a mixture of experts that cannot be trained here.
    """
    text = language_config(config)
    family = str(text.get("model_type") or config.get("model_type")).removesuffix("_text")
    found = number_of_experts(config)
    if found is None:
        return None
    key, number = found
    problem = None
    if family not in FAMILIES:
        problem = f"of an unsupported family ({family}); expected one of {', '.join(FAMILIES)}"
    elif text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        problem = "in only some layers (mlp_only_layers, decoder_sparse_step); expected experts in each layer"
    elif text.get("quantization_config") or config.get("quantization_config"):
        problem = "in a quantized checkpoint (quantization_config); expected a bfloat16 checkpoint"
    if problem is not None:
        raise ConfigError(f"model {source}: a mixture of experts ({key}={number}) {problem}, or a dense model")
    return family


def is_router_or_expert(name: str) -> bool:
    """Whether a linear layer of this name is a router, or an expert."""
    return name.rpartition(".")[2] in ROUTERS or ".experts." in name


def find_router_or_expert(target: str, layers: int, experts: int) -> str | None:
    """The first router or expert whose name matches a regular expression; None: no match."""
    wanted = re.compile(target)
    groups = ["experts", *(f"experts.{index}" for index in range(experts))]
    below = [*ROUTERS, *(f"{group}{matrix}" for group in groups for matrix in EXPERT_SUFFIXES)]
    names = (f"model.layers.{layer}.{mlp}.{name}" for layer in range(layers) for mlp in MLPS for name in below)
    return next((name for name in names if wanted.fullmatch(name)), None)


def build_meta_model(config: Mapping[str, Any], source: str) -> tuple[Any, Any]:
    """Build a model on torch's meta device, where it takes no memory.

    Args:
        config: content of a ``config.json``.
        source: its path, for messages.
    Returns: the model as the learner loads it, and the configuration of its language model.
    Raises: ConfigError: transformers cannot build a language model from it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = language_config(config)
    values = dict(config if "model_type" in config else text)
    kind = values.pop("model_type", None)
    for key in ("auto_map", "quantization_config"):
        values.pop(key, None)
    try:
        made = AutoConfig.for_model(kind, **values)
        for key, most in MAX_SIZES.items():
            name = made.get_text_config().attribute_map.get(key, key)
            value = text.get(name, text.get(key))
            if not isinstance(value, int) or not 0 < value <= most:
                raise ValueError(f"{name} is {value!r}, expected a whole number from 1 to {most}")
        # Gemma 4's attention heads differ in size between layers. transformers then refuses to return the model-wide
        # size, which `draco plan` reads, unless this is set.
        made.get_text_config().allow_global_per_layer_attribute_access = True
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(made, attn_implementation="eager"), made.get_text_config()
    except Exception as error:  # The type depends on which value is wrong.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"model config {source}: transformers cannot build a language model of model_type {kind!r} from it "
            f"({reason})"
        ) from None


def linear_layers(module: Any, *, mixture: bool) -> Iterator[tuple[str, int, int]]:
    """Yield (name, number of inputs, number of outputs) of each linear layer in a module.

    Args:
        mixture: whether the model is a mixture of experts; its experts and routers are left out.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    for name, each in module.named_modules():
        if isinstance(each, Linear | Conv1D) and not (mixture and is_router_or_expert(name)):
            inputs, outputs = each.weight.shape[::-1] if isinstance(each, Linear) else each.weight.shape
            yield name, inputs, outputs


def lora_module_names(names: Sequence[str], target: str, *, layers: int, experts: int) -> list[str]:
    """The names of linear layers that LoRA adapts.

    Args:
        names: of all linear layers except the LM head, experts and routers.
        target: `learner.lora_target`: ``all-linear``, or a regular expression over module names.
        layers: number of decoder layers.
        experts: number of experts of a layer; 0: a dense model.
    Raises: ConfigError if ``target`` matches no layer, or matches experts or routers.
    """
    if target == "all-linear":
        return list(names)
    if experts and (frozen := find_router_or_expert(target, layers, experts)) is not None:
        adaptable = dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", name) for name in names)
        raise ConfigError(
            f"learner.lora_target={target!r} matches experts or their router ({frozen}), which stay frozen; expected "
            f"all-linear, which means {', '.join(adaptable)} for this model, or a regex that matches only such names"
        )
    found = [name for name in names if re.fullmatch(target, name)]
    if not found:
        raise ConfigError(f"learner.lora_target={target!r} matches no linear layer; expected all-linear or a regex")
    return found


def lora_target(config: Mapping[str, Any], target: str, source: str) -> str | list[str]:
    """`learner.lora_target` as PEFT's ``target_modules``: for a mixture of experts, the names of all adapted modules.

    For a mixture, PEFT's ``all-linear`` would include experts and routers, and PEFT matches a regex only against the
    end of a name.

    Raises: ConfigError, as `expert_family` and `lora_module_names` do.
    """
    if expert_family(config, source) is None:
        return target
    model, text = build_meta_model(config, source)
    head = model.get_output_embeddings()
    names = [name for name, *_ in linear_layers(model, mixture=True) if model.get_submodule(name) is not head]
    _, experts = number_of_experts(config) or ("", 0)
    return lora_module_names(names, target, layers=text.num_hidden_layers, experts=experts)


def check_experts(config: Mapping[str, Any], learner: LearnerConfig, source: str) -> None:
    """Refuse a mixture of experts that cannot be trained, by its ``config.json``; dense models pass.

    Raises: ConfigError.
    """
    lora_target(config, learner.lora_target, source)
    check_moe_quantization(learner, source, mixture=number_of_experts(config) is not None)


def check_moe_quantization(learner: LearnerConfig, source: str, *, mixture: bool) -> None:
    """Refuse a mixture of experts in 8 bits. Raises: ConfigError."""
    if mixture and learner.base_precision != "model":
        raise ConfigError(
            f"learner.base_precision={learner.base_precision}: only linear layers can be stored in 8 bits, but the "
            f"experts of model {source}, nearly all of its weights, are not linear layers; set "
            "learner.base_precision=model (learner.sharding=full shards the experts over the workers)"
        )


def engine_lora_modules(config: Mapping[str, Any], source: str) -> list[str] | None:
    """The last parts of the names of modules that an engine reserves adapter slots for; None: vLLM's default.

    Raises: ConfigError: a mixture of experts that cannot be trained here.
    """
    targets = lora_target(config, "all-linear", source)
    return None if isinstance(targets, str) else sorted({name.rpartition(".")[2] for name in targets})


def check_heads(config: Mapping[str, Any], workers: int, source: str) -> None:
    """Refuse a model whose number of attention heads is not divisible by the ``workers`` that share a micro-batch.

    Raises: ConfigError.
    """
    text = language_config(config)
    found = {key: number for key in HEAD_KEYS if isinstance(number := text.get(key), int) and number > 0}
    for key, number in found.items():
        if number % workers:
            most = math.gcd(*found.values())
            fitting = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
            raise ConfigError(
                f"learner.context_parallel={workers} does not divide the {number} heads of model {source} ({key}); "
                f"expected one of {fitting}"
            )


def check_tensor_parallel(config: Mapping[str, Any], parallel: int, source: str) -> None:
    """Refuse a model that does not divide by the ``parallel`` GPUs of an engine, by its ``config.json``.

    vLLM asserts the same while it loads the model, without a message. If there are fewer key heads than GPUs, vLLM
    repeats the heads, so the number of GPUs must be a multiple of the number of key heads.

    Raises: ConfigError.
    """
    text = language_config(config)

    def splits(gpus: int) -> bool:
        return all(number % gpus == 0 or (key == KV_HEADS_KEY and gpus % number == 0) for key, number in found.items())

    found = {key: number for key in SPLIT_KEYS if isinstance(number := text.get(key), int) and number > 0}
    for key, number in found.items():
        if number % parallel and not (key == KV_HEADS_KEY and parallel % number == 0):
            fitting = ", ".join(str(gpus) for gpus in range(1, min(found.values()) * 4 + 1) if splits(gpus))
            raise ConfigError(
                f"engine.tensor_parallel={parallel} does not divide model {source} ({key}={number}); expected one of "
                f"{fitting}"
            )

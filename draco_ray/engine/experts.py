"""Mixtures of experts: the families that are trained here, and what of them stays frozen.

Experts and router are frozen, since PEFT adapts the experts of a layer as one tensor, partly with twice the rank, which
vLLM does not take (docs/decisions/engines-and-adapters.md). Adapted are the linear layers beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draco_ray.errors import ConfigError

FAMILIES = ("qwen3_moe", "qwen3_5_moe", "mixtral")
"""Model types that are trained here: learner and engine were compared for these."""
NUMBER_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Under which a ``config.json`` says how many experts a layer has."""
MATRICES = ("", ".gate_up_proj", ".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
"""What names of an expert, or of all of a layer, end in."""
ROUTERS = ("gate", "router", "shared_expert_gate")
MLPS = ("mlp", "block_sparse_moe")
"""Where they are below their decoder layer, in memory and in checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a decoder layer, with their router."""

    hidden: int
    number: int
    active: int
    """Experts that a token passes."""
    width: int
    """MLP size of one."""
    shared: int
    """MLP size of the expert that every token passes; 0: there is none."""

    @property
    def of_one(self) -> int:
        """Parameters of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.width

    @property
    def passed(self) -> int:
        """MLP size that a token passes."""
        return self.shared + self.active * self.width

    def read(self, tokens: int) -> float:
        """Weights of the experts that so many tokens pass together, each drawing its own evenly."""
        return self.of_one * self.number * (1 - (1 - self.active / self.number) ** tokens)


def number_of_experts(text: Mapping[str, Any]) -> tuple[str, int] | None:
    """Key and number of the experts of a layer, by a language model's ``config.json``; None of a dense model."""
    for key in NUMBER_KEYS:
        if isinstance(number := text.get(key), int) and number > 1:
            return key, number
    return None


def experts_shape(config: Mapping[str, Any], source: str) -> ExpertsShape | None:
    """The experts that a ``config.json`` describes; None for a dense model.

    Raises: ConfigError: a mixture of experts that is not trained here, or a key missing.
    """
    text = config.get("text_config") or config
    family = str(text.get("model_type") or config.get("model_type")).removesuffix("_text")
    found = number_of_experts(text)
    if found is None:
        return None
    key, number = found
    problem = None
    if family not in FAMILIES:
        problem = f"of a family ({family}) that is not trained here; expected one of {', '.join(FAMILIES)}"
    elif text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        problem = "in some layers only (mlp_only_layers, decoder_sparse_step); expected it in each"
    elif text.get("quantization_config") or config.get("quantization_config"):
        problem = "in a quantized checkpoint (quantization_config); expected one in bfloat16"
    if problem is not None:
        raise ConfigError(f"model {source}: a mixture of experts ({key}={number}) {problem}, or a dense model")

    def size(key: str) -> int:
        value = text.get(key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"model config {source}: {key} is {value!r}, expected a positive whole number")
        return value

    of_one = "moe_intermediate_size" if family.startswith("qwen") else "intermediate_size"
    return ExpertsShape(
        hidden=size("hidden_size"),
        number=number,
        active=size("num_experts_per_tok"),
        width=size(of_one),
        shared=size("shared_expert_intermediate_size") if family == "qwen3_5_moe" else 0,
    )


def is_frozen(name: str) -> bool:
    """Whether a linear layer of this name is a router, or an expert."""
    return name.rpartition(".")[2] in ROUTERS or ".experts." in name


def frozen_name(target: str, layers: int, experts: int) -> str | None:
    """Which router or expert a regular expression over module names asks for, the first; None: none."""
    wanted = re.compile(target)
    groups = ["experts", *(f"experts.{index}" for index in range(experts))]
    below = [*ROUTERS, *(f"{group}{matrix}" for group in groups for matrix in MATRICES)]
    names = (f"model.layers.{layer}.{mlp}.{name}" for layer in range(layers) for mlp in MLPS for name in below)
    return next((name for name in names if wanted.fullmatch(name)), None)

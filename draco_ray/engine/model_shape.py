"""The shape of a model, from its ``config.json``: every matrix of the language model, and nothing loaded.

Known are the architectures of `ARCHITECTURES`, of a multimodal one its text model: the learner and the engines load
neither the vision tower nor the multi-token-prediction layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

from draco_ray.config.schema import LearnerConfig
from draco_ray.engine.experts import FAMILIES, ExpertsShape, experts_shape, frozen_name, number_of_experts
from draco_ray.errors import ConfigError

PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-32B-Instruct": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3.6-27B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
}
"""The numbers of the two models' public ``config.json`` that decide their size, and how much text they accept."""

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_5_text", "llama", "mistral", "gemma2", "gemma3_text", "phi3", *FAMILIES)
QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
"""With gated delta nets between layers of attention, whose output passes a gate."""
HEAD_KEYS = ("num_attention_heads", "linear_num_value_heads")
"""Under which a ``config.json`` says how many heads a layer has that workers which share a row divide."""
REPEATED = "num_key_value_heads"
SPLIT_KEYS = (
    "num_attention_heads",
    REPEATED,
    "linear_num_value_heads",
    "linear_num_key_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Under which a ``config.json`` says what tensor parallelism divides."""
_TEXT_MODELS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}
"""Wrapper without a text_config of its own -> what it is then."""
LayerKind = Literal["full_attention", "linear_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One linear layer."""

    name: str
    """Below its decoder layer, as transformers calls it."""
    inputs: int
    outputs: int
    bias: bool = False
    reads: str
    """Which tensor it reads; layers that read the same one name the same."""
    row_parallel: bool = False
    """Whether tensor parallelism splits its inputs; else its outputs."""

    @property
    def parameters(self) -> int:
        """Weight and bias."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta-net mixer."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Of one head."""
    value_dim: int
    """Of one head."""
    kernel: int
    """Width of the causal convolution."""

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only language model."""

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    """MLP size; of a mixture of experts what a token passes of it."""
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    layers: tuple[LayerKind, ...]
    delta: DeltaShape | None
    experts: ExpertsShape | None = None

    @property
    def query_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.architecture in ("qwen3", "qwen3_moe", *QWEN3_5, "gemma3_text")

    @property
    def gated(self) -> bool:
        """Whether attention's output passes a gate, computed by a query projection of twice the width."""
        return self.architecture in QWEN3_5

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, which is that of all value heads."""
        return self.kv_heads * self.head_dim

    def linears(self, kind: LayerKind) -> tuple[LinearShape, ...]:
        """The linear layers of a decoder layer; of a mixture of experts those beside experts and router."""
        return (*self._mixer(kind), *self._mlp())

    def layer_parameters(self, kind: LayerKind) -> int:
        """All parameters of a decoder layer: linear layers, norms, and what else its mixer has."""
        # Gemma normalises behind attention and the feed-forward layer as well.
        other = (4 if self.architecture.startswith("gemma") else 2) * self.hidden
        if kind == "full_attention":
            other += 2 * self.head_dim if self.query_norm else 0
        else:
            delta = self._delta()
            # Convolution, the gates' dt_bias and A_log, and the norm of one head's values.
            other += delta.channels * delta.kernel + 2 * delta.value_heads + delta.value_dim
        if self.experts is not None:
            other += self.experts.beside + self.experts.number * self.experts.of_one
        return sum(linear.parameters for linear in self.linears(kind)) + other

    @property
    def parameters(self) -> int:
        """The number of parameters of the base model as the learner loads it."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.hidden + sum(self.layer_parameters(kind) for kind in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes: all but those of the experts that it does not."""
        if self.experts is None:
            return self.parameters
        return self.parameters - len(self.layers) * (self.experts.number - self.experts.active) * self.experts.of_one

    @property
    def matrix_parameters(self) -> int:
        """Weights that a token of a forward pass is multiplied with, the LM head apart."""
        beside = 0 if self.experts is None else self.experts.beside + self.experts.active * self.experts.of_one
        shared = sum(linear.inputs * linear.outputs for kind in self.layers for linear in self.linears(kind))
        return shared + len(self.layers) * beside

    def read_parameters(self, tokens: int) -> float:
        """Weights that a forward pass of so many tokens reads, the LM head apart."""
        if self.experts is None:
            return self.matrix_parameters
        spared = self.experts.active * self.experts.of_one - self.experts.read(tokens)
        return self.matrix_parameters - len(self.layers) * spared

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Names, below their decoder layers, of the linear layers that ``all-linear`` adapts."""
        return tuple(dict.fromkeys(linear.name for kind in self.layers for linear in self.linears(kind)))

    def adapted(self, target: str) -> tuple[LinearShape, ...]:
        """The linear layers of the whole model that PEFT puts an adapter on.

        Args:
            target: `learner.lora_target`: ``all-linear``, or a regular expression over module names.
        Raises: ConfigError if it reaches none, or experts or their router, which stay frozen.
        """
        return tuple(self.adapted_by_name(target).values())

    def adapted_by_name(self, target: str) -> dict[str, LinearShape]:
        """The same by the names of their modules. Raises: ConfigError, as of `adapted`."""
        names = {
            f"model.layers.{index}.{linear.name}": linear
            for index, kind in enumerate(self.layers)
            for linear in self.linears(kind)
        }
        if target == "all-linear":
            return names
        if self.experts is not None:
            frozen = frozen_name(target, len(self.layers), self.experts.number)
            if frozen is not None:
                raise ConfigError(
                    f"learner.lora_target={target!r} asks for experts or their router ({frozen}), which stay frozen; "
                    f"expected all-linear, which is {', '.join(self.adaptable)} here, or a regex that matches only "
                    "such names"
                )
        found = {name: linear for name, linear in names.items() if re.fullmatch(target, name)}
        if not found:
            raise ConfigError(f"learner.lora_target={target!r} matches no linear layer; expected all-linear or a regex")
        return found

    def adapter_parameters(self, target: str, rank: int) -> int:
        """The number of parameters of the LoRA adapter: two matrices a linear layer."""
        return rank * sum(linear.inputs + linear.outputs for linear in self.adapted(target))

    def _mixer(self, kind: LayerKind) -> tuple[LinearShape, ...]:
        if kind == "full_attention":
            bias = self.attention_bias
            # Qwen2 alone has it on queries, keys and values and not on the output; Mistral and Mixtral have none.
            out_bias = bias and self.architecture != "qwen2"
            if self.architecture == "phi3":
                fused = self._reader("self_attn.qkv_proj", self.queries + 2 * self.keys)
                return fused, self._writer("self_attn.o_proj", self.queries, "attention")
            return (
                self._reader("self_attn.q_proj", self.queries * (2 if self.gated else 1), bias),
                self._reader("self_attn.k_proj", self.keys, bias),
                self._reader("self_attn.v_proj", self.keys, bias),
                self._writer("self_attn.o_proj", self.queries, "attention", out_bias),
            )
        delta = self._delta()
        return (
            self._reader("linear_attn.in_proj_qkv", delta.channels),
            self._reader("linear_attn.in_proj_z", delta.values),
            self._reader("linear_attn.in_proj_b", delta.value_heads),
            self._reader("linear_attn.in_proj_a", delta.value_heads),
            self._writer("linear_attn.out_proj", delta.values, "attention"),
        )

    def _mlp(self) -> tuple[LinearShape, ...]:
        if self.experts is not None:
            shared = self.experts.shared
            return (
                ()
                if not shared
                else (
                    self._reader("mlp.shared_expert.gate_proj", shared, reads="mlp input"),
                    self._reader("mlp.shared_expert.up_proj", shared, reads="mlp input"),
                    self._writer("mlp.shared_expert.down_proj", shared, "mlp product"),
                )
            )
        bias = self.mlp_bias
        down = self._writer("mlp.down_proj", self.intermediate, "mlp product", bias)
        if self.architecture == "phi3":
            return self._reader("mlp.gate_up_proj", 2 * self.intermediate, reads="mlp input"), down
        return (
            self._reader("mlp.gate_proj", self.intermediate, bias, reads="mlp input"),
            self._reader("mlp.up_proj", self.intermediate, bias, reads="mlp input"),
            down,
        )

    def _reader(self, name: str, outputs: int, bias: bool = False, *, reads: str = "mixer input") -> LinearShape:
        return LinearShape(name=name, inputs=self.hidden, outputs=outputs, bias=bias, reads=reads)

    def _writer(self, name: str, inputs: int, reads: str, bias: bool = False) -> LinearShape:
        return LinearShape(name=name, inputs=inputs, outputs=self.hidden, bias=bias, reads=reads, row_parallel=True)

    def _delta(self) -> DeltaShape:
        if self.delta is None:
            raise ConfigError("model config: a linear_attention layer without its linear_* keys")
        return self.delta


def model_shape(path: str, config_file: Path | None = None) -> ModelShape:
    """The shape of the model that `model.path` names.

    Args:
        path: a model directory, or the name of one of `PUBLIC_CONFIGS`.
        config_file: its ``config.json``, where it is neither.
    Raises: ConfigError: no configuration, or one whose architecture or keys are not known.
    """
    file = config_file
    if file is None and Path(path).expanduser().is_dir():
        file = Path(path).expanduser() / "config.json"
    if file is None:
        if path not in PUBLIC_CONFIGS:
            raise ConfigError(
                f"model {path}: neither a directory here (`draco starter build` makes the sandbox's) nor one of "
                f"{', '.join(PUBLIC_CONFIGS)}; give its config.json with --model-config FILE"
            )
        return read_shape(PUBLIC_CONFIGS[path], path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model config {file}: cannot be read ({error}); expected a model's config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model config {file}: holds no JSON object; expected a model's config.json")
    return read_shape(config, str(file))


def check_experts(config: Mapping[str, Any], learner: LearnerConfig, source: str) -> None:
    """Refuse what cannot be trained of a mixture of experts, by its ``config.json``; a dense model passes.

    Raises: ConfigError.
    """
    if number_of_experts(config.get("text_config") or config) is None:
        return
    shape = read_shape(config, source)
    shape.adapted(learner.lora_target)
    check_rounding(shape, learner, source)


def check_rounding(shape: ModelShape, learner: LearnerConfig, source: str) -> None:
    """Refuse a mixture of experts in 8 bits. Raises: ConfigError."""
    if shape.experts is not None and learner.base_precision != "model":
        raise ConfigError(
            f"learner.base_precision={learner.base_precision}: the experts of model {source}, nearly all of its "
            "weights, are not linear layers, which alone are held in 8 bits; set it to model (learner.sharding=full "
            "spreads the experts over the workers)"
        )


def lora_target(config: Mapping[str, Any], target: str, source: str) -> str | list[str]:
    """`learner.lora_target` as PEFT is told it: of a mixture of experts every module by its name.

    PEFT (0.21) takes ``all-linear`` there for experts and router as well, and a regex for the last parts of the names
    that it matches.

    Raises: ConfigError: as of `check_experts`.
    """
    if number_of_experts(config.get("text_config") or config) is None:
        return target
    return [*read_shape(config, source).adapted_by_name(target)]


def engine_targets(config: Mapping[str, Any], source: str) -> list[str] | None:
    """Modules that an engine needs room for adapters on, by the last part of their names; None: all that vLLM adapts.

    Raises: ConfigError: a mixture of experts that is not trained here.
    """
    if number_of_experts(config.get("text_config") or config) is None:
        return None
    return sorted({name.rpartition(".")[2] for name in read_shape(config, source).adaptable})


def check_heads(config: Mapping[str, Any], workers: int, source: str) -> None:
    """Refuse a model whose heads do not divide by ``workers``, which share its rows; by its ``config.json``.

    Raises: ConfigError.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    found = {key: number for key in HEAD_KEYS if isinstance(number := text.get(key), int) and number > 0}
    for key, number in found.items():
        if number % workers:
            most = gcd(*found.values())
            fitting = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
            raise ConfigError(
                f"learner.context_parallel={workers} does not divide the {number} heads of model {source} ({key}); "
                f"expected one of {fitting}"
            )


def check_split(config: Mapping[str, Any], parallel: int, source: str) -> None:
    """Refuse a model that does not divide by ``parallel`` GPUs of an engine; by its ``config.json``.

    vLLM asks for the same once it loads the model, by assertions without words. Fewer key heads than GPUs are repeated
    where these divide by them.

    Raises: ConfigError.
    """
    text: Mapping[str, Any] = config.get("text_config") or config

    def splits(gpus: int) -> bool:
        return all(number % gpus == 0 or (key == REPEATED and gpus % number == 0) for key, number in found.items())

    found = {key: number for key in SPLIT_KEYS if isinstance(number := text.get(key), int) and number > 0}
    for key, number in found.items():
        if number % parallel and not (key == REPEATED and parallel % number == 0):
            fitting = ", ".join(str(gpus) for gpus in range(1, min(found.values()) * 4 + 1) if splits(gpus))
            raise ConfigError(
                f"engine.tensor_parallel={parallel} does not divide model {source} ({key}={number}); expected one of "
                f"{fitting}"
            )


def read_shape(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape that the content of a ``config.json`` describes, a multimodal wrapper's language model included.

    Raises: ConfigError: unknown architecture, or a key missing.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    architecture = str(text.get("model_type"))
    architecture = _TEXT_MODELS.get(architecture, architecture)
    experts = experts_shape(dict(text) | _quantized(config), architecture, source)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model config {source}: architecture {architecture} is not one whose sizes are known here; expected "
            f"{', '.join(ARCHITECTURES)}"
        )

    def number(key: str) -> int:
        value = text.get(key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"model config {source}: {key} is {value!r}, expected a positive whole number")
        return value

    fixed = ("qwen2", "phi3")
    with_bias = ("qwen3", "qwen3_moe", *QWEN3_5, "llama", "gemma2", "gemma3_text")
    if architecture.startswith(("qwen3", "gemma")) and text.get("head_dim") is None:
        number("head_dim")
    layers = _layer_kinds(text, number("num_hidden_layers"), architecture)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return ModelShape(
        architecture=architecture,
        vocabulary=number("vocab_size"),
        hidden=hidden,
        intermediate=number("intermediate_size") if experts is None else experts.passed,
        heads=heads,
        kv_heads=number("num_key_value_heads"),
        # Qwen2 and Phi-3 know no other head dimension, and Llama and Mistral take it where none is given.
        head_dim=hidden // heads if architecture in fixed or text.get("head_dim") is None else number("head_dim"),
        attention_bias=architecture == "qwen2" or (architecture in with_bias and bool(text.get("attention_bias"))),
        mlp_bias=architecture == "llama" and bool(text.get("mlp_bias")),
        # A config.json leaves out what is the default, which is tied for Gemma.
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", architecture.startswith("gemma")))),
        layers=layers,
        delta=None
        if "linear_attention" not in layers
        else DeltaShape(
            key_heads=number("linear_num_key_heads"),
            value_heads=number("linear_num_value_heads"),
            key_dim=number("linear_key_head_dim"),
            value_dim=number("linear_value_head_dim"),
            kernel=number("linear_conv_kernel_dim"),
        ),
        experts=experts,
    )


def _quantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a multimodal wrapper says of its language model's weights."""
    return {key: config[key] for key in ("quantization_config",) if config.get(key)}


def _layer_kinds(text: Mapping[str, Any], number: int, architecture: str) -> tuple[LayerKind, ...]:
    named = text.get("layer_types")
    if architecture not in QWEN3_5:
        named = ["full_attention"] * number
    elif named is None:
        interval = int(text.get("full_attention_interval", 4))
        named = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(number)]
    return tuple(_layer_kind(str(kind)) for kind in named)


def _layer_kind(name: str) -> LayerKind:
    return "linear_attention" if name == "linear_attention" else "full_attention"

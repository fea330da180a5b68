"""The shape of a model: its parameters and linear layers, counted on the model that transformers builds.

The model is built on torch's meta device from its ``config.json``, so no weight is loaded or allocated. The base
install has no torch: the shapes of the two presets' models are in ``model_shapes.json``.

Of a mixture of experts the experts and the router stay frozen, and the linear layers beside them are adapted: PEFT
adapts all experts of a layer as one tensor, partly with twice the rank, which vLLM does not accept
(docs/decisions/engines-and-adapters.md).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from draco_ray.config.schema import LearnerConfig
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


TABLE: dict[str, dict[str, Any]] = json.loads(
    files("draco_ray.engine").joinpath("model_shapes.json").read_text(encoding="utf-8")
)
PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {name: known["config"] for name, known in TABLE.items()}
"""The values of the presets' models' public ``config.json`` that decide their size and their longest context."""

HEAD_KEYS = ("num_attention_heads", "linear_num_value_heads")
"""Keys of ``config.json`` whose heads are divided among workers that share a row."""
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
"""Keys of ``config.json`` that tensor parallelism divides."""
MAX_SIZES = {"num_hidden_layers": 10_000, "hidden_size": 1 << 20, "vocab_size": 1 << 24}
"""Keys that every ``config.json`` must have, since transformers would put its own defaults in their place; and what
they are at most."""
LayerKind = Literal["full_attention", "linear_attention", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One linear layer."""

    name: str
    """Module name below its decoder layer, or the full name outside the decoder layers."""
    inputs: int
    outputs: int
    reads: str
    """Module whose input it reads: its parent, or itself."""
    row_parallel: bool
    """Whether tensor parallelism splits its inputs; otherwise its outputs."""

    @property
    def parent(self) -> str:
        """Name of the module it is part of."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer."""

    kind: LayerKind
    """Softmax attention, gated delta net, or anything else."""
    parameters: int
    """Weights of linear layers, experts, norms and everything else."""
    matrices: int
    """Weights that every token is multiplied with: all matrices, without experts."""
    linears: tuple[LinearShape, ...]
    """Linear layers, without experts and their router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta-net mixer."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Per head."""
    value_dim: int
    """Per head."""
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

    parameters: int
    """Parameters of the base model as the learner loads it."""
    vocabulary: int
    hidden: int
    intermediate: int
    """MLP size; in a mixture of experts, the MLP size that one token passes."""
    mlp_saved: int
    """Tensors of MLP size that an MLP keeps for its backward: 2, or 3 where the activation and the product of gate and
    up projection are two operations."""
    heads: int
    kv_heads: int
    head_dim: int
    query_norm: bool
    """Whether attention has norms of its own, on queries and keys."""
    gated: bool
    """Whether attention's output passes a gate, computed by a query projection of twice the width."""
    tied: bool
    """Whether the LM head is the embedding."""
    prefix: str
    """Module name of the list of decoder layers."""
    distinct: tuple[LayerShape, ...]
    """The decoder layers that differ from each other."""
    order: tuple[int, ...]
    """For each decoder layer, its index in `distinct`."""
    outside: tuple[LinearShape, ...] = ()
    """Linear layers outside the decoder layers, without the LM head."""
    delta: DeltaShape | None = None
    experts: ExpertsShape | None = None

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Every decoder layer, in order."""
        return tuple(self.distinct[index] for index in self.order)

    def count(self, kind: LayerKind) -> int:
        """Number of decoder layers of a kind."""
        return sum(layer.kind == kind for layer in self.layers)

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, which is that of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes: all but the experts it is not routed to."""
        if self.experts is None:
            return self.parameters
        return self.parameters - len(self.order) * (self.experts.number - self.experts.active) * self.experts.of_one

    @property
    def matrix_parameters(self) -> int:
        """Weights that one token is multiplied with in a forward pass, without the LM head."""
        routed = 0 if self.experts is None else len(self.order) * self.experts.active * self.experts.of_one
        return sum(layer.matrices for layer in self.layers) + routed

    def read_parameters(self, tokens: int) -> float:
        """Weights that a forward pass of so many tokens reads, without the LM head."""
        if self.experts is None:
            return self.matrix_parameters
        spared = self.experts.active * self.experts.of_one - self.experts.read(tokens)
        return self.matrix_parameters - len(self.order) * spared

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Names, below their decoder layers, of the linear layers that ``all-linear`` adapts."""
        return tuple(dict.fromkeys(linear.name for layer in self.distinct for linear in layer.linears))

    def adapted(self, target: str) -> dict[str, LinearShape]:
        """The linear layers that LoRA adapts, by module name.

        Args:
            target: `learner.lora_target`: ``all-linear``, or a regular expression over module names.
        Raises: ConfigError if it matches none, or matches experts or their router, which stay frozen.
        """
        names = {
            f"{self.prefix}.{index}.{linear.name}": linear
            for index, layer in enumerate(self.layers)
            for linear in layer.linears
        } | {linear.name: linear for linear in self.outside}
        if target == "all-linear":
            return names
        if self.experts is not None:
            frozen = frozen_name(target, len(self.order), self.experts.number)
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
        """Number of parameters of the LoRA adapter: two matrices for each adapted linear layer."""
        return rank * sum(linear.inputs + linear.outputs for linear in self.adapted(target).values())


def model_shape(path: str, config_file: Path | None = None) -> ModelShape:
    """The shape of the model that `model.path` names.

    Args:
        path: a model directory, or the name of one of `PUBLIC_CONFIGS`.
        config_file: its ``config.json``, where it is neither.
    Raises: ConfigError: there is no configuration, or transformers cannot build a language model from it.
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
        return TypeAdapter(ModelShape).validate_python(TABLE[path]["shape"])
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
    """`learner.lora_target` as PEFT is told it: in a mixture of experts, every module by its name.

    There PEFT (0.21) takes ``all-linear`` to include experts and router, and matches a regex against the last parts of
    names.

    Raises: ConfigError, as `check_experts` does.
    """
    if number_of_experts(config.get("text_config") or config) is None:
        return target
    return [*read_shape(config, source).adapted(target)]


def engine_targets(config: Mapping[str, Any], source: str) -> list[str] | None:
    """Modules that an engine reserves adapter slots for, by the last part of their names; None: all that vLLM adapts.

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
            most = math.gcd(*found.values())
            fitting = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
            raise ConfigError(
                f"learner.context_parallel={workers} does not divide the {number} heads of model {source} ({key}); "
                f"expected one of {fitting}"
            )


def check_split(config: Mapping[str, Any], parallel: int, source: str) -> None:
    """Refuse a model that does not divide by ``parallel`` GPUs of an engine; by its ``config.json``.

    vLLM asserts the same once it loads the model, without a message. Fewer key heads than GPUs are repeated where the
    GPUs divide by them.

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
    """The shape of the model that transformers builds from the content of a ``config.json``.

    Raises: ConfigError: transformers builds no language model from it, or it is a mixture of experts that is not
        trained here.
    """
    experts = experts_shape(config, source)
    model, text = _build(config, source)
    prefix, blocks = _decoder_layers(model)
    if not len(blocks):
        raise ConfigError(f"model config {source}: its model has no list of decoder layers")
    heads = getattr(text, "num_attention_heads", None) or 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    delta, attention = _delta(text), None
    layers, mlps = [], []
    for block in blocks:
        linears = _linears(block, text.hidden_size, experts is not None)
        mixer = _mixer(block, linears, heads * head_dim, kv_heads, head_dim, delta)
        if mixer.kind == "full_attention":
            attention = attention or mixer
        known = mixer.kind != "full_attention" or mixer == attention
        layers.append(
            LayerShape(
                kind=mixer.kind if known else "other",
                parameters=sum(parameter.numel() for parameter in block.parameters()),
                matrices=sum(parameter.numel() for parameter in block.parameters() if parameter.ndim == 2),
                linears=linears,
            )
        )
        mlps.append(_mlp([linear for linear in linears if linear.parent != mixer.parent], text))
    distinct, head = tuple(dict.fromkeys(layers)), model.get_output_embeddings()
    intermediate, mlp_saved = max(mlps, default=(0, 0))
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=intermediate if experts is None else experts.passed,
        mlp_saved=mlp_saved,
        heads=heads,
        kv_heads=kv_heads if attention is None else attention.kv_heads,
        head_dim=head_dim,
        query_norm=attention is not None and attention.query_norm,
        gated=attention is not None and attention.gated,
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
        prefix=prefix,
        distinct=distinct,
        order=tuple(distinct.index(layer) for layer in layers),
        outside=tuple(
            linear
            for linear in _linears(model, text.hidden_size, experts is not None)
            if not linear.name.startswith(f"{prefix}.") and model.get_submodule(linear.name) is not head
        ),
        delta=delta if any(layer.kind == "linear_attention" for layer in distinct) else None,
        experts=experts,
    )


def _build(config: Mapping[str, Any], source: str) -> tuple[Any, Any]:
    """The model on the meta device, as the learner loads it, and the configuration of its language model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text: Mapping[str, Any] = config.get("text_config") or config
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
        # Gemma 4's heads differ from layer to layer: `_mixer` compares every layer with what is read here.
        made.get_text_config().allow_global_per_layer_attribute_access = True
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(made, attn_implementation="eager"), made.get_text_config()
    except Exception as error:  # whatever transformers and torch make of a wrong value
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"model config {source}: transformers builds no language model of model_type {kind!r} from it ({reason})"
        ) from None


def _decoder_layers(model: Any) -> tuple[str, Any]:
    """Name and modules of the decoder layers: the largest list of modules in the model."""
    lists = [(name, module) for name, module in model.named_modules() if type(module).__name__ == "ModuleList"]
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()), default=("", ()))


def _linears(module: Any, hidden: int, mixture: bool) -> tuple[LinearShape, ...]:
    """The linear layers below a module, without experts and router.

    Those of one parent that are as wide as the hidden states read its input; the last square one writes its output
    instead if no other does. Where several are square it does not matter which of them that is.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    groups: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for name, each in module.named_modules():
        if isinstance(each, Linear | Conv1D) and not (mixture and is_frozen(name)):
            inputs, outputs = each.weight.shape[::-1] if isinstance(each, Linear) else each.weight.shape
            groups[name.rpartition(".")[0]][name] = (inputs, outputs)
    found = []
    for parent, sizes in groups.items():
        writers = {name for name, (inputs, _) in sizes.items() if inputs != hidden}
        if not writers and len(sizes) > 1:
            writers.update([name for name, size in sizes.items() if size == (hidden, hidden)][-1:])
        for name, (inputs, outputs) in sizes.items():
            row = name in writers
            reads = name if row else parent
            found.append(LinearShape(name=name, inputs=inputs, outputs=outputs, reads=reads, row_parallel=row))
    return tuple(found)


def _widths(linears: Sequence[LinearShape]) -> dict[str, tuple[int, int]]:
    """For each parent module: total outputs of the layers that read its input, total inputs of the others."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for linear in linears:
        read, written = found[linear.parent]
        found[linear.parent] = (
            (read, written + linear.inputs) if linear.row_parallel else (read + linear.outputs, written)
        )
    return found


class _Mixer(NamedTuple):
    """What mixes the tokens of a layer."""

    kind: LayerKind = "other"
    parent: str | None = None
    kv_heads: int = 0
    gated: bool = False
    query_norm: bool = False


def _mixer(
    block: Any, linears: Sequence[LinearShape], queries: int, kv_heads: int, head_dim: int, delta: DeltaShape | None
) -> _Mixer:
    """A layer's mixer, by the widths of its projections; a convolution beside attention is another mixer."""
    convolution = any(type(module).__name__ == "Conv1d" for module in block.modules())
    for parent, (read, written) in _widths(linears).items():
        if delta is not None and (read, written) == (
            delta.channels + delta.values + 2 * delta.value_heads,
            delta.values,
        ):
            return _Mixer("linear_attention", parent)
        gated = read == 2 * queries + 2 * kv_heads * head_dim
        # Keys may have fewer heads than config.json says (Falcon).
        keys, rest = divmod(read - (2 if gated else 1) * queries, 2 * head_dim)
        if not convolution and written == queries and not rest and 0 < keys * head_dim <= queries:
            return _Mixer("full_attention", parent, keys, gated, hasattr(block.get_submodule(parent), "q_norm"))
    return _Mixer()


def _delta(text: Any) -> DeltaShape | None:
    """The sizes of a gated delta net that a configuration names."""
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes: list[Any] = [getattr(text, f"linear_{key}", None) for key in keys]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return DeltaShape(key_heads=sizes[0], value_heads=sizes[1], key_dim=sizes[2], value_dim=sizes[3], kernel=sizes[4])


def _mlp(linears: Sequence[LinearShape], text: Any) -> tuple[int, int]:
    """MLP size of a layer, by its linear layers without the mixer's; and `ModelShape.mlp_saved`."""
    widths = _widths(linears).values()
    read, size = sum(read for read, _ in widths), sum(written for _, written in widths)
    fused = getattr(text, "hidden_act", None) == "silu" and sum(not linear.row_parallel for linear in linears) > 1
    return size, 3 if read == 2 * size and not fused else 2

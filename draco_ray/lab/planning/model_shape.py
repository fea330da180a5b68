"""The shape of a model for `draco plan`: parameters, layers and linear layers of the model that transformers builds.

The model is built on torch's meta device from its ``config.json``, so no weight is loaded or allocated. The base
install has no torch: the shapes of the two presets' models are in ``model_shapes.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from draco_ray.engine.model_config import (
    PUBLIC_CONFIGS,
    SHAPES,
    build_meta_model,
    expert_family,
    linear_layers,
    lora_module_names,
    number_of_experts,
)
from draco_ray.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a decoder layer, with their router."""

    hidden: int
    number: int
    active: int
    """Experts per token."""
    width: int
    """MLP size of one expert."""
    shared: int
    """MLP size of the shared expert, which every token uses; 0: there is none."""

    @property
    def of_one(self) -> int:
        """Parameters of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.width

    @property
    def passed(self) -> int:
        """Total MLP size that a token uses."""
        return self.shared + self.active * self.width

    def read(self, tokens: int) -> float:
        """Expected number of expert weights that ``tokens`` tokens use together, each routed at random."""
        return self.of_one * self.number * (1 - (1 - self.active / self.number) ** tokens)


LayerKind = Literal["full_attention", "linear_attention", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One linear layer."""

    name: str
    """Module name below its decoder layer, or the full name outside the decoder layers."""
    inputs: int
    outputs: int
    reads: str
    """Name of the module whose input this layer reads: the parent module, or this layer if its input is its own."""
    row_parallel: bool
    """Whether tensor parallelism splits its inputs; otherwise its outputs."""

    @property
    def parent(self) -> str:
        """Name of the module that contains this linear layer."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer."""

    kind: LayerKind
    """Softmax attention, gated delta net, or anything else."""
    parameters: int
    """Number of weights of linear layers, experts, norms and everything else."""
    matrices: int
    """Number of weights in matrices that every token is multiplied with; experts excluded."""
    linears: tuple[LinearShape, ...]
    """Linear layers, without experts and their router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta-net mixer."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Size of one key head."""
    value_dim: int
    """Size of one value head."""
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
    """MLP size; in a mixture of experts, the MLP size that one token uses."""
    mlp_saved: int
    """Tensors of MLP size that an MLP keeps for its backward: 2, or 3 if the activation and the product of gate and
    up projection are separate operations."""
    heads: int
    kv_heads: int
    head_dim: int
    query_norm: bool
    """Whether attention normalizes queries and keys."""
    gated: bool
    """Whether attention's output is gated; the gate comes from a query projection of twice the width."""
    tied: bool
    """Whether the LM head shares the weights of the token embedding."""
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
        """Width of all key heads; also the width of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts it is not routed to."""
        if self.experts is None:
            return self.parameters
        return self.parameters - len(self.order) * (self.experts.number - self.experts.active) * self.experts.of_one

    @property
    def matrix_parameters(self) -> int:
        """Weights that one token is multiplied with in a forward pass, without the LM head."""
        routed = 0 if self.experts is None else len(self.order) * self.experts.active * self.experts.of_one
        return sum(layer.matrices for layer in self.layers) + routed

    def read_parameters(self, tokens: int) -> float:
        """Weights that a forward pass over ``tokens`` tokens reads, without the LM head."""
        if self.experts is None:
            return self.matrix_parameters
        spared = self.experts.active * self.experts.of_one - self.experts.read(tokens)
        return self.matrix_parameters - len(self.order) * spared

    def adapted(self, target: str) -> dict[str, LinearShape]:
        """The linear layers that LoRA adapts, by module name.

        Args:
            target: `learner.lora_target`: ``all-linear``, or a regular expression over module names.
        Raises: ConfigError if ``target`` matches no layer, or matches experts or their router, which stay frozen.
        """
        names = {
            f"{self.prefix}.{index}.{linear.name}": linear
            for index, layer in enumerate(self.layers)
            for linear in layer.linears
        } | {linear.name: linear for linear in self.outside}
        experts = 0 if self.experts is None else self.experts.number
        found = lora_module_names(list(names), target, layers=len(self.order), experts=experts)
        return {name: names[name] for name in found}

    def adapter_parameters(self, target: str, rank: int) -> int:
        """Number of parameters of the LoRA adapter: two matrices for each adapted linear layer."""
        return rank * sum(linear.inputs + linear.outputs for linear in self.adapted(target).values())


def model_shape(path: str, config_file: Path | None = None) -> ModelShape:
    """The shape of the model that `model.path` names.

    Args:
        path: a model directory, or the name of one of `PUBLIC_CONFIGS`.
        config_file: the model's ``config.json``, needed if ``path`` is neither.
    Raises: ConfigError: there is no configuration, or transformers cannot build a language model from it.
    """
    file = config_file
    if file is None and Path(path).expanduser().is_dir():
        file = Path(path).expanduser() / "config.json"
    if file is None:
        if path not in PUBLIC_CONFIGS:
            raise ConfigError(
                f"model {path}: expected a directory (for the sandbox's model run `draco starter build`) or one of "
                f"{', '.join(PUBLIC_CONFIGS)}; for another model give its config.json with --model-config FILE"
            )
        return TypeAdapter(ModelShape).validate_python(SHAPES[path]["shape"])
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model config {file}: cannot be read ({error}); expected a model's config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model config {file}: not a JSON object; expected a model's config.json")
    return read_shape(config, str(file))


def read_shape(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of the model that transformers builds from the content of a ``config.json``.

    Raises: ConfigError: transformers builds no language model from it, or it is an unsupported mixture of experts.
    """
    family = expert_family(config, source)
    model, text = build_meta_model(config, source)
    experts = None if family is None else _experts(config, text, family)
    prefix, blocks = _decoder_layers(model)
    if not len(blocks):
        raise ConfigError(f"model config {source}: the model has no list of decoder layers")
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


def _experts(config: Mapping[str, Any], text: Any, family: str) -> ExpertsShape:
    _, number = number_of_experts(config) or ("", 0)
    return ExpertsShape(
        hidden=text.hidden_size,
        number=number,
        active=text.num_experts_per_tok,
        width=text.moe_intermediate_size if family.startswith("qwen") else text.intermediate_size,
        shared=text.shared_expert_intermediate_size if family == "qwen3_5_moe" else 0,
    )


def _decoder_layers(model: Any) -> tuple[str, Any]:
    """Name and modules of the decoder layers: the largest list of modules in the model."""
    lists = [(name, module) for name, module in model.named_modules() if type(module).__name__ == "ModuleList"]
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()), default=("", ()))


def _linears(module: Any, hidden: int, mixture: bool) -> tuple[LinearShape, ...]:
    """The linear layers below a module, without experts and their router.

    A layer whose input is as wide as the hidden states is taken to read its parent module's input; any other layer is
    taken to write the parent's output. If a parent has several layers and all of their inputs are that wide, its last
    square layer counts as the writer (an arbitrary choice).
    """
    groups: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for name, inputs, outputs in linear_layers(module, mixture=mixture):
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
    """Parent module -> (total outputs of the layers that read the parent's input, total inputs of its other layers)."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for linear in linears:
        read, written = found[linear.parent]
        found[linear.parent] = (
            (read, written + linear.inputs) if linear.row_parallel else (read + linear.outputs, written)
        )
    return found


class _Mixer(NamedTuple):
    """The part of a layer that mixes tokens."""

    kind: LayerKind = "other"
    parent: str | None = None
    kv_heads: int = 0
    gated: bool = False
    query_norm: bool = False


def _mixer(
    block: Any, linears: Sequence[LinearShape], queries: int, kv_heads: int, head_dim: int, delta: DeltaShape | None
) -> _Mixer:
    """A layer's mixer, found by the widths of its projections; attention with a convolution is ``other``."""
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
    """A decoder layer's MLP size and `ModelShape.mlp_saved`; ``linears``: its linear layers outside the mixer."""
    widths = _widths(linears).values()
    read, size = sum(read for read, _ in widths), sum(written for _, written in widths)
    fused = getattr(text, "hidden_act", None) == "silu" and sum(not linear.row_parallel for linear in linears) > 1
    return size, 3 if read == 2 * size and not fused else 2

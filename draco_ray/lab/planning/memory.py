"""Bytes on one GPU, by kind: of a learner worker, and of an engine. Every formula is explained in docs/planning.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.experts import ExpertsShape
from draco_ray.engine.model_shape import DeltaShape, LayerShape, ModelShape, check_split
from draco_ray.engine.vllm_engine import CPU_KV_CACHE_GIB, LORA_RANKS, live_adapters
from draco_ray.errors import ConfigError
from draco_ray.judging.judge_context import context_tokens, uses_self_judge

GIB = 1 << 30
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32 = 4
DELTA_CHUNK = 64
"""Tokens of a chunk in the gated delta rule, transformers' own and flash-linear-attention's."""
UPDATE_COPIES = 3
"""Of the adapter's gradients during an optimizer update: joined, divided by the tokens, and AdamW's own."""
BATCHED_TOKENS = {0: 8192, 70: 16384}
"""Tokens in one of vLLM's forward passes on a GPU of at least so many GiB, where nobody waits for a first token."""
WEIGHT_KEYS = "model.path, learner.base_precision, learner.sharding and learner.workers"
"""What decides how much of the base a worker holds."""
GATHERED_KEYS = "model.path and learner.sharding"
"""What decides how much of a sharded base is whole at one time."""
LENGTH_KEYS = "learner.micro_batch_tokens and agent.max_response_length"
"""What decides how many tokens are in a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One kind of memory."""

    name: str
    bytes: int
    keys: str
    """Configuration keys that change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """One learner worker. What is resident is always there; the moments follow each other, the largest counts."""

    resident: tuple[Item, ...]
    forward: tuple[Item, ...]
    """At the LM head, when all layers have run."""
    backward: tuple[Item, ...]
    """In the backward of the layer that keeps most."""
    update: tuple[Item, ...]
    tokens: int
    """Tokens of the largest micro-batch."""
    part: int
    """Those of them that are this worker's: all, unless workers share it."""
    host: tuple[Item, ...] = ()
    """In the host's memory instead of the GPU's."""

    @property
    def moment(self) -> str:
        """Name of the moment at which most is held."""
        return max(("forward", "backward", "update"), key=lambda name: total(getattr(self, name)))

    @property
    def peak_items(self) -> tuple[Item, ...]:
        """All that is held at that moment."""
        moment: tuple[Item, ...] = getattr(self, self.moment)
        return self.resident + moment

    @property
    def peak(self) -> int:
        """Bytes held at that moment."""
        return total(self.peak_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One GPU of an engine."""

    items: tuple[Item, ...]
    """Without the KV cache."""
    limit: int
    """What the engine may take, bytes."""
    kv_cache: int
    """What is left of it, or what the configuration asks for; may be negative."""
    sequence: int
    """KV cache of one sequence at full length."""
    length: int
    """Tokens of that sequence."""

    @property
    def sequences(self) -> int:
        """Sequences at full length that the KV cache holds at one time."""
        return max(0, self.kv_cache // self.sequence)


def total(items: Sequence[Item]) -> int:
    """Bytes of all of them."""
    return sum(item.bytes for item in items)


def sequence_tokens(config: DracoConfig) -> int:
    """Longest trajectory."""
    return config.agent.max_prompt_length + config.agent.max_response_length


def micro_batch_tokens(config: DracoConfig) -> int:
    """Tokens of the largest forward pass: a sequence over the budget gets a pass of its own."""
    longest = sequence_tokens(config)
    return max(longest, min(config.learner.micro_batch_tokens, config.algorithm.group_size * longest))


def learner_memory(config: DracoConfig, shape: ModelShape, tokens: int | None = None) -> LearnerMemory:
    """One learner worker's memory.

    Args:
        tokens: of the micro-batch; None is the largest the configuration allows.
    """
    learner = config.learner
    tokens = micro_batch_tokens(config) if tokens is None else tokens
    part = math.ceil(tokens / learner.context_parallel)
    width = DTYPE_BYTES[config.model.dtype]
    adapter = shape.adapter_parameters(learner.lora_target, learner.lora_rank)
    matrices = 2 * len(shape.adapted(learner.lora_target))
    rank_key = "learner.lora_rank"
    resident = (
        Item(name="base weights", bytes=base_bytes(config, shape), keys=WEIGHT_KEYS),
        Item(name="adapter (float32)", bytes=adapter * FLOAT32, keys=rank_key),
        # AdamW keeps two moments and one step counter for every matrix.
        Item(name="optimizer", bytes=(2 * adapter + matrices) * FLOAT32, keys=rank_key),
        Item(name="gradients", bytes=adapter * FLOAT32, keys=rank_key),
    )
    spread = spread_over(shape, learner.context_parallel)
    kept = [
        part * saved_bytes(spread, layer, width, learner.lora_rank, kernels=learner.gpus_per_worker > 0)
        + shared_prompt_bytes(config, spread, layer)
        for layer in shape.layers
    ]
    layers, recomputed = _activations(config, shape, part, kept)
    head = Item(
        # What the last norm reads, its output, the positions wanted of it, and their slopes.
        name="hidden states at the LM head",
        bytes=part * shape.hidden * 4 * width,
        keys=LENGTH_KEYS,
    )
    chunk = Item(
        name="log-prob chunk",
        bytes=min(learner.logprob_chunk_tokens, part) * shape.vocabulary * chunk_bytes(config),
        keys="learner.logprob_chunk_tokens",
    )
    # Of what each expert of a token puts out, and of its product with the expert's weight.
    routed = 0 if shape.experts is None else 2 * shape.experts.active * shape.hidden * width
    slope = Item(
        name="gradients of activations",
        bytes=part * ((shape.intermediate + shape.hidden) * FLOAT32 + routed),
        keys=LENGTH_KEYS,
    )
    exchange = Item(
        # Of one layer: what is sent, and what comes.
        name="exchange with workers that share the tokens",
        bytes=2 * part * max(_exchanged(spread, layer) for layer in spread.distinct) * width,
        keys="learner.context_parallel",
    )
    gathered_head, gathered_layers = _gathered(config, shape, chunk.bytes)
    return LearnerMemory(
        resident=resident,
        forward=(*layers, head, *gathered_head, chunk),
        backward=(
            *layers,
            head,
            *gathered_layers,
            *recomputed,
            slope,
            *_made_whole(config, shape),
            *([exchange] if part < tokens else []),
        ),
        update=(Item(name="copies of gradients", bytes=UPDATE_COPIES * adapter * FLOAT32, keys=rank_key),),
        tokens=tokens,
        part=part,
        host=(layer_inputs(config, shape, part), _kept_at_head(shape, part, width))
        if learner.offload_activations
        else (),
    )


def _kept_at_head(shape: ModelShape, tokens: int, width: int) -> Item:
    """Of the hidden states at the LM head what the backward needs: what the last norm read, and the slopes."""
    return Item(name="hidden states at the LM head", bytes=tokens * shape.hidden * 2 * width, keys=LENGTH_KEYS)


def learner_room(config: DracoConfig, gpu: int, reserved: int) -> int:
    """Bytes of a GPU that a learner worker may take while it computes; `reserved` is one process's CUDA context.

    An engine that sleeps on the same GPU keeps its own context and graphs.
    """
    if config.engine.colocate:
        return gpu - 2 * reserved
    return int(gpu * min(1.0, config.learner.gpus_per_worker)) - reserved


def spread_over(shape: ModelShape, workers: int) -> ModelShape:
    """The shape whose key heads are counted as often as they are sent to workers that share a row."""
    delta = shape.delta
    if delta is not None:
        delta = replace(delta, key_heads=math.lcm(delta.key_heads, workers))
    return replace(shape, kv_heads=math.lcm(shape.kv_heads, workers), delta=delta)


def exchanged_bytes(config: DracoConfig, shape: ModelShape, tokens: int) -> int:
    """What a worker sends to those it shares a row of so many tokens with, in one forward pass."""
    workers = config.learner.context_parallel
    spread = spread_over(shape, workers)
    # One part of it is its own.
    sent = math.ceil(tokens / workers) * (workers - 1) // workers * DTYPE_BYTES[config.model.dtype]
    return sent * sum(_exchanged(spread, layer) for layer in spread.layers)


def _exchanged(shape: ModelShape, layer: LayerShape) -> int:
    """Numbers of one token that a layer's mixer sends around: projections to where their heads are, and the output."""
    if (delta := _delta_net(shape, layer)) is None:
        return 2 * shape.queries + 2 * shape.keys
    return delta.channels + 2 * delta.values + 2 * delta.value_heads


def _delta_net(shape: ModelShape, layer: LayerShape) -> DeltaShape | None:
    """The mixer of a gated delta-net layer; None where it is softmax attention.

    Raises: ConfigError: it is neither, and what it keeps is not known.
    """
    if layer.kind == "other":
        raise ConfigError(
            f"the model has layers other than softmax attention, the same in each, and gated delta nets (linear layers "
            f"{', '.join(linear.name for linear in layer.linears)}): how much memory they take is not known"
        )
    return shape.delta if layer.kind == "linear_attention" else None


def is_sharded(config: DracoConfig) -> bool:
    """Whether a learner worker holds only a part of the base."""
    return config.learner.sharding == "full" and config.learner.workers > 1


def base_parameters(config: DracoConfig, shape: ModelShape) -> int:
    """Parameters of the base that a learner worker keeps; rows that do not divide by the workers are not counted."""
    if not is_sharded(config):
        return shape.parameters
    whole = shape.hidden + (shape.vocabulary * shape.hidden if shape.tied else 0)
    return whole + math.ceil((shape.parameters - whole) / config.learner.workers)


def base_bytes(config: DracoConfig, shape: ModelShape) -> int:
    """Bytes of the base that a learner worker keeps."""
    spared = sum(_spared(config, layer) for layer in shape.layers)
    workers = config.learner.workers if is_sharded(config) else 1
    return base_parameters(config, shape) * DTYPE_BYTES[config.model.dtype] - spared // workers


def _spared(config: DracoConfig, layer: LayerShape) -> int:
    """Bytes by which a decoder layer is smaller where its weights are held in 8 bits, with a scale for each row."""
    if config.learner.base_precision == "model":
        return 0
    width = DTYPE_BYTES[config.model.dtype]
    return sum(linear.inputs * linear.outputs * (width - 1) - linear.outputs * width for linear in layer.linears)


def _made_whole(config: DracoConfig, shape: ModelShape) -> tuple[Item, ...]:
    """The weight of a product, where weights are held in 8 bits."""
    if config.learner.base_precision == "model":
        return ()
    largest = max(linear.inputs * linear.outputs for layer in shape.distinct for linear in layer.linears)
    size = largest * DTYPE_BYTES[config.model.dtype]
    return (Item(name="one weight, made whole", bytes=size, keys="learner.base_precision"),)


def _gathered(config: DracoConfig, shape: ModelShape, chunk: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Bytes of a sharded base that are whole at the LM head and in a layer's backward; `chunk`: of a log-prob chunk.

    What is received lies beside what is made of it for a moment; a layer is fetched while the one above is at work.
    """
    if not is_sharded(config):
        return (), ()
    width = DTYPE_BYTES[config.model.dtype]
    layer = max(layer.parameters * width - _spared(config, layer) for layer in shape.distinct)
    layers = Item(name="two layers, gathered", bytes=2 * layer, keys=GATHERED_KEYS)
    if shape.tied:
        return (), (layers,)
    head = shape.vocabulary * shape.hidden * width
    return (Item(name="LM head, gathered", bytes=max(head, 2 * head - chunk), keys=GATHERED_KEYS),), (layers,)


def _activations(
    config: DracoConfig, shape: ModelShape, tokens: int, kept: Sequence[int]
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Bytes of all layers during the whole pass, and of the one that is recomputed; `kept` is what a layer keeps."""
    if not config.learner.gradient_checkpointing:
        return (Item(name="activations: all layers", bytes=sum(kept), keys="learner.gradient_checkpointing"),), ()
    inputs = layer_inputs(config, shape, tokens)
    if config.learner.offload_activations:
        # One is at work or recomputed, another on its way.
        inputs = Item(
            name="activations: inputs of two layers", bytes=2 * inputs.bytes // len(shape.order), keys=LENGTH_KEYS
        )
    return (
        (inputs,),
        (Item(name="activations: one layer, recomputed", bytes=max(kept), keys=LENGTH_KEYS),),
    )


def layer_inputs(config: DracoConfig, shape: ModelShape, tokens: int) -> Item:
    """What is kept of a pass whose layers are recomputed."""
    inputs = len(shape.order) * tokens * shape.hidden * DTYPE_BYTES[config.model.dtype]
    return Item(name="activations: inputs of all layers", bytes=inputs, keys=LENGTH_KEYS)


def saved_bytes(shape: ModelShape, layer: LayerShape, width: int, rank: int, *, kernels: bool) -> int:
    """What one decoder layer with an adapter on every linear layer keeps for its backward; bytes a token.

    Args:
        width: bytes of a number of the base model.
        rank: of the adapter.
        kernels: whether flash-linear-attention computes delta nets; otherwise transformers' own code.
    """
    linears = layer.linears
    # What an adapter reads, once for all layers that read the same, and its inner numbers.
    read = {linear.reads: linear.inputs for linear in linears}
    adapters = width * (sum(read.values()) + rank * len(linears))
    # What two norms read, and their scale.
    norms = 2 * (width * shape.hidden + FLOAT32)
    if shape.experts is None:
        mlp = shape.mlp_saved * width * shape.intermediate
    else:
        mlp = _experts_bytes(shape.experts, width)
    delta = _delta_net(shape, layer)
    if delta is None:
        mixer = _attention_bytes(shape, width)
    else:
        mixer = _delta_kernel_bytes(delta, width) if kernels else _delta_bytes(delta, width)
    return adapters + norms + mlp + mixer


def _experts_bytes(experts: ExpertsShape, width: int) -> int:
    """What a mixture of experts keeps, bytes a token: of its router, its experts, and the one that is shared."""
    # Gate and up projection and the gate's activation; what comes out, since its weight has a gradient.
    routed = experts.active * width * (3 * experts.width + experts.hidden + 1)
    # Where each token goes, and where it comes back from, in whole numbers of 8 bytes; the router's probabilities.
    places = 4 * 8 * experts.active + FLOAT32 * experts.number
    # As of a dense MLP, and its output, which a gate weighs.
    shared = width * (2 * experts.shared + experts.hidden + 1) if experts.shared else 0
    return routed + places + shared


def shared_prompt_bytes(config: DracoConfig, shape: ModelShape, layer: LayerShape) -> int:
    """What one decoder layer keeps of a prompt again for each rollout of a group that shares it."""
    if layer.kind != "full_attention":
        return 0
    copies = config.algorithm.group_size * config.agent.max_prompt_length
    return copies * 2 * DTYPE_BYTES[config.model.dtype] * shape.keys // config.learner.context_parallel


def chunk_bytes(config: DracoConfig) -> int:
    """Bytes of one word of one token while its log-prob is computed.

    Two numbers in float32: its log-prob and its probability. The slope of an entropy bonus is copied into the model's
    type while both are there.
    """
    width = DTYPE_BYTES[config.model.dtype]
    copy = width if config.learner.entropy_coefficient > 0 and width < FLOAT32 else 0
    return 2 * FLOAT32 + copy


def engine_memory(config: DracoConfig, shape: ModelShape, gpu: int, reserved: int) -> EngineMemory:
    """One GPU of an engine, or the one process of a CPU engine.

    Args:
        gpu: memory of the GPU, bytes.
        reserved: of it, for the CUDA context, libraries and graphs.
    Raises: ConfigError if tensor parallelism does not divide the model, or has fewer GPUs than it needs.
    """
    engine, parallel = config.engine, config.engine.tensor_parallel
    _check_parallel(config, shape)
    on_gpu = engine.gpus_per_engine > 0
    width = DTYPE_BYTES[config.model.dtype]
    length = sequence_tokens(config)
    if uses_self_judge(config):
        length = max(length, context_tokens(config))
    batched = min(batched_tokens(config, gpu, length), engine.max_num_seqs * length)
    workspace = batched * width * (4 * shape.hidden + 3 * shape.intermediate // parallel)
    workspace += engine.max_num_seqs * shape.vocabulary * (width + 3 * FLOAT32)
    items = [
        Item(name="engine weights", bytes=shape.parameters * width // parallel, keys="engine.tensor_parallel"),
        Item(
            name=f"adapter slots ({live_adapters(config.train.staleness)})",
            bytes=_slot_bytes(config, shape, parallel, width),
            keys="learner.lora_rank",
        ),
        Item(name="workspace of a forward pass", bytes=workspace, keys="engine.max_num_seqs"),
    ]
    if on_gpu:
        items.append(Item(name="CUDA context and graphs", bytes=reserved, keys="engine.enforce_eager"))
    limit = int(gpu * engine.gpu_memory_utilization)
    cache = limit - total(items)
    if engine.kv_cache_gib is not None or not on_gpu:
        cache = int((engine.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB)
        # vLLM wants its share of the GPU to be free when it starts, whatever it takes then.
        limit = max(limit, total(items) + cache) if on_gpu else gpu
    return EngineMemory(
        items=tuple(items),
        limit=limit,
        kv_cache=cache,
        sequence=length * kv_bytes(shape, parallel, kv_width(config)) + state_bytes(shape, parallel, width),
        length=length,
    )


def batched_tokens(config: DracoConfig, gpu: int, length: int) -> int:
    """Tokens in one of vLLM's forward passes; ``gpu`` bytes, ``length`` tokens of the longest sequence."""
    if config.engine.gpus_per_engine == 0:
        return max(8192, length)
    given = config.engine.vllm.get("max_num_batched_tokens")
    return given if isinstance(given, int) else max(n for least, n in BATCHED_TOKENS.items() if gpu >= least * GIB)


def kv_width(config: DracoConfig) -> int:
    """Bytes of a number in the KV cache; those of less than 8 bits are counted as the model's."""
    kind = str(config.engine.vllm.get("kv_cache_dtype", "auto"))
    if kind.startswith(("fp8", "int8")):
        return 1
    return 2 if kind in ("float16", "bfloat16") else DTYPE_BYTES[config.model.dtype]


def kv_bytes(shape: ModelShape, parallel: int, width: int) -> int:
    """KV cache of one token on one GPU: keys and values of the full-attention layers."""
    full = shape.count("full_attention")
    return full * 2 * max(1, shape.kv_heads // parallel) * shape.head_dim * width


def state_bytes(shape: ModelShape, parallel: int, width: int) -> int:
    """Recurrent state of one sequence on one GPU: the last inputs of the convolution, and the state in float32."""
    delta = shape.delta
    if delta is None:
        return 0
    state = delta.values * delta.key_dim * FLOAT32 + delta.channels * (delta.kernel - 1) * width
    return shape.count("linear_attention") * state // parallel


def _attention_bytes(shape: ModelShape, width: int) -> int:
    queries, keys = shape.queries, shape.keys
    # Queries and output, keys and values, and the softmax's normaliser of each head; output, keys and values once more,
    # joined from and for the segments of a row.
    kept = width * (3 * queries + 4 * keys) + FLOAT32 * shape.heads
    if shape.query_norm:
        kept += width * (queries + keys) + FLOAT32 * (shape.heads + shape.kv_heads)
    if shape.gated:
        # The gate and what it multiplies; the norm of the queries reads them where they lie, beside the gate.
        kept += 3 * width * queries
    return kept


def _delta_bytes(delta: DeltaShape, width: int) -> int:
    keys, values, heads = delta.value_heads * delta.key_dim, delta.values, delta.value_heads
    # Before and after the convolution's activation.
    convolution = 2 * width * delta.channels
    # All in float32: queries and keys in four stages each, values in three, five products within a chunk, its state.
    rule = FLOAT32 * (8 * keys + 3 * values + 5 * heads * DELTA_CHUNK + keys * delta.value_dim // DELTA_CHUNK)
    # What is float32 already is not copied into order by a cast; four matrix products copy it for themselves.
    rule += 4 * FLOAT32 * keys if width == FLOAT32 else 0
    gates = (8 * FLOAT32 + width) * heads
    gated_norm = (3 * FLOAT32 + width) * values
    return convolution + rule + gates + gated_norm


def _delta_kernel_bytes(delta: DeltaShape, width: int) -> int:
    """The same of flash-linear-attention's kernels, which compute again what a chunk makes of its tokens."""
    keys, values, heads = delta.value_heads * delta.key_dim, delta.values, delta.value_heads
    # What the convolution reads.
    convolution = width * delta.channels
    # Normalised queries and keys with their scales, values, decays, and each chunk's triangular matrix.
    rule = width * (2 * keys + values + DELTA_CHUNK * heads) + FLOAT32 * 3 * heads
    gates = (FLOAT32 + width) * heads
    gated_norm = (3 * FLOAT32 + width) * values
    return convolution + rule + gates + gated_norm


def _slot_bytes(config: DracoConfig, shape: ModelShape, parallel: int, width: int) -> int:
    """vLLM keeps, in the model's type, the matrix on the split side of a layer split and the other one whole."""
    wanted = config.learner.lora_rank
    rank = next((rank for rank in LORA_RANKS if rank >= wanted), LORA_RANKS[-1])
    numbers = sum(
        linear.inputs // parallel + linear.outputs
        if linear.row_parallel
        else linear.inputs + linear.outputs // parallel
        for layer in shape.layers
        for linear in layer.linears
    )
    return live_adapters(config.train.staleness) * rank * numbers * width


def _check_parallel(config: DracoConfig, shape: ModelShape) -> None:
    engine = config.engine
    split = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    if shape.experts is None:
        split["intermediate_size"] = shape.intermediate
    else:
        split |= {"moe_intermediate_size": shape.experts.width, "shared_expert_intermediate_size": shape.experts.shared}
    if shape.delta is not None:
        split |= {"linear_num_value_heads": shape.delta.value_heads, "linear_num_key_heads": shape.delta.key_heads}
    check_split(split, engine.tensor_parallel, config.model.path)
    # Engines that share GPUs with the learner reserve a share of each (`DracoConfig`).
    if not engine.colocate and 0 < engine.gpus_per_engine < engine.tensor_parallel and engine.tensor_parallel > 1:
        raise ConfigError(
            f"engine.tensor_parallel={engine.tensor_parallel} needs as many GPUs, engine.gpus_per_engine is "
            f"{engine.gpus_per_engine:g}; set it to {engine.tensor_parallel}"
        )

"""Memory of a learner worker and of an engine on one GPU, by kind of memory (docs/planning.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.model_config import check_tensor_parallel
from draco_ray.engine.vllm_engine import CPU_KV_CACHE_GIB, LORA_RANKS, live_adapters
from draco_ray.errors import ConfigError
from draco_ray.judging.judge_context import self_judge_context_length, uses_self_judge
from draco_ray.lab.planning.model_shape import DeltaShape, ExpertsShape, LayerShape, ModelShape

GIB = 1 << 30
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32_BYTES = 4
DELTA_CHUNK = 64
"""Tokens per chunk in the gated delta rule, both in transformers and in flash-linear-attention."""
UPDATE_COPIES = 3
"""Copies of the adapter's gradients in an optimizer update: concatenated, divided by the tokens, and AdamW's own."""
BATCHED_TOKENS = {0: 8192, 70: 16384}
"""Minimum GiB of a GPU -> tokens per vLLM forward pass on such a GPU, tuned for throughput."""
WEIGHT_KEYS = "model.path, learner.base_precision, learner.sharding and learner.workers"
"""Keys that change the size of a worker's base weights."""
GATHERED_KEYS = "model.path and learner.sharding"
"""Keys that change how much of a sharded base is gathered at one time."""
LENGTH_KEYS = "learner.micro_batch_tokens and agent.max_response_length"
"""Keys that change the tokens in a micro-batch."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One kind of memory."""

    name: str
    bytes: int
    keys: str
    """Names of the configuration keys on which ``bytes`` depends, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Memory of one learner worker: what is always allocated, and what each of three moments adds."""

    resident: tuple[MemoryItem, ...]
    forward: tuple[MemoryItem, ...]
    """Further items at the LM head, after the forward pass of all layers."""
    backward: tuple[MemoryItem, ...]
    """Further items in the backward pass of the largest layer."""
    update: tuple[MemoryItem, ...]
    tokens: int
    """Tokens of the largest micro-batch."""
    part: int
    """Tokens of the micro-batch on this worker; a part of ``tokens`` with `learner.context_parallel`."""
    host: tuple[MemoryItem, ...] = ()
    """Items in host memory instead of GPU memory."""

    @property
    def moment(self) -> str:
        """Name of the moment of peak memory."""
        return max(("forward", "backward", "update"), key=lambda name: total(getattr(self, name)))

    @property
    def peak_items(self) -> tuple[MemoryItem, ...]:
        """All items at the moment of peak memory."""
        moment: tuple[MemoryItem, ...] = getattr(self, self.moment)
        return self.resident + moment

    @property
    def peak(self) -> int:
        """Bytes at the moment of peak memory."""
        return total(self.peak_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of one GPU of an engine."""

    items: tuple[MemoryItem, ...]
    """Memory by kind, without the KV cache."""
    limit: int
    """Bytes that the engine may use."""
    kv_cache: int
    """Bytes left for the KV cache, or the configured size; may be negative."""
    sequence: int
    """Bytes of KV cache of one sequence at full length."""
    length: int
    """Tokens of a sequence at full length."""

    @property
    def sequences(self) -> int:
        """Sequences at full length that the KV cache holds at one time."""
        return max(0, self.kv_cache // self.sequence)


def total(items: Sequence[MemoryItem]) -> int:
    """Total bytes of the items."""
    return sum(item.bytes for item in items)


def sequence_tokens(config: DracoConfig) -> int:
    """Tokens of the longest trajectory."""
    return config.agent.max_prompt_length + config.agent.max_response_length


def micro_batch_tokens(config: DracoConfig) -> int:
    """Tokens of the largest forward pass; a sequence longer than the budget gets its own pass."""
    longest = sequence_tokens(config)
    return max(longest, min(config.learner.micro_batch_tokens, config.algorithm.group_size * longest))


def learner_memory(config: DracoConfig, shape: ModelShape, tokens: int | None = None) -> LearnerMemory:
    """One learner worker's memory.

    Args:
        tokens: tokens of the micro-batch; None is the largest that the configuration allows.
    """
    learner = config.learner
    tokens = micro_batch_tokens(config) if tokens is None else tokens
    part = math.ceil(tokens / learner.context_parallel)
    width = DTYPE_BYTES[config.model.dtype]
    adapter = shape.adapter_parameters(learner.lora_target, learner.lora_rank)
    matrices = 2 * len(shape.adapted(learner.lora_target))
    rank_key = "learner.lora_rank"
    resident = (
        MemoryItem(
            "base weights", base_bytes(config, shape), WEIGHT_KEYS if learner.gpus_per_worker > 0 else "model.path"
        ),
        MemoryItem("adapter (float32)", adapter * FLOAT32_BYTES, rank_key),
        # AdamW keeps two moments and one step counter for every matrix.
        MemoryItem("optimizer", (2 * adapter + matrices) * FLOAT32_BYTES, rank_key),
        MemoryItem("gradients", adapter * FLOAT32_BYTES, rank_key),
    )
    spread = repeat_key_heads(shape, learner.context_parallel)
    kept = [
        part * saved_activation_bytes(spread, layer, width, learner.lora_rank, kernels=learner.gpus_per_worker > 0)
        + shared_prompt_bytes(config, spread, layer)
        for layer in shape.layers
    ]
    layers, recomputed = _activations(config, shape, part, kept)
    # Input and output of the last norm, its output at sampled positions, and their gradients.
    head = MemoryItem("hidden states at the LM head", part * shape.hidden * 4 * width, LENGTH_KEYS)
    chunk_size = min(learner.logprob_chunk_tokens, part) * shape.vocabulary * chunk_bytes(config)
    chunk = MemoryItem("log-prob chunk", chunk_size, "learner.logprob_chunk_tokens")
    # The output of each expert of a token, and its product with the expert's weight.
    routed = 0 if shape.experts is None else 2 * shape.experts.active * shape.hidden * width
    gradients = part * ((shape.intermediate + shape.hidden) * FLOAT32_BYTES + routed)
    gathered_head, gathered_layers = _gathered(config, shape, chunk.bytes)
    slope = MemoryItem("gradients of activations", gradients, LENGTH_KEYS)
    backward = [*layers, head, *gathered_layers, *recomputed, slope]
    if learner.base_precision != "model":
        largest = max(linear.inputs * linear.outputs for layer in shape.distinct for linear in layer.linears)
        backward.append(MemoryItem("one weight, gathered", largest * width, "learner.base_precision"))
    if part < tokens:
        # Send and receive buffer of the layer that exchanges most.
        exchanged = 2 * part * max(_exchanged(spread, layer) for layer in spread.distinct) * width
        backward.append(
            MemoryItem("exchange with workers that share the tokens", exchanged, "learner.context_parallel")
        )
    # Input of the last norm, and the gradients of its output.
    head_on_host = MemoryItem(head.name, part * shape.hidden * 2 * width, LENGTH_KEYS)
    return LearnerMemory(
        resident=resident,
        forward=(*layers, head, *gathered_head, chunk),
        backward=tuple(backward),
        update=(MemoryItem("copies of gradients", UPDATE_COPIES * adapter * FLOAT32_BYTES, rank_key),),
        tokens=tokens,
        part=part,
        host=(layer_inputs(config, shape, part), head_on_host) if learner.offload_activations else (),
    )


def learner_available_bytes(config: DracoConfig, gpu: int, reserved: int) -> int:
    """Bytes of a GPU available to a computing learner worker; `reserved` is the CUDA context of one process.

    A sleeping engine on the same GPU keeps its own context and graphs.
    """
    if config.engine.colocate:
        return gpu - 2 * reserved
    return int(gpu * min(1.0, config.learner.gpus_per_worker)) - reserved


def repeat_key_heads(shape: ModelShape, workers: int) -> ModelShape:
    """The shape with key heads repeated, as context parallelism does if ``workers`` does not divide their number."""
    delta = shape.delta
    if delta is not None:
        delta = replace(delta, key_heads=math.lcm(delta.key_heads, workers))
    return replace(shape, kv_heads=math.lcm(shape.kv_heads, workers), delta=delta)


def exchanged_bytes(config: DracoConfig, shape: ModelShape, tokens: int) -> int:
    """Bytes that a worker sends to the others in one forward pass of a shared micro-batch of ``tokens`` tokens."""
    workers = config.learner.context_parallel
    spread = repeat_key_heads(shape, workers)
    # A worker does not send the part that it keeps itself.
    sent = math.ceil(tokens / workers) * (workers - 1) // workers * DTYPE_BYTES[config.model.dtype]
    return sent * sum(_exchanged(spread, layer) for layer in spread.layers)


def _exchanged(shape: ModelShape, layer: LayerShape) -> int:
    """Array elements per token that workers exchange for a layer's mixer: its input projections and its output."""
    if (delta := _delta_net(shape, layer)) is None:
        return 2 * shape.queries + 2 * shape.keys
    return delta.channels + 2 * delta.values + 2 * delta.value_heads


def _delta_net(shape: ModelShape, layer: LayerShape) -> DeltaShape | None:
    """The mixer of a gated delta-net layer; None for softmax attention.

    Raises: ConfigError: the layer is of another kind, whose memory is not known.
    """
    if layer.kind == "other":
        raise ConfigError(
            f"the model has layers other than softmax attention of one shape and gated delta nets (linear layers "
            f"{', '.join(linear.name for linear in layer.linears)}): their memory is not known"
        )
    return shape.delta if layer.kind == "linear_attention" else None


def is_sharded(config: DracoConfig) -> bool:
    """Whether a learner worker holds only a part of the base."""
    return config.learner.sharding == "full" and config.learner.workers > 1


def base_parameters(config: DracoConfig, shape: ModelShape) -> int:
    """Parameters of the base that a learner worker keeps, without the padding of matrices that do not shard evenly."""
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
    """Bytes saved in a decoder layer by 8-bit weights with one scale per row."""
    if config.learner.base_precision == "model":
        return 0
    width = DTYPE_BYTES[config.model.dtype]
    return sum(linear.inputs * linear.outputs * (width - 1) - linear.outputs * width for linear in layer.linears)


def _gathered(
    config: DracoConfig, shape: ModelShape, chunk: int
) -> tuple[tuple[MemoryItem, ...], tuple[MemoryItem, ...]]:
    """Bytes of weights that FSDP gathers at the LM head and in a layer's backward; `chunk`: bytes of a log-prob chunk.

    The receive buffer and the weights built from it exist together for a moment; the next layer is prefetched.
    """
    if not is_sharded(config):
        return (), ()
    width = DTYPE_BYTES[config.model.dtype]
    layer = max(layer.parameters * width - _spared(config, layer) for layer in shape.distinct)
    layers = MemoryItem("two layers, gathered", 2 * layer, GATHERED_KEYS)
    if shape.tied:
        return (), (layers,)
    head = shape.vocabulary * shape.hidden * width
    return (MemoryItem("LM head, gathered", max(head, 2 * head - chunk), GATHERED_KEYS),), (layers,)


def _activations(
    config: DracoConfig, shape: ModelShape, tokens: int, kept: Sequence[int]
) -> tuple[tuple[MemoryItem, ...], tuple[MemoryItem, ...]]:
    """Bytes of activations of all layers in the whole pass, and of one recomputed layer; `kept`: bytes per layer."""
    if config.learner.gradient_checkpointing is False:
        return (MemoryItem("activations: all layers", sum(kept), "learner.gradient_checkpointing"),), ()
    inputs = layer_inputs(config, shape, tokens)
    if config.learner.offload_activations:
        # The GPU holds the inputs of two layers: one is computed while another is copied.
        inputs = MemoryItem("activations: inputs of two layers", 2 * inputs.bytes // len(shape.order), LENGTH_KEYS)
    return (inputs,), (MemoryItem("activations: one layer, recomputed", max(kept), LENGTH_KEYS),)


def layer_inputs(config: DracoConfig, shape: ModelShape, tokens: int) -> MemoryItem:
    """Inputs of all layers, which are kept for recomputation."""
    inputs = len(shape.order) * tokens * shape.hidden * DTYPE_BYTES[config.model.dtype]
    return MemoryItem("activations: inputs of all layers", inputs, LENGTH_KEYS)


def saved_activation_bytes(shape: ModelShape, layer: LayerShape, width: int, rank: int, *, kernels: bool) -> int:
    """Bytes per token that a decoder layer with adapters on all linear layers saves for its backward pass.

    Args:
        width: bytes per number of the base model.
        rank: rank of the adapter.
        kernels: whether flash-linear-attention computes delta nets; otherwise transformers' own code.
    """
    linears = layer.linears
    # Inputs of adapters (shared by layers with the same input), and the rank-sized outputs of LoRA's matrix A.
    read = {linear.reads: linear.inputs for linear in linears}
    adapters = width * (sum(read.values()) + rank * len(linears))
    # Inputs of two norms, and their scales.
    norms = 2 * (width * shape.hidden + FLOAT32_BYTES)
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
    """Bytes per token that a mixture of experts keeps: for router, routed experts and shared expert."""
    # Gate and up projection and the gate's activation; output and routing weight, which are multiplied.
    routed = experts.active * width * (3 * experts.width + experts.hidden + 1)
    # Indices from tokens to experts and back, in int64; the router's probabilities.
    places = 4 * 8 * experts.active + FLOAT32_BYTES * experts.number
    # Two tensors of MLP size, as for a dense MLP, and the output and the gate that multiplies it.
    shared = width * (2 * experts.shared + experts.hidden + 1) if experts.shared else 0
    return routed + places + shared


def shared_prompt_bytes(config: DracoConfig, shape: ModelShape, layer: LayerShape) -> int:
    """Bytes that one decoder layer keeps for copies of a shared prompt, one per rollout."""
    if layer.kind != "full_attention":
        return 0
    copies = config.algorithm.group_size * config.agent.max_prompt_length
    return copies * 2 * DTYPE_BYTES[config.model.dtype] * shape.keys // config.learner.context_parallel


def chunk_bytes(config: DracoConfig) -> int:
    """Bytes per token and vocabulary entry while log-probs are computed.

    Two float32 numbers: log-prob and probability. With an entropy bonus, its gradient is copied into the model's
    type while both exist.
    """
    width = DTYPE_BYTES[config.model.dtype]
    copy = width if config.learner.entropy_coefficient > 0 and width < FLOAT32_BYTES else 0
    return 2 * FLOAT32_BYTES + copy


def engine_memory(config: DracoConfig, shape: ModelShape, gpu: int, reserved: int) -> EngineMemory:
    """Memory of one GPU of an engine, or of the one process of a CPU engine.

    Args:
        gpu: memory of the GPU, bytes.
        reserved: bytes of the GPU for the CUDA context, libraries and graphs.
    Raises: ConfigError if tensor parallelism does not divide the model, or has fewer GPUs than it needs.
    """
    engine, parallel = config.engine, config.engine.tensor_parallel
    _check_parallel(config, shape)
    on_gpu = engine.gpus_per_engine > 0
    width = DTYPE_BYTES[config.model.dtype]
    length = sequence_tokens(config)
    if uses_self_judge(config):
        length = max(length, self_judge_context_length(config))
    batched = min(batched_tokens(config, gpu, length), engine.max_num_seqs * length)
    weights = shape.parameters * width // parallel
    workspace = batched * width * (4 * shape.hidden + 3 * shape.intermediate // parallel)
    workspace += engine.max_num_seqs * shape.vocabulary * (width + 3 * FLOAT32_BYTES)
    slots = f"adapter slots ({live_adapters(config.train.staleness)})"
    items = [
        MemoryItem("engine weights", weights, "engine.tensor_parallel" if on_gpu else "model.path"),
        MemoryItem(slots, _slot_bytes(config, shape, parallel, width), "learner.lora_rank"),
        MemoryItem("workspace of a forward pass", workspace, "engine.max_num_seqs"),
    ]
    if on_gpu:
        items.append(MemoryItem("CUDA context and graphs", reserved, "engine.enforce_eager"))
    limit = int(gpu * engine.gpu_memory_utilization)
    cache = limit - total(items)
    if engine.kv_cache_gib is not None or not on_gpu:
        cache = int((engine.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB)
        # At start, vLLM requires its share of the GPU to be free, even if it then uses less.
        limit = max(limit, total(items) + cache) if on_gpu else gpu
    return EngineMemory(
        items=tuple(items),
        limit=limit,
        kv_cache=cache,
        sequence=length * kv_bytes(shape, parallel, kv_element_bytes(config))
        + recurrent_state_bytes(shape, parallel, width),
        length=length,
    )


def batched_tokens(config: DracoConfig, gpu: int, length: int) -> int:
    """Tokens per vLLM forward pass; ``gpu``: bytes of the GPU, ``length``: tokens of the longest sequence."""
    if config.engine.gpus_per_engine == 0:
        return max(2048, length)
    given = config.engine.vllm.get("max_num_batched_tokens")
    return given if isinstance(given, int) else max(n for least, n in BATCHED_TOKENS.items() if gpu >= least * GIB)


def kv_element_bytes(config: DracoConfig) -> int:
    """Bytes per number in the KV cache; types below 8 bits are counted as the model's type."""
    kind = str(config.engine.vllm.get("kv_cache_dtype", "auto"))
    if kind.startswith(("fp8", "int8")):
        return 1
    return 2 if kind in ("float16", "bfloat16") else DTYPE_BYTES[config.model.dtype]


def kv_bytes(shape: ModelShape, parallel: int, width: int) -> int:
    """KV cache of one token on one GPU: keys and values of the full-attention layers."""
    full = shape.count("full_attention")
    return full * 2 * max(1, shape.kv_heads // parallel) * shape.head_dim * width


def recurrent_state_bytes(shape: ModelShape, parallel: int, width: int) -> int:
    """Recurrent state of one sequence on one GPU: the last inputs of the convolution, and the state in float32."""
    delta = shape.delta
    if delta is None:
        return 0
    state = delta.values * delta.key_dim * FLOAT32_BYTES + delta.channels * (delta.kernel - 1) * width
    return shape.count("linear_attention") * state // parallel


def _attention_bytes(shape: ModelShape, width: int) -> int:
    queries, keys = shape.queries, shape.keys
    # Queries and output, keys and values, and each head's softmax normaliser; also copies of output, keys and values,
    # concatenated over the segments of a row.
    kept = width * (3 * queries + 4 * keys) + FLOAT32_BYTES * shape.heads
    if shape.query_norm:
        kept += width * (queries + keys) + FLOAT32_BYTES * (shape.heads + shape.kv_heads)
    if shape.gated:
        # The gate, the output that it multiplies, and the gate again: a part of the tensor that the query norm keeps.
        kept += 3 * width * queries
    return kept


def _delta_bytes(delta: DeltaShape, width: int) -> int:
    keys, values, heads = delta.value_heads * delta.key_dim, delta.values, delta.value_heads
    # The convolution's output before and after its activation.
    convolution = 2 * width * delta.channels
    # Float32 buffers: four each of queries and keys, three of values, five products within a chunk, the chunk's state.
    rule = FLOAT32_BYTES * (8 * keys + 3 * values + 5 * heads * DELTA_CHUNK + keys * delta.value_dim // DELTA_CHUNK)
    # Casts make inputs contiguous. A float32 model has no casts, so four matrix products copy one input each.
    rule += 4 * FLOAT32_BYTES * keys if width == FLOAT32_BYTES else 0
    gates = (8 * FLOAT32_BYTES + width) * heads
    gated_norm = (3 * FLOAT32_BYTES + width) * values
    return convolution + rule + gates + gated_norm


def _delta_kernel_bytes(delta: DeltaShape, width: int) -> int:
    """`_delta_bytes` for flash-linear-attention's kernels, which recompute values within a chunk."""
    keys, values, heads = delta.value_heads * delta.key_dim, delta.values, delta.value_heads
    # The input of the convolution.
    convolution = width * delta.channels
    # Normalised queries and keys with their scales, values, decays, and each chunk's triangular matrix.
    rule = width * (2 * keys + values + DELTA_CHUNK * heads) + FLOAT32_BYTES * 3 * heads
    gates = (FLOAT32_BYTES + width) * heads
    gated_norm = (3 * FLOAT32_BYTES + width) * values
    return convolution + rule + gates + gated_norm


def _slot_bytes(config: DracoConfig, shape: ModelShape, parallel: int, width: int) -> int:
    """Bytes of adapter slots; vLLM splits the LoRA matrix on a layer's split side and keeps the other one whole."""
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
    check_tensor_parallel(split, engine.tensor_parallel, config.model.path)
    # With engine.colocate, gpus_per_engine is the sum of an engine's GPU shares, which `DracoConfig` checks.
    if not engine.colocate and 0 < engine.gpus_per_engine < engine.tensor_parallel and engine.tensor_parallel > 1:
        raise ConfigError(
            f"engine.tensor_parallel={engine.tensor_parallel} needs as many GPUs, but "
            f"engine.gpus_per_engine={engine.gpus_per_engine:g}; set engine.gpus_per_engine={engine.tensor_parallel}"
        )

"""`draco plan`: print the memory and time that a configuration needs, and refuse one that cannot fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Column, Table

from draco_ray.config.machine import memory_bytes
from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.engine.model_config import check_heads, check_moe_quantization
from draco_ray.engine.vllm_engine import check_argument_names
from draco_ray.errors import ConfigError
from draco_ray.judging.judge_context import (
    judge_context,
    model_positions,
    uses_self_judge,
)
from draco_ray.lab.planning.memory import (
    GIB,
    EngineMemory,
    LearnerMemory,
    MemoryItem,
    engine_memory,
    exchanged_bytes,
    is_sharded,
    learner_available_bytes,
    learner_memory,
    sequence_tokens,
    total,
)
from draco_ray.lab.planning.model_shape import ModelShape, model_shape
from draco_ray.lab.planning.step_time import Assumptions, step_time
from draco_ray.terminal import console, counted
from draco_ray.training.sizes import PROCESSES_BYTES, context_problems, ray_address, with_gradient_checkpointing

MOMENTS = {
    "forward": "during the LM head's forward pass",
    "backward": "during a layer's backward pass",
    "update": "during the optimizer update",
}
MOST_TOKENS = 1 << 24
"""Largest micro-batch, in tokens, that is tried in the search for one that fits."""
MOST_WORKERS = 64
"""Largest number of learner workers that an error message suggests."""


def plan(config: DracoConfig, *, gpu_memory_gib: float, model_config: Path | None, given: Assumptions) -> None:
    """Print bytes per GPU by kind and the expected time of a step.

    Args:
        gpu_memory_gib: memory of one GPU, GiB.
        model_config: the model's ``config.json``, if `model.path` is neither a directory here nor a known model.
        given: assumed throughputs, and the GPU memory that CUDA and libraries take.
    Raises: ConfigError: the run does not fit (names the largest item and the keys to change), the model's shape is not
        known, or vLLM does not know a name in `engine.vllm`.
    """
    check_argument_names(config.engine.vllm)
    config = with_gradient_checkpointing(config)
    shape = model_shape(config.model.path, model_config)
    check_heads(_heads(shape), config.learner.context_parallel, config.model.path)
    check_moe_quantization(config.learner, config.model.path, mixture=shape.experts is not None)
    gpu, reserved = int(gpu_memory_gib * GIB), int(given.reserved_gib * GIB)
    learner = learner_memory(config, shape)
    engine = engine_memory(config, shape, gpu, reserved)
    learner_on_gpu, engine_on_gpu = config.learner.gpus_per_worker > 0, config.engine.gpus_per_engine > 0
    room = learner_available_bytes(config, gpu, reserved)
    _print_model(config, shape)
    _print_learner(config, shape, learner, room if learner_on_gpu else None)
    _print_engine(config, engine)
    _print_gpus(config)
    resting = total(learner.resident) + reserved
    if config.engine.colocate:
        console.print(
            f"engines and learner take turns: an active engine's {_size(engine.limit)} and an idle learner worker's "
            f"{_size(resting)} share a GPU of {_size(gpu)}; a sleeping engine keeps its weights in host memory"
        )
    if uses_self_judge(config):
        context = judge_context(config)
        console.print(f"self-judge: {context.shows}; longest request: {context}")
    problems = context_problems(config, model_positions(config.model.path, model_config))
    problems += memory_problems(config, shape, gpu, reserved)
    if ray_address(config) is None and not (learner_on_gpu and engine_on_gpu):
        problems += host_problems(config, shape)
    if problems:
        raise ConfigError("; ".join(problems))
    if learner_on_gpu and engine_on_gpu:
        _print_time(config, shape, engine, given)
    else:
        console.print("time: not estimated, because the assumed throughputs are those of GPUs")


def memory_problems(config: DracoConfig, shape: ModelShape, gpu: int, reserved: int) -> list[str]:
    """Why learner or engines do not fit, and what to change.

    Args:
        gpu: memory of one GPU, bytes.
        reserved: the part of it for one process's CUDA context, bytes.
    """
    learner, engine = learner_memory(config, shape), engine_memory(config, shape, gpu, reserved)
    room, problems = learner_available_bytes(config, gpu, reserved), []
    if config.learner.gpus_per_worker > 0 and learner.peak > room:
        problems.append(learner_problem(config, shape, learner, room, gpu / GIB))
    resting = total(learner.resident) + reserved
    if engine.sequences < 1:
        problems.append(engine_problem(config, engine, gpu / GIB))
    elif config.engine.gpus_per_engine > 0:
        problem = gpu_sharing_problem(config, shape, engine, gpu, reserved, resting)
        problems += [] if problem is None else [problem]
    return problems


def host_problems(config: DracoConfig, shape: ModelShape) -> list[str]:
    """Why a run does not fit into this machine's memory, and what to change."""
    needed, has = host_bytes(config, shape), memory_bytes()
    if needed <= has:
        return []
    largest = max(_host_items(config, shape), key=lambda item: item.bytes)
    found = (
        f"engines, learner and Ray may need {needed / GIB:.1f} GiB of memory, but this machine has {has / GIB:.1f} "
        f"GiB; the largest item is {largest.name} ({_size(largest.bytes)})"
    )
    if host_bytes(_changed(config, gradient_checkpointing=True), shape) <= has:
        return [f"{found}: set learner.gradient_checkpointing=true"]
    return [f"{found}: change {largest.keys}, or use a machine with more memory"]


def host_bytes(config: DracoConfig, shape: ModelShape) -> int:
    """Bytes of this machine's memory that a run may need: CPU computation, Ray and its processes."""
    return PROCESSES_BYTES + total(_host_items(config, shape))


def _host_items(config: DracoConfig, shape: ModelShape) -> list[MemoryItem]:
    """Memory of this machine by kind, over all engines and learner workers; without Ray's processes."""
    learner, engine = config.learner, config.engine
    items = [MemoryItem("Ray's object store", (config.ray.object_store_mib or 0) << 20, "ray.object_store_mib")]
    if learner.gpus_per_worker == 0:
        items += [_times(learner.workers, item) for item in learner_memory(config, shape).peak_items]
    if engine.gpus_per_engine == 0:
        memory = engine_memory(config, shape, 0, 0)
        cache = MemoryItem("KV cache", memory.kv_cache, "engine.kv_cache_gib")
        items += [_times(engine.engines, item) for item in (*memory.items, cache)]
    return items


def _times(number: int, item: MemoryItem) -> MemoryItem:
    return replace(item, bytes=number * item.bytes)


def _print_gpus(config: DracoConfig) -> None:
    """Print the total number of GPUs, if the judge's servers need some."""
    engine, learner, local = config.engine, config.learner, config.judge.local
    if not local.enabled or config.algorithm.reward != "rubric":
        return
    own = engine.engines * engine.gpus_per_engine + learner.workers * learner.gpus_per_worker
    most = max(local.replicas, local.max_replicas)
    console.print(
        f"judge {config.judge.model}: {local.replicas} to {most} vLLM servers of {local.gpus_per_replica:g} GPUs "
        f"each; with engines and learner {own + local.replicas * local.gpus_per_replica:g} to "
        f"{own + most * local.gpus_per_replica:g} GPUs in total",
    )


def learner_problem(
    config: DracoConfig, shape: ModelShape, memory: LearnerMemory, room: int, gpu_memory_gib: float
) -> str:
    """Why a learner worker does not fit, and the first change that helps."""
    largest = max(memory.peak_items, key=lambda item: item.bytes)
    found = (
        f"a learner worker needs {_size(memory.peak)}, but a GPU of {gpu_memory_gib:g} GiB has {_size(room)} for it; "
        f"the largest item is {largest.name} ({_size(largest.bytes)})"
    )
    tokens = _largest_fitting(config, shape, room)
    for change, changed in _changes(config, shape, tokens):
        if learner_memory(changed, shape).peak <= room:
            return f"{found}: set {change}"
    return (
        f"{found}: change {largest.keys}, or use GPUs with more memory (--gpu-memory-gib); a micro-batch has "
        f"{memory.tokens:,} tokens, and {tokens:,} would fit"
    )


def _changes(config: DracoConfig, shape: ModelShape, tokens: int) -> Iterator[tuple[str, DracoConfig]]:
    """Changes that make a learner worker smaller, cheapest first; ``tokens``: a micro-batch that would fit."""
    learner = config.learner
    yield "learner.gradient_checkpointing=true", _changed(config, gradient_checkpointing=True)
    yield "model.dtype=bfloat16", _changed(config, "model", dtype="bfloat16")
    yield "learner.sharding=full", _changed(config, sharding="full")
    chunk = LearnerConfig().logprob_chunk_tokens
    yield f"learner.logprob_chunk_tokens={chunk}", _changed(config, logprob_chunk_tokens=chunk)
    if tokens >= sequence_tokens(config):
        yield f"learner.micro_batch_tokens={tokens}", _changed(config, micro_batch_tokens=tokens)
    for sharing in range(learner.context_parallel + 1, learner.workers + 1):
        if not any(number % sharing for number in (learner.workers, *_heads(shape).values())):
            yield f"learner.context_parallel={sharing}", _changed(config, context_parallel=sharing)
    for workers in range(learner.workers + 1, MOST_WORKERS + 1):
        change = f"learner.sharding=full and learner.workers={workers}"
        yield change, _changed(config, sharding="full", workers=workers)


def engine_problem(config: DracoConfig, memory: EngineMemory, gpu_memory_gib: float) -> str:
    """Why an engine cannot hold one sequence, and what to change."""
    largest = max(memory.items, key=lambda item: item.bytes)
    engine = config.engine
    has = (
        f"an engine has {_size(max(0, memory.kv_cache))} for its KV cache, but one sequence of {memory.length:,} "
        "tokens "
    )
    needs = f"{has}needs {_size(memory.sequence)}"
    if engine.kv_cache_gib is not None or engine.gpus_per_engine == 0:
        return f"{needs}: raise engine.kv_cache_gib to {math.ceil(10 * memory.sequence / GIB) / 10:g}"
    verb = "raise" if largest.keys == "engine.tensor_parallel" else "lower"
    return (
        f"{needs}; the engine may use {_size(memory.limit)} of a GPU of {gpu_memory_gib:g} GiB, and the largest item "
        f"is {largest.name} ({_size(largest.bytes)}): {verb} {largest.keys}, or raise engine.gpu_memory_utilization "
        f"({engine.gpu_memory_utilization:g})"
    )


def gpu_sharing_problem(
    config: DracoConfig, shape: ModelShape, memory: EngineMemory, gpu: int, reserved: int, resting: int
) -> str | None:
    """Why an engine does not fit on a GPU that it shares with other processes, and what to change; None if it fits.

    Args:
        gpu: memory of the GPU, bytes.
        reserved: the part of it for one process's CUDA context, bytes.
        resting: memory that a learner worker keeps while the engines are awake, bytes.
    """
    engine = config.engine
    if engine.colocate:
        left, beside = gpu - resting, f"an idle learner worker keeps {_size(resting)}"
    elif engine.gpus_per_engine < 1:
        left, beside = int(gpu * engine.gpus_per_engine), f"engine.gpus_per_engine={engine.gpus_per_engine:g}"
    else:
        left, beside = gpu, "nothing else uses the GPU"
    if memory.limit <= left:
        return None
    found = f"an engine needs {_size(memory.limit)} of a GPU of {_size(gpu)}, but has {_size(max(0, left))}: {beside}"
    cache = math.floor(10 * (left - total(memory.items)) / GIB) / 10
    if engine.kv_cache_gib is not None and cache < engine.kv_cache_gib and cache * GIB >= memory.sequence:
        return f"{found}; lower engine.kv_cache_gib ({engine.kv_cache_gib:g}) to {cache:g}"
    fitting = max(0, math.floor(100 * left / gpu)) / 100
    fits = engine_memory(_changed(config, "engine", gpu_memory_utilization=fitting), shape, gpu, reserved)
    if fits.sequences >= 1 and fits.limit <= left:
        return f"{found}; lower engine.gpu_memory_utilization ({engine.gpu_memory_utilization:g}) to {fitting:g}"
    fewer = "set learner.sharding=full, or use " if engine.colocate and not is_sharded(config) else "use "
    return f"{found}, which is too little for one sequence; {fewer}GPUs with more memory (--gpu-memory-gib)"


def _changed(config: DracoConfig, section: str = "learner", **values: object) -> DracoConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _largest_fitting(config: DracoConfig, shape: ModelShape, room: int) -> int:
    """Tokens of the largest micro-batch that fits; 0 if none does."""
    low, high = 0, learner_memory(config, shape).tokens
    while learner_memory(config, shape, high).peak <= room and high < MOST_TOKENS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if learner_memory(config, shape, middle).peak <= room else (low, middle)
    return low


def _heads(shape: ModelShape) -> dict[str, int]:
    """Numbers of heads under the ``config.json`` keys that `check_heads` reads."""
    delta = {} if shape.delta is None else {"linear_num_value_heads": shape.delta.value_heads}
    return {"num_attention_heads": shape.heads} | delta


def _print_model(config: DracoConfig, shape: ModelShape) -> None:
    learner = config.learner
    adapter = shape.adapter_parameters(learner.lora_target, learner.lora_rank)
    linear = shape.count("linear_attention")
    mixers = f" ({linear} gated delta-net)" if linear else ""
    experts, active = shape.experts, ""
    if experts is not None:
        active = f", {shape.active_parameters:,} of them active ({experts.active} of {experts.number} experts),"
    console.print(
        f"{config.model.path}: {shape.parameters:,} parameters{active} in {len(shape.order)} layers{mixers}; adapter "
        f"of rank {learner.lora_rank}: {adapter:,}"
    )


def _print_learner(config: DracoConfig, shape: ModelShape, memory: LearnerMemory, room: int | None) -> None:
    learner = config.learner
    where = "GPU" if room is not None else "CPU process"
    held = f"1/{learner.workers} of the base model" if is_sharded(config) else "the whole base model"
    console.print(
        f"\nlearner: {counted(learner.workers, 'worker')}, each with {held}; per {where}, "
        f"{memory.tokens:,} tokens in the largest micro-batch"
    )
    if learner.context_parallel > 1:
        console.print(
            f"{learner.context_parallel} workers share each micro-batch, {memory.part:,} tokens each; in its forward "
            f"pass each worker sends {_size(exchanged_bytes(config, shape, memory.tokens))} to the others"
        )
    items = dict.fromkeys((*memory.resident, *memory.forward, *memory.backward, *memory.update))
    rows = [(item.name, _size(item.bytes)) for item in items]
    rows.append((f"peak, {MOMENTS[memory.moment]}", _size(memory.peak)))
    if room is not None:
        rows.append(("available", _size(room)))
        rows.append(("tokens of a micro-batch that would fit", f"{_largest_fitting(config, shape, room):,}"))
    rows += [("in host memory", _size(total(memory.host)))] * bool(memory.host)
    _print_table(rows)


def _print_engine(config: DracoConfig, memory: EngineMemory) -> None:
    engine = config.engine
    where = "GPU" if engine.gpus_per_engine > 0 else "CPU process"
    console.print(f"\nengines: {engine.engines}, tensor parallel size {engine.tensor_parallel}; memory per {where}:")
    rows = [(item.name, _size(item.bytes)) for item in memory.items]
    cache = (
        f"KV cache: {counted(memory.sequences, 'sequence')} of {memory.length:,} tokens, {_size(memory.sequence)} each"
    )
    rows.append((cache, _size(max(0, memory.kv_cache))))
    _print_table(rows + [("available", _size(memory.limit))] * (engine.gpus_per_engine > 0))


def _print_time(config: DracoConfig, shape: ModelShape, engine: EngineMemory, given: Assumptions) -> None:
    time = step_time(config, shape, engine, given)
    rollouts = config.train.prompts_per_step * config.algorithm.group_size
    tokens = given.length_share * sequence_tokens(config)
    console.print(
        f"\ntime of a step, without environments and judge: {rollouts} rollouts of {tokens:,.0f} tokens on average"
    )
    speed = f"{time.concurrent} concurrent rollouts, {time.decode_tokens_per_second:,.0f} tokens/s per engine"
    rows = [(f"generation: {speed}", f"{time.generation:,.0f} s")]
    rows.append((f"learning: {time.learner_tokens_per_second:,.0f} tokens/s per worker", f"{time.learning:,.0f} s"))
    rows.append(("sync", f"{time.sync:,.1f} s"))
    # With colocated engines nothing overlaps; with staleness, generation and learning always overlap.
    if not config.engine.colocate:
        rows.append(("step, if learning overlaps generation", f"{time.hidden:,.0f} s"))
    if not config.train.staleness:
        rows.append(("step, without overlap", f"{time.serial:,.0f} s"))
    _print_table(rows)
    assumed = ", ".join(f"{key}={value:g}" for key, value in given.model_dump().items())
    console.print(f"assumed, not measured: {assumed}")


def _print_table(rows: Iterable[tuple[str, str]]) -> None:
    table = Table("", Column(justify="right"), box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / (1 << 20):.2f} MiB"

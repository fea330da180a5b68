"""Duration of a training step, estimated from stated throughput assumptions. Formulas: docs/planning.md."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field, ValidationError

from draco_ray.config.schema import ConfigSection, DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.lab.planning.memory import (
    DTYPE_BYTES,
    FLOAT32_BYTES,
    GIB,
    EngineMemory,
    kv_bytes,
    kv_element_bytes,
    recurrent_state_bytes,
)
from draco_ray.lab.planning.model_shape import ModelShape


class Assumptions(ConfigSection):
    """Assumptions of a plan. None of them was measured with this code on the assumed hardware."""

    gpu_tflops: float = Field(989.0, gt=0)
    """Peak dense bf16 TFLOPS of one GPU; the default is from the data sheets of the H100 and H200."""
    gpu_gb_per_second: float = Field(3350.0, gt=0)
    """Memory bandwidth of one GPU, GB/s; the default is from the H100's data sheet."""
    learner_efficiency: float = Field(0.35, gt=0, le=1)
    """Model FLOPs utilization of the learner."""
    prefill_efficiency: float = Field(0.4, gt=0, le=1)
    """Share of the peak that an engine reaches on prompts and tool output."""
    decode_efficiency: float = Field(0.6, gt=0, le=1)
    """Share of the bandwidth, and of the peak, that an engine reaches while it generates."""
    sync_gib_per_second: float = Field(1.0, gt=0)
    """Speed of copying, writing and reading an adapter, GiB/s."""
    length_share: float = Field(0.5, gt=0, le=1)
    """Mean trajectory length, of prompt and response together, as a share of the longest allowed."""
    sampled_share: float = Field(0.5, gt=0, le=1)
    """Share of a trajectory's tokens that are sampled; the others are prompt and tool output."""
    reserved_gib: float = Field(2.0, ge=0)
    """GiB of each GPU for the CUDA context, libraries, graphs and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of the parts of one training step."""

    generation: float
    """Seconds in which the engines decode and prefill. Environments and judge are not included."""
    learning: float
    sync: float
    concurrent: int
    """Rollouts that one engine generates at one time."""
    decode_tokens_per_second: float
    """Tokens per second of one engine."""
    learner_tokens_per_second: float
    """Tokens per second of one learner worker."""

    @property
    def hidden(self) -> float:
        """Seconds of a step with learning and generation fully overlapped: the lower bound."""
        return max(self.generation, self.learning) + self.sync

    @property
    def serial(self) -> float:
        """Seconds of a step without overlap."""
        return self.generation + self.learning + self.sync


def assumptions(overrides: Iterable[str]) -> Assumptions:
    """The default assumptions with ``key=value`` overrides.

    Raises: ConfigError: unknown key, or a value out of range.
    """
    values: dict[str, str] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or key not in Assumptions.model_fields:
            raise ConfigError(
                f"--assume {override}: expected KEY=VALUE with one of {', '.join(Assumptions.model_fields)}"
            )
        values[key] = value
    try:
        return Assumptions.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"--assume {problem['loc'][0]}: {problem['msg']}, found {problem['input']!r}") from None


def step_time(config: DracoConfig, shape: ModelShape, engine: EngineMemory, given: Assumptions) -> StepTime:
    """Expected time of a step of this configuration; `engine` must have room for at least one sequence."""
    rollouts = config.train.prompts_per_step * config.algorithm.group_size
    length = given.length_share * (config.agent.max_prompt_length + config.agent.max_response_length)
    flops = given.gpu_tflops * 1e12
    per_engine = math.ceil(min(rollouts, config.environment.slots) / config.engine.engines)
    # Use the length of rollouts: `engine.length` may be that of a self-judge's longer prompts.
    held = int(engine.kv_cache // max(1.0, engine.sequence * length / engine.length))
    concurrent = max(1, min(per_engine, config.engine.max_num_seqs, held))
    parallel = config.engine.tensor_parallel
    decode = _decode_seconds(config, shape, given, concurrent=concurrent, length=length)
    waves = max(1.0, rollouts / (config.engine.engines * concurrent))
    forward = 2 * (shape.matrix_parameters + shape.vocabulary * shape.hidden)
    prefill = (1 - given.sampled_share) * length * forward / (parallel * flops * given.prefill_efficiency)
    generation = waves * given.sampled_share * length * decode + rollouts / config.engine.engines * prefill
    learner = learner_flops(config, shape, length=length, sampled_share=given.sampled_share)
    seconds = learner / (flops * given.learner_efficiency)
    adapter = shape.adapter_parameters(config.learner.lora_target, config.learner.lora_rank) * FLOAT32_BYTES
    return StepTime(
        generation=generation,
        learning=rollouts * seconds / config.learner.workers,
        # The adapter is copied three times: from the learner, to a file of each engine, and into the engine.
        sync=3 * adapter / GIB / given.sync_gib_per_second,
        concurrent=concurrent,
        decode_tokens_per_second=concurrent / decode,
        learner_tokens_per_second=length / seconds,
    )


def learner_flops(config: DracoConfig, shape: ModelShape, *, length: float, sampled_share: float) -> float:
    """Floating-point operations that one trajectory costs the learner.

    Args:
        length: tokens of the trajectory.
        sampled_share: share of the tokens whose log-probs are computed.
    """
    learner = config.learner
    reference = 1 if learner.kl_coefficient > 0 else 0
    recompute = 0 if learner.gradient_checkpointing is False else 1
    prompts = config.train.prompts_per_step
    # Old log-probs are computed for every minibatch but the first.
    remembered = max(0, prompts - learner.minibatch_prompts) / prompts
    # The base is frozen: its backward computes only the gradient of the activations, at the cost of a forward.
    matrices = 2 * shape.matrix_parameters * (2 + reference + recompute + remembered)
    full = shape.count("full_attention")
    # Scores and their product with the values, over the half that is not masked; the backward costs two forwards.
    attention = 2 * length * shape.queries * full * (3 + reference + recompute + remembered)
    # The training pass also computes the gradient of the hidden states.
    head = 2 * shape.vocabulary * shape.hidden * sampled_share * (2 + reference + remembered)
    return length * (matrices + attention + head)


def _decode_seconds(
    config: DracoConfig, shape: ModelShape, given: Assumptions, *, concurrent: int, length: float
) -> float:
    """Seconds to decode one token of each of `concurrent` sequences, which are on average half their final length."""
    parallel, width = config.engine.tensor_parallel, DTYPE_BYTES[config.model.dtype]
    head = shape.vocabulary * shape.hidden
    read = shape.read_parameters(concurrent) + head
    cache = length / 2 * kv_bytes(shape, parallel, kv_element_bytes(config)) + 2 * recurrent_state_bytes(
        shape, parallel, width
    )
    moved = (read * width / parallel + concurrent * cache) / (given.gpu_gb_per_second * 1e9)
    computed = concurrent * 2 * (shape.matrix_parameters + head) / parallel / (given.gpu_tflops * 1e12)
    return max(moved, computed) / given.decode_efficiency

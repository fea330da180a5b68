"""vLLM arguments that `engine.vllm` may not set, and the keys to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LENGTH = "agent.max_prompt_length and agent.max_response_length"
_SPLIT = "engine.tensor_parallel and engine.engines"
RESERVED_ARGUMENTS = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": _LENGTH,
    "max_num_seqs": "engine.max_num_seqs",
    "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "engine.kv_cache_gib",
    "enable_sleep_mode": "engine.colocate",
    "max_lora_rank": "learner.lora_rank",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": _SPLIT,
    "prefill_context_parallel_size": _SPLIT,
    "data_parallel_size": _SPLIT,
    "data_parallel_size_local": _SPLIT,
    "nnodes": _SPLIT,
    "logits_processors": "engine.temperature, engine.top_p and engine.top_k",
}
"""vLLM's name -> the key to use instead."""
FIXED_ARGUMENTS = (
    *("enable_lora", "max_loras", "logprobs_mode", "skip_tokenizer_init", "tokens_only", "runner", "convert"),
    *("language_model_only", "distributed_executor_backend", "disable_log_stats", "use_tqdm_on_load"),
)
"""Arguments that engines depend on: adapters, recorded log-probs, token input and output."""
FIXED_ON_CPU = ("worker_cls", "enable_chunked_prefill", "max_num_batched_tokens")
"""Arguments that the CPU worker depends on: it needs unchunked prompts."""


def argument_problem(arguments: Mapping[str, Any], *, cpu: bool) -> str | None:
    """Why these arguments cannot be used; None if they can.

    Unknown names are detected when the engine starts (`draco_ray.engine.vllm_engine`).

    Args:
        arguments: of vLLM's AsyncEngineArgs, by name.
        cpu: whether the engine runs on the CPU.
    """
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            return f"{name} cannot be set here; set {RESERVED_ARGUMENTS[name]} instead"
        if name in FIXED_ARGUMENTS or (cpu and name in FIXED_ON_CPU):
            where = "" if name in FIXED_ARGUMENTS else " on the CPU"
            return f"{name} cannot be changed{where}, because the engine depends on its value; leave it out"
    speculative = arguments.get("speculative_config")
    if isinstance(speculative, Mapping) and speculative.get("rejection_sample_method") == "synthetic":
        return "speculative_config.rejection_sample_method=synthetic does not sample from the policy; leave it out"
    return None

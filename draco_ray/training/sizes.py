"""Checks of the model's context length and this machine's memory that need no Ray, for `draco plan`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from draco_ray.config.machine import memory_bytes
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.model_config import language_config
from draco_ray.judging.judge_context import context_problem

PROCESSES_BYTES = 5 << 30
"""Memory of a run's processes without weights, caches and activations, in bytes: the demo's peak is 6 GiB."""


def ray_address(config: DracoConfig) -> str | None:
    """Return the address of the cluster to join; None: this process starts Ray itself."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


def context_problems(config: DracoConfig, positions: int | None) -> list[str]:
    """Which lengths exceed the model's context of ``positions`` tokens (None if unknown), and what to set instead."""
    agent, problems = config.agent, []
    tokens = agent.max_prompt_length + agent.max_response_length
    if positions is not None and tokens > positions and "hf_overrides" not in config.engine.vllm:
        prompt = min(agent.max_prompt_length, positions // 2)
        shorter = f"agent.max_response_length={positions - prompt}"
        if prompt < agent.max_prompt_length:
            shorter = f"agent.max_prompt_length={prompt} and {shorter}"
        problems.append(
            f"agent.max_prompt_length + agent.max_response_length = {tokens:,} tokens, but {config.model.path} "
            f"accepts {positions:,}; set {shorter}, or choose a model with a longer context"
        )
    if (problem := context_problem(config, positions)) is not None:
        problems.append(problem)
    return problems


def with_gradient_checkpointing(config: DracoConfig) -> DracoConfig:
    """The configuration with ``learner.gradient_checkpointing`` decided."""
    if config.learner.gradient_checkpointing is not None:
        return config
    return config.updated(learner={"gradient_checkpointing": not keeps_activations(config)})


def keeps_activations(config: DracoConfig) -> bool:
    """Whether a learner on the CPU has memory for all activations.

    Activations may take at most half of the memory that is free now, and at most a third of what the machine has beyond
    a run's processes, because weights and caches take the rest. The size is estimated from ``config.json`` for a dense
    decoder; False if the file lacks the needed sizes.
    """
    learner, agent = config.learner, config.agent
    if learner.gpus_per_worker > 0:
        return False
    try:
        text = language_config(json.loads((Path(config.model.path).expanduser() / "config.json").read_bytes()))
        hidden, mlp, heads = (int(text[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        size = int(text.get("head_dim") or hidden // heads)
        queries, keys = heads * size, int(text.get("num_key_value_heads") or heads) * size
        # The inputs of all linear layers, three tensors of the MLP, and what attention keeps.
        layer = (5 * hidden + queries + mlp) + 3 * mlp + 3 * queries + 4 * keys
        elements = int(text["num_hidden_layers"]) * layer
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return False
    tokens = max(learner.micro_batch_tokens, agent.max_prompt_length + agent.max_response_length)
    needed = learner.workers * tokens * elements * (2 if config.model.dtype == "bfloat16" else 4)
    return needed <= min(psutil.virtual_memory().available / 2, (memory_bytes() - PROCESSES_BYTES) / 3)

"""Whether a run's sequences fit into the model's context. Without Ray, for `draco plan`."""

from __future__ import annotations

from draco_ray.config.schema import DracoConfig
from draco_ray.judging.judge_context import context_problem


def context_problems(config: DracoConfig, positions: int | None) -> list[str]:
    """What is longer than the model's context of ``positions`` tokens (None: not known), and what to set instead."""
    agent, problems = config.agent, []
    tokens = agent.max_prompt_length + agent.max_response_length
    if positions is not None and tokens > positions and "hf_overrides" not in config.engine.vllm:
        prompt = min(agent.max_prompt_length, positions // 2)
        shorter = f"agent.max_response_length={positions - prompt}"
        if prompt < agent.max_prompt_length:
            shorter = f"agent.max_prompt_length={prompt} and {shorter}"
        problems.append(
            f"agent.max_prompt_length + agent.max_response_length = {tokens:,} tokens, but {config.model.path} accepts "
            f"{positions:,}: set {shorter}, or choose a model with a longer context"
        )
    if (problem := context_problem(config, positions)) is not None:
        problems.append(problem)
    return problems

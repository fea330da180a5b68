"""Step credit as an algorithm of prime-rl.

prime-rl has no configuration entry for algorithms outside its repository yet: examples/trainers/prime_rl has a patch
that adds one. With the patch, configure prime-rl as follows:

    [orchestrator.algo]
    type = "custom"
    import_path = "draco_ray.adapters.prime_rl.StepCreditAlgorithm"
    kwargs = { model = "openai/gpt-5.4", budget = 50.0 }

The judge's reward is added to each trace as ``draco``. prime-rl's own GRPO (length penalty included) computes an
advantage from each trace's reward, which is spread over the sampled tokens of each step. A trace that could not be
judged gets advantage 0 and counts in no baseline.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prime_rl.orchestrator.algo.base import iter_trainable_traces
from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
from prime_rl.orchestrator.algo.routing import assign_advantages

from draco_ray.adapters.conversations import Judging
from draco_ray.adapters.verifiers import judge_traces, spread_advantage


class StepCreditAlgorithm(GRPOAlgorithm):
    """GRPO with step credit."""

    def __init__(self, config: Any, policy_pool: Any) -> None:
        super().__init__(config, policy_pool)
        self._judging = Judging(**config.kwargs).by_papers_rule()

    async def score_group(self, episodes: list[Any]) -> None:
        """Judge a group, let GRPO score it, and spread each trace's advantage."""
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        judged = await judge_traces(traces, self._judging)
        scored = [(trace, each) for trace, each in zip(traces, judged, strict=True) if each is not None]
        for trace in traces:
            assign_advantages(trace, 0.0)
        if scored:
            await super().score_group([SimpleNamespace(traces=[trace for trace, _ in scored])])
        for trace, each in scored:
            spread_advantage(trace, each.quality, each.acted)

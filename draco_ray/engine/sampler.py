"""What the agent loop sees of an engine: samples and statistics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any, Protocol

from draco_ray.engine.tool_calls import ToolUse

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EngineStatistics:
    """Figures of one engine process: the first three as of now, the others since it was started."""

    running: int = 0
    """Requests in the batch."""
    waiting: int = 0
    """Requests that wait for a place in it."""
    kv_cache: float = 0.0
    """Share of the KV cache that is taken."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Of prompts, those that the prefix cache had included."""
    preemptions: int = 0
    """Requests that lost their place to others for want of KV cache, and are computed anew."""
    iterations: int = 0
    """That vLLM has reported: none while requests wait is an engine that stands still."""

    def take(self, scheduler: Any, iteration: Any) -> None:
        """Take in ``SchedulerStats`` and ``IterationStats`` of one iteration; either may be None."""
        if scheduler is not None:
            self.running, self.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            self.kv_cache = scheduler.kv_cache_usage
        if iteration is not None:
            self.sampled_tokens += iteration.num_generation_tokens
            self.prompt_tokens += iteration.num_prompt_tokens
            self.preemptions += iteration.num_preempted_reqs


def collector(into: EngineStatistics) -> type:
    """A class for vLLM's ``stat_loggers`` whose one instance fills ``into``."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Collector(PrometheusStatLogger):
        """Stands where vLLM would keep 40 Prometheus metrics of its own, which nobody scrapes in an actor."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self._told = False

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            into.iterations += 1
            try:
                into.take(scheduler_stats, iteration_stats)
            except Exception:
                # Raised here it would end the engine. vLLM may rename what it counts.
                if not self._told:
                    log.exception("vLLM's statistics cannot be read")
                self._told = True

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return Collector


def growth(before: EngineStatistics, now: EngineStatistics, name: str) -> int:
    """By how much a count has grown; an engine that was replaced counts from zero."""
    assert name in {field.name for field in fields(EngineStatistics)}
    old, new = getattr(before, name), getattr(now, name)
    return int(new - old if new >= old else new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled continuation: token-out."""

    token_ids: list[int]
    """What was sampled, the end-of-turn token included when it was reached."""
    logprobs: list[float]
    """Natural-log probability of each sampled token under the sampling policy."""
    finish_reason: str
    """``stop`` when the end-of-turn token was sampled, ``length`` when the limit cut it."""
    policy_version: int


class Sampler(Protocol):
    """Token-in, token-out sampling; an episode stays on one sampler."""

    @property
    def name(self) -> str:
        """Identity of the engine, recorded with the trajectory."""
        ...

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        """Continue ``token_ids`` by at most ``max_tokens`` tokens with the current adapter."""
        ...

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ToolUse | None:
        """What a turn asks for (`draco_ray.engine.tool_calls.ToolCallReader.read`).

        It is read where vLLM is loaded anyway: its parsers take ten seconds and 600 MiB to import.

        Args:
            text: the turn as sampled.
            tools: a JSON array of function schemas.
            parser: ``agent.tool_parser``.
            thinking: ``agent.thinking``.

        Raises: ConfigError where the model's calls cannot be read.
        """
        ...

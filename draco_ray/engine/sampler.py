"""The engine's interface for the agent loop: samples and statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from draco_ray.engine.tool_calls import ParsedToolCalls


@dataclass(slots=True, kw_only=True)
class EngineStatistics:
    """Statistics of one engine process: the first three are current values, the others are counts since its start."""

    running: int = 0
    """Requests in the batch."""
    waiting: int = 0
    """Requests that wait to enter the batch."""
    kv_cache: float = 0.0
    """Share of the KV cache that is in use."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens of prompts, including those from the prefix cache."""
    preemptions: int = 0
    """Requests that were preempted for lack of KV cache, and recomputed."""
    iterations: int = 0
    """Iterations that vLLM has reported; if the number does not grow while requests wait, the engine has stalled."""

    def take(self, scheduler: Any, iteration: Any) -> None:
        """Add vLLM's ``SchedulerStats`` and ``IterationStats`` of one iteration; either may be None."""
        if scheduler is not None:
            self.running, self.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            self.kv_cache = scheduler.kv_cache_usage
        if iteration is not None:
            self.sampled_tokens += iteration.num_generation_tokens
            self.prompt_tokens += iteration.num_prompt_tokens
            self.preemptions += iteration.num_preempted_reqs


def make_stat_logger_class(into: EngineStatistics) -> type:
    """A class for vLLM's ``stat_loggers`` that adds to ``into``."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Collector(PrometheusStatLogger):
        """Replaces vLLM's 40 Prometheus metrics, which nobody scrapes in an actor."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            into.iterations += 1
            into.take(scheduler_stats, iteration_stats)

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return Collector


def growth(before: EngineStatistics, now: EngineStatistics, name: str) -> int:
    """The increase of a counter; a replaced engine counts from zero again."""
    old, new = getattr(before, name), getattr(now, name)
    return int(new - old if new >= old else new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled continuation."""

    token_ids: list[int]
    """Sampled token ids, including the end-of-turn token if it was sampled."""
    logprobs: list[float]
    """Natural-log probability of each sampled token under the sampling policy."""
    finish_reason: str
    """``stop`` if the end-of-turn token was sampled, ``length`` if a limit was reached."""
    policy_version: int

    def cut(self, length: int) -> Sample:
        """A sample of the first ``length`` tokens, as if the turn ended there."""
        ids, logprobs = self.token_ids[:length], self.logprobs[:length]
        return replace(self, token_ids=ids, logprobs=logprobs, finish_reason="stop")


class Sampler(Protocol):
    """Token-in, token-out sampling; an episode stays on one sampler."""

    @property
    def name(self) -> str:
        """Identity of the engine, recorded with the trajectory."""
        ...

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        """Continue ``token_ids`` by at most ``max_tokens`` tokens with the current adapter."""
        ...

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ParsedToolCalls | None:
        """Parse the tool calls of a turn (`draco_ray.engine.tool_calls.ToolCallReader.read`).

        This runs in the engine's process, because vLLM's parsers take ten seconds and 600 MiB to import.

        Args:
            text: the turn as sampled.
            tools: a JSON array of function schemas.
            parser: ``agent.tool_parser``.
            thinking: ``agent.thinking``.

        Raises: ConfigError if the model's calls cannot be parsed.
        """
        ...

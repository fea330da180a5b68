"""All metrics of a run: `metrics` records them, Prometheus scrapes them, and the dashboard shows them.

Ray adds the prefix ``ray_``. Counters end in ``_total``, which Prometheus would add otherwise. Every metric has the tag
``run``; rates are in [0, 1], times in seconds, costs in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RAY_PREFIX = "ray_"

LATENCY_SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0]
"""Bucket bounds of latencies, from milliseconds (a cached judge reply) to almost an hour (a long rollout)."""


class Kind(StrEnum):
    """Prometheus' type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; ``tags`` excludes ``run``, which every metric has."""

    name: str
    kind: Kind
    description: str
    tags: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the metric's time series in Prometheus."""
        exported = RAY_PREFIX + self.name
        if self.kind is Kind.HISTOGRAM:
            return (f"{exported}_bucket", f"{exported}_sum", f"{exported}_count")
        return (exported,)


def _gauge(name: str, description: str, tags: tuple[str, ...] = ()) -> Metric:
    return Metric(name, Kind.GAUGE, description, tags)


def _counter(name: str, description: str, tags: tuple[str, ...] = ()) -> Metric:
    return Metric(name, Kind.COUNTER, description, tags)


# Queues, read from the pools every few seconds.
ROLLOUTS_WAITING = _gauge("draco_rollouts_waiting", "Rollouts that wait for an environment slot.")
ROLLOUTS_IN_FLIGHT = _gauge("draco_rollouts_in_flight", "Rollouts that hold an environment slot.")
JUDGE_IN_FLIGHT = _gauge("draco_judge_phases_in_flight", "Judge phases handed to judge workers.")
JUDGE_WAITING = _gauge("draco_judge_phases_waiting", "Judge phases that wait for a judge worker with a free slot.")
JUDGE_WORKERS_UP = _gauge("draco_judge_workers_up", "Judge workers that answer.")
JUDGE_WORKERS_WANTED = _gauge(
    "draco_judge_workers_wanted", "Judge workers needed for all phases, within the configured minimum and maximum."
)

# vLLM's statistics of each engine, read every few seconds.
ENGINE_RUNNING = _gauge("draco_engine_requests_running", "Requests in an engine's batch.", ("engine",))
ENGINE_WAITING = _gauge("draco_engine_requests_waiting", "Requests that wait in an engine.", ("engine",))
ENGINE_KV_CACHE = _gauge("draco_engine_kv_cache_share", "Share of KV cache in use.", ("engine",))
ENGINE_SAMPLED = _counter("draco_engine_sampled_tokens_total", "Tokens an engine sampled.", ("engine",))
ENGINE_PROMPTS = _counter("draco_engine_prompt_tokens_total", "Prompt tokens, including cached tokens.", ("engine",))
ENGINE_PREEMPTIONS = _counter(
    "draco_engine_preemptions_total", "Requests recomputed for lack of KV cache.", ("engine",)
)
ENGINES_UP = _gauge("draco_engines_up", "Engines that serve the current weights.")
ENGINES_REPLACED = _gauge("draco_engine_replacements", "Engine processes that died and were replaced.")
RUN_DOLLARS = _gauge("draco_run_dollars", "Dollars of judging of the whole run, including before it was resumed.")

# Events, recorded as they happen.
ROLLOUTS = _counter("draco_rollouts_total", "Finished rollouts by how they ended.", ("ended",))
ROLLOUT_SECONDS = Metric("draco_rollout_seconds", Kind.HISTOGRAM, "Duration of a finished rollout.")
SAMPLED_TOKENS = _counter("draco_sampled_tokens_total", "Tokens the policy sampled.")
JUDGE_PHASES = _counter(
    "draco_judge_phases_total", "Finished judge phases; outcome is ok or failed.", ("phase", "outcome")
)
JUDGE_SECONDS = Metric("draco_judge_phase_seconds", Kind.HISTOGRAM, "Duration of a judge phase.", ("phase",))
JUDGE_REQUESTS = _counter("draco_judge_requests_total", "Requests sent to the judge, including retries.", ("phase",))
JUDGE_TOKENS = _counter(
    "draco_judge_tokens_total", "Judge tokens; kind is input, cached_input or output.", ("phase", "kind")
)
JUDGE_DOLLARS = _counter("draco_judge_dollars_total", "Dollars this process spent on judging.", ("phase",))

EVENT_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics but `STEP_GAUGES`: of queues, of engines, and of events."""

STEP_GAUGES = {
    "step": _gauge("draco_step", "Finished training steps."),
    "reward": _gauge("draco_reward", "Mean reward of the last step."),
    "pass_rate": _gauge("draco_pass_rate", "Share of applicable verdicts that pass."),
    "inert_share": _gauge("draco_inert_share", "Share of rollouts whose credit is the same for every step."),
    "quality_spread": _gauge("draco_quality_spread", "Mean standard deviation of the step quality."),
    "quality_spread_active": _gauge(
        "draco_quality_spread_active",
        "Mean standard deviation of the step quality over rollouts whose credit differs between steps.",
    ),
    "groups_with_signal": _gauge("draco_groups_with_signal", "Groups of the last step with unequal rewards."),
    "groups_failed": _gauge("draco_groups_failed", "Groups of the last step that were dropped."),
    "rollouts_lost": _gauge("draco_rollouts_lost", "Rollouts of the last step that never finished."),
    "rollouts_retried": _gauge("draco_rollouts_retried", "Attempts of the last step retried after a server error."),
    "kl": _gauge("draco_kl", "k3 estimate of the KL divergence from the base model, nats per token."),
    "entropy": _gauge("draco_entropy", "Entropy of the policy, nats per token."),
    "grad_norm": _gauge("draco_grad_norm", "Largest gradient norm of the step, before clipping."),
    "clip_fraction": _gauge("draco_clip_fraction", "Share of tokens whose importance ratio was clipped."),
    "dual_clip_fraction": _gauge(
        "draco_dual_clip_fraction", "Share of tokens whose loss was bounded by the dual clip."
    ),
    "masked_fraction": _gauge(
        "draco_masked_fraction", "Share of tokens masked because engine and learner log-probs differ too much."
    ),
    "engine_k3": _gauge("draco_engine_k3", "k3 estimate of KL(engine || learner), nats per token."),
    "policy_loss": _gauge("draco_policy_loss", "Policy loss of the step."),
    "canary_gap": _gauge("draco_canary_gap", "Mean engine - learner log-prob gap after the sync, nats."),
    "judge_hidden_share": _gauge("draco_judge_hidden_share", "Share of judging time that overlaps generation."),
    "seconds": _gauge("draco_step_seconds", "Duration of the last step."),
    "seconds_generation": _gauge("draco_generation_seconds", "Time in which some rollout ran."),
    "seconds_judging": _gauge("draco_judging_seconds", "Time in which some judge phase ran."),
    "seconds_learning": _gauge("draco_learning_seconds", "Time the driver waited for the learner."),
    "seconds_sync": _gauge(
        "draco_adapter_sync_seconds", "Time for sending the adapter to the engines, canary and checkpoint."
    ),
}
"""Key in ``metrics.jsonl`` -> its gauge, which is set when a step ends unless the value is null."""

CATALOGUE = (*EVENT_METRICS, *STEP_GAUGES.values())

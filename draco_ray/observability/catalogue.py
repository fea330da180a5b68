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


# Queues, read from the pools every few seconds.
ROLLOUTS_WAITING = Metric("draco_rollouts_waiting", Kind.GAUGE, "Rollouts that wait for an environment slot.")
ROLLOUTS_IN_FLIGHT = Metric("draco_rollouts_in_flight", Kind.GAUGE, "Rollouts that hold an environment slot.")
JUDGE_IN_FLIGHT = Metric("draco_judge_phases_in_flight", Kind.GAUGE, "Judge phases handed to judge workers.")
JUDGE_WAITING = Metric(
    "draco_judge_phases_waiting", Kind.GAUGE, "Judge phases that wait for a judge worker with a free slot."
)
JUDGE_WORKERS_UP = Metric("draco_judge_workers_up", Kind.GAUGE, "Judge workers that answer.")
JUDGE_WORKERS_WANTED = Metric(
    "draco_judge_workers_wanted",
    Kind.GAUGE,
    "Judge workers needed for all phases, within the configured minimum and maximum.",
)

# vLLM's statistics of each engine, read every few seconds.
ENGINE_RUNNING = Metric("draco_engine_requests_running", Kind.GAUGE, "Requests in an engine's batch.", ("engine",))
ENGINE_WAITING = Metric("draco_engine_requests_waiting", Kind.GAUGE, "Requests that wait in an engine.", ("engine",))
ENGINE_KV_CACHE = Metric("draco_engine_kv_cache_share", Kind.GAUGE, "Share of KV cache in use.", ("engine",))
ENGINE_SAMPLED = Metric("draco_engine_sampled_tokens_total", Kind.COUNTER, "Tokens an engine sampled.", ("engine",))
ENGINE_PROMPTS = Metric(
    "draco_engine_prompt_tokens_total", Kind.COUNTER, "Prompt tokens, including cached tokens.", ("engine",)
)
ENGINE_PREEMPTIONS = Metric(
    "draco_engine_preemptions_total", Kind.COUNTER, "Requests recomputed for lack of KV cache.", ("engine",)
)
ENGINES_UP = Metric("draco_engines_up", Kind.GAUGE, "Engines that serve the current weights.")
ENGINES_REPLACED = Metric("draco_engine_replacements", Kind.GAUGE, "Engine processes that died and were replaced.")
RUN_DOLLARS = Metric(
    "draco_run_dollars", Kind.GAUGE, "Dollars of judging of the whole run, including before it was resumed."
)

# Events, recorded as they happen.
ROLLOUTS = Metric("draco_rollouts_total", Kind.COUNTER, "Finished rollouts by how they ended.", ("ended",))
ROLLOUT_SECONDS = Metric("draco_rollout_seconds", Kind.HISTOGRAM, "Duration of a finished rollout.")
SAMPLED_TOKENS = Metric("draco_sampled_tokens_total", Kind.COUNTER, "Tokens the policy sampled.")
JUDGE_PHASES = Metric(
    "draco_judge_phases_total", Kind.COUNTER, "Finished judge phases; outcome is ok or failed.", ("phase", "outcome")
)
JUDGE_SECONDS = Metric("draco_judge_phase_seconds", Kind.HISTOGRAM, "Duration of a judge phase.", ("phase",))
JUDGE_REQUESTS = Metric(
    "draco_judge_requests_total", Kind.COUNTER, "Requests sent to the judge, including retries.", ("phase",)
)
JUDGE_TOKENS = Metric(
    "draco_judge_tokens_total", Kind.COUNTER, "Judge tokens; kind is input, cached_input or output.", ("phase", "kind")
)
JUDGE_DOLLARS = Metric("draco_judge_dollars_total", Kind.COUNTER, "Dollars this process spent on judging.", ("phase",))

EVENTS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""The metrics above."""

STEP_GAUGES = {
    "step": Metric("draco_step", Kind.GAUGE, "Finished training steps."),
    "reward": Metric("draco_reward", Kind.GAUGE, "Mean reward of the last step."),
    "pass_rate": Metric("draco_pass_rate", Kind.GAUGE, "Share of applicable verdicts that pass."),
    "inert_share": Metric(
        "draco_inert_share", Kind.GAUGE, "Share of rollouts whose credit is the same for every step."
    ),
    "quality_spread": Metric("draco_quality_spread", Kind.GAUGE, "Mean standard deviation of the step quality."),
    "quality_spread_active": Metric(
        "draco_quality_spread_active",
        Kind.GAUGE,
        "Mean standard deviation of the step quality over rollouts whose credit differs between steps.",
    ),
    "groups_with_signal": Metric(
        "draco_groups_with_signal", Kind.GAUGE, "Groups of the last step with unequal rewards."
    ),
    "groups_failed": Metric("draco_groups_failed", Kind.GAUGE, "Groups of the last step that were dropped."),
    "rollouts_lost": Metric("draco_rollouts_lost", Kind.GAUGE, "Rollouts of the last step that never finished."),
    "rollouts_retried": Metric(
        "draco_rollouts_retried", Kind.GAUGE, "Attempts of the last step retried after a server error."
    ),
    "kl": Metric("draco_kl", Kind.GAUGE, "k3 estimate of the KL divergence from the base model, nats per token."),
    "entropy": Metric("draco_entropy", Kind.GAUGE, "Entropy of the policy, nats per token."),
    "grad_norm": Metric("draco_grad_norm", Kind.GAUGE, "Largest gradient norm of the step, before clipping."),
    "clip_fraction": Metric("draco_clip_fraction", Kind.GAUGE, "Share of tokens whose importance ratio was clipped."),
    "dual_clip_fraction": Metric(
        "draco_dual_clip_fraction", Kind.GAUGE, "Share of tokens whose loss was bounded by the dual clip."
    ),
    "masked_fraction": Metric(
        "draco_masked_fraction",
        Kind.GAUGE,
        "Share of tokens masked because engine and learner log-probs differ too much.",
    ),
    "engine_k3": Metric("draco_engine_k3", Kind.GAUGE, "k3 estimate of KL(engine || learner), nats per token."),
    "policy_loss": Metric("draco_policy_loss", Kind.GAUGE, "Policy loss of the step."),
    "canary_gap": Metric("draco_canary_gap", Kind.GAUGE, "Mean engine - learner log-prob gap after the sync, nats."),
    "judge_hidden_share": Metric(
        "draco_judge_hidden_share", Kind.GAUGE, "Share of judging time that overlaps generation."
    ),
    "seconds": Metric("draco_step_seconds", Kind.GAUGE, "Duration of the last step."),
    "seconds_generation": Metric("draco_generation_seconds", Kind.GAUGE, "Time in which some rollout ran."),
    "seconds_judging": Metric("draco_judging_seconds", Kind.GAUGE, "Time in which some judge phase ran."),
    "seconds_learning": Metric("draco_learning_seconds", Kind.GAUGE, "Time the driver waited for the learner."),
    "seconds_sync": Metric(
        "draco_adapter_sync_seconds", Kind.GAUGE, "Time for sending the adapter to the engines, canary and checkpoint."
    ),
}
"""Key in ``metrics.jsonl`` -> its gauge, which is set when a step ends unless the value is null."""

CATALOGUE = (*EVENTS, *STEP_GAUGES.values())

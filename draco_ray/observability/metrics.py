"""Records the metrics of `catalogue` with ``ray.util.metrics``; they are exported together with Ray's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draco_ray.observability import catalogue
from draco_ray.observability.catalogue import CATALOGUE, LATENCY_SECONDS, STEP_GAUGES, Kind, Metric
from draco_ray.summaries import PhaseSummary, RolloutSummary


class RunMetrics:
    """The metrics of one run, recorded by its driver."""

    def __init__(self, run_name: str) -> None:
        """Create the instruments; needs a connected Ray."""
        from ray.util.metrics import Counter, Gauge, Histogram

        self._tags = {"run": run_name}
        self._instruments: dict[str, Any] = {}
        for metric in CATALOGUE:
            keys = ("run", *metric.tags)
            if metric.kind is Kind.COUNTER:
                instrument: Any = Counter(metric.name, metric.description, keys)
            elif metric.kind is Kind.GAUGE:
                instrument = Gauge(metric.name, metric.description, keys)
            else:
                instrument = Histogram(metric.name, metric.description, LATENCY_SECONDS, keys)
            self._instruments[metric.name] = instrument

    def rollout(self, rollout: RolloutSummary) -> None:
        """Count a finished rollout."""
        self.count(catalogue.ROLLOUTS, 1, ended=rollout.termination.value)
        self.count(catalogue.SAMPLED_TOKENS, rollout.sampled_tokens)
        self._observe(catalogue.ROLLOUT_SECONDS, rollout.ended_at - rollout.started_at)

    def phase(self, done: PhaseSummary) -> None:
        """Count a finished judge phase."""
        phase = done.phase
        self.count(catalogue.JUDGE_PHASES, 1, phase=phase, outcome="failed" if done.error else "ok")
        self.count(catalogue.JUDGE_REQUESTS, done.requests, phase=phase)
        self.count(catalogue.JUDGE_DOLLARS, done.dollars, phase=phase)
        # Input tokens include cached tokens.
        fresh = done.input_tokens - done.cached_tokens
        for kind, tokens in (("input", fresh), ("cached_input", done.cached_tokens), ("output", done.output_tokens)):
            self.count(catalogue.JUDGE_TOKENS, tokens, phase=phase, kind=kind)
        self._observe(catalogue.JUDGE_SECONDS, done.ended_at - done.started_at, phase=phase)

    def step(self, line: Mapping[str, Any]) -> None:
        """Set the gauges of a finished step from its metrics line."""
        for key, metric in STEP_GAUGES.items():
            if line.get(key) is not None:
                self.set(metric, line[key])

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        """Set a gauge; ``tags``: values of all its tags but ``run``."""
        self._instruments[metric.name].set(float(value), tags=self._tags | tags)

    def count(self, metric: Metric, amount: float, **tags: str) -> None:
        """Add to a counter; ``tags``: values of all its tags but ``run``."""
        # Ray refuses increments of zero.
        if amount > 0:
            self._instruments[metric.name].inc(float(amount), tags=self._tags | tags)

    def _observe(self, metric: Metric, seconds: float, **tags: str) -> None:
        self._instruments[metric.name].observe(max(seconds, 0.0), tags=self._tags | tags)

"""Judge cost per phase: tokens (cached ones separately), dollars, seconds and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from draco_ray.judging.phases import PHASES
from draco_ray.records import JudgeCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """Sums over the calls of one phase. Replies from the durable cache are free and counted only as ``replayed``."""

    calls: int = 0
    """Calls that reached the judge, including re-asks."""
    replayed: int = 0
    requests: int = 0
    """HTTP requests, including retries."""
    failures: int = 0
    """Calls with an unusable reply."""
    input_tokens: int = 0
    """Input tokens, including cached ones."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Output tokens, including reasoning."""
    reasoning_tokens: int = 0
    dollars: float = 0.0
    estimated_dollars: float = 0.0
    """Estimated part of the dollars, for replies without token counts."""
    seconds: float = 0.0
    """Sum of the calls' durations, including overlaps."""

    def __add__(self, other: PhaseCost) -> PhaseCost:
        names = (field.name for field in fields(self))
        return PhaseCost(**{name: getattr(self, name) + getattr(other, name) for name in names})


_SUMMED = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
    *("dollars", "estimated_dollars", "seconds"),
)
"""Columns of a call that are added up as they are."""


def call_cost(call: JudgeCall) -> PhaseCost:
    """The costs of one call."""
    failures = int(call.error is not None)
    if call.requests == 0:
        return PhaseCost(replayed=1, failures=failures)
    return PhaseCost(calls=1, failures=failures, **{name: getattr(call, name) for name in _SUMMED})


def phase_costs(calls: Iterable[JudgeCall]) -> dict[str, PhaseCost]:
    """Costs by phase, in the order of the pipeline; phases without calls are left out."""
    costs: dict[str, PhaseCost] = {}
    for call in calls:
        costs[call.phase] = costs.get(call.phase, PhaseCost()) + call_cost(call)
    return {phase: costs[phase] for phase in (*PHASES, *costs) if phase in costs}


def total_cost(costs: Mapping[str, PhaseCost]) -> PhaseCost:
    """All phases together."""
    return sum(costs.values(), start=PhaseCost())


def cost_table(costs: Mapping[str, PhaseCost]) -> str:
    """A plain-text table, one line per phase and one for the total."""
    header = ("phase", "calls", "replayed", "failed", "input", "cached", "output", "reasoning", "dollars", "seconds")
    total = total_cost(costs)
    rows = [(str(phase), cost) for phase, cost in costs.items()] + [("total", total)]
    lines = ["{:<10}{:>8}{:>10}{:>8}{:>12}{:>12}{:>11}{:>11}{:>11}{:>10}".format(*header)]
    lines += [
        f"{name:<10}{cost.calls:>8}{cost.replayed:>10}{cost.failures:>8}{cost.input_tokens:>12,}"
        f"{cost.cached_tokens:>12,}{cost.output_tokens:>11,}{cost.reasoning_tokens:>11,}{cost.dollars:>11.4f}"
        f"{cost.seconds:>10.1f}"
        for name, cost in rows
    ]
    if total.estimated_dollars:
        lines.append(
            f"including ${total.estimated_dollars:.4f}, the maximum cost of requests without a reply or without "
            "reported usage"
        )
    return "\n".join(lines)

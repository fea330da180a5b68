"""Judge cost (`draco runs cost`): tokens (cached ones separately), dollars and failures by phase and by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from draco_ray.judging.phases import PHASES
from draco_ray.judging.reply_cache import read_book
from draco_ray.lab.rows import grouped
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.runs.schema import TABLES
from draco_ray.terminal import PlainConsole

LEAST_DOLLARS = 0.00005
"""Smallest amount to report: smaller ones would be printed as 0.0000."""


def read_calls(run: RunDirectory) -> dict[int, list[Row]]:
    """Training step -> its archived judge calls, without the prompt and reply texts."""
    columns = [name for name in TABLES["judge_calls"].names if name not in ("prompt", "reply")]
    calls = (run.table(name, columns=columns).to_pylist() for name in ("judge_calls", "heldout_calls"))
    return dict(sorted(grouped(itertools.chain(*calls), "training_step").items()))


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


def total_cost(calls: Iterable[Row]) -> PhaseCost:
    """The costs of these rows of ``judge_calls``."""
    return sum((_call_cost(call) for call in calls), start=PhaseCost())


def _call_cost(call: Row) -> PhaseCost:
    failures = int(call["error"] is not None)
    if call["requests"] == 0:
        return PhaseCost(replayed=1, failures=failures)
    summed = {field.name: call[field.name] for field in fields(PhaseCost) if field.name in call}
    return PhaseCost(calls=1, failures=failures, **summed)


def phase_costs(calls: Iterable[Row]) -> dict[str, PhaseCost]:
    """Costs by phase, in the order of the pipeline; phases without calls are left out."""
    costs = {phase: total_cost(found) for phase, found in grouped(calls, "phase").items()}
    return {phase: costs[phase] for phase in (*PHASES, *costs) if phase in costs}


def cost_table(costs: Mapping[str, PhaseCost], part: str = "phase") -> str:
    """A plain-text table, one line per phase (or other ``part``) and one for the total."""
    header = (part, "calls", "replayed", "failed", "input", "cached", "output", "reasoning", "dollars", "seconds")
    total = sum(costs.values(), start=PhaseCost())
    rows = [(str(phase), cost) for phase, cost in costs.items()] + [("total", total)]
    lines = ["{:<10}{:>8}{:>10}{:>8}{:>12}{:>12}{:>11}{:>11}{:>11}{:>10}".format(*header)]
    lines += [
        f"{name:<10}{cost.calls:>8}{cost.replayed:>10}{cost.failures:>8}{cost.input_tokens:>12,}"
        f"{cost.cached_tokens:>12,}{cost.output_tokens:>11,}{cost.reasoning_tokens:>11,}{cost.dollars:>11.4f}"
        f"{cost.seconds:>10.1f}"
        for name, cost in rows
    ]
    if total.estimated_dollars and part == "phase":
        lines.append(
            f"including ${total.estimated_dollars:.4f}, the maximum cost of requests without a reply or without "
            "reported usage"
        )
    return "\n".join(lines)


def show_cost(directory: Path) -> None:
    """Print tokens (cached ones separately), dollars and failures by phase, then by step.

    Raises:
        ConfigError: if ``directory`` is not a run directory.
    """
    console = PlainConsole()
    run = RunDirectory.open(directory)
    by_step = read_calls(run)
    calls = [call for step in by_step.values() for call in step]
    console.print(cost_table(phase_costs(calls)))
    if (missing := read_book(run.judge_cache).dollars - sum(call["dollars"] for call in calls)) > LEAST_DOLLARS:
        console.print(
            f"plus ${missing:.4f} for requests without an archived call: checks that the judge answers, and the "
            "maximum cost of requests that were interrupted by a kill"
        )
    console.print(cost_table({str(step): total_cost(found) for step, found in by_step.items()}, "step"))

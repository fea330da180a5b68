"""Judge cost (`draco runs cost`): tokens (cached ones separately), dollars and failures by phase and by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from draco_ray.judging.phases import PHASES
from draco_ray.judging.reply_cache import read_cost_ledger
from draco_ray.lab.rows import grouped
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.runs.schema import TABLE_SCHEMAS
from draco_ray.terminal import console

LEAST_DOLLARS = 0.00005
"""Smallest amount to report: smaller ones would be printed as 0.0000."""


def read_calls(run: RunDirectory) -> dict[int, list[Row]]:
    """Training step -> its archived judge calls, without the prompt and reply texts."""
    columns = [name for name in TABLE_SCHEMAS["judge_calls"].names if name not in ("prompt", "reply")]
    calls = (run.table(name, columns=columns).to_pylist() for name in ("judge_calls", "heldout_calls"))
    return dict(sorted(grouped(itertools.chain(*calls), "training_step").items()))


Cost = dict[str, float]
"""Sums over the judge calls of one phase. The keys are those of `COLUMNS`, ``requests`` and ``estimated_dollars``.

- ``calls``: number of calls that were sent to the judge, including re-asks;
- ``replayed``: number of calls that were answered from the durable cache; they enter no other sum but ``failures``;
- ``failures``: number of calls without a usable reply;
- ``requests``: number of HTTP requests, including retries;
- ``input_tokens``, ``output_tokens``: including ``cached_tokens`` and ``reasoning_tokens``, respectively;
- ``estimated_dollars``: the part of ``dollars`` for requests without a reply or token counts, at their maximum cost;
- ``seconds``: sum of the calls' durations, which may overlap.
"""
COLUMNS = {
    "calls": ("calls", 8, ""),
    "replayed": ("replayed", 10, ""),
    "failures": ("failed", 8, ""),
    "input_tokens": ("input", 12, ","),
    "cached_tokens": ("cached", 12, ","),
    "output_tokens": ("output", 11, ","),
    "reasoning_tokens": ("reasoning", 11, ","),
    "dollars": ("dollars", 11, ".4f"),
    "seconds": ("seconds", 10, ".1f"),
}
"""Sum -> header, width and number format of its column in `cost_table`."""
_OF_A_CALL = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
    *("dollars", "estimated_dollars", "seconds"),
)
"""Columns of ``judge_calls`` that are summed."""


def total_cost(calls: Sequence[Row]) -> Cost:
    """Total cost of these rows of ``judge_calls``."""
    sent = [call for call in calls if call["requests"]]
    return {
        "calls": len(sent),
        "replayed": len(calls) - len(sent),
        "failures": sum(call["error"] is not None for call in calls),
        **{name: sum(call[name] for call in sent) for name in _OF_A_CALL},
    }


def phase_costs(calls: Iterable[Row]) -> dict[str, Cost]:
    """Costs by phase, in the order of the pipeline; phases without calls are left out."""
    costs = {phase: total_cost(found) for phase, found in grouped(calls, "phase").items()}
    return {phase: costs[phase] for phase in (*PHASES, *costs) if phase in costs}


def cost_table(costs: Mapping[str, Cost], part: str = "phase") -> str:
    """A plain-text table, one line per phase (or other ``part``) and one for the total."""
    total = {name: sum(cost[name] for cost in costs.values()) for name in (*COLUMNS, "estimated_dollars")}
    lines = [f"{part:<10}" + "".join(f"{header:>{width}}" for header, width, _ in COLUMNS.values())]
    for label, cost in (*costs.items(), ("total", total)):
        cells = (f"{cost[name]:>{width}{form}}" for name, (_, width, form) in COLUMNS.items())
        lines.append(f"{label:<10}" + "".join(cells))
    if total["estimated_dollars"] and part == "phase":
        lines.append(
            f"including ${total['estimated_dollars']:.4f}, the maximum cost of requests without a reply or without "
            "reported usage"
        )
    return "\n".join(lines)


def show_cost(directory: Path) -> None:
    """Print tokens (cached ones separately), dollars and failures by phase, then by step.

    Raises:
        ConfigError: if ``directory`` is not a run directory.
    """
    run = RunDirectory.open(directory)
    by_step = read_calls(run)
    calls = [call for step in by_step.values() for call in step]
    console.print(cost_table(phase_costs(calls)))
    if (missing := read_cost_ledger(run.judge_cache).dollars - sum(call["dollars"] for call in calls)) > LEAST_DOLLARS:
        console.print(
            f"plus ${missing:.4f} for requests that are not among the archived calls: test requests at the start, and "
            "requests that were unanswered when the run was killed, which count with their maximum cost"
        )
    console.print(cost_table({str(step): total_cost(found) for step, found in by_step.items()}, "step"))

"""Timeline of a training step as a Chrome trace (`draco runs timeline`).

The format is that of ``ray timeline``: a JSON list of complete events that chrome://tracing and Perfetto read. Each
task of the step is a process, each of its rollouts a row, and work for the whole group (stage1, union) another row.
Work that belongs to no task (learning, sync, checkpoint) is one more process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draco_ray.errors import ConfigError
from draco_ray.lab.files import atomic_output_file
from draco_ray.runs.directory import RunDirectory

GROUP_ROW = "group"
POLICY = "policy"


def step_trace(spans: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the ``spans`` table -> trace events, in order of time; ``ts`` and ``dur`` are microseconds."""
    return [
        {
            "cat": span["stage"],
            "name": span["stage"],
            "pid": span["task_id"] or POLICY,
            "tid": _row(span),
            "ts": span["started_at"] * 1e6,
            "dur": (span["ended_at"] - span["started_at"]) * 1e6,
            "ph": "X",
            "args": {"step": span["training_step"], "task": span["task_id"], "rollout": span["rollout"]},
        }
        for span in sorted(spans, key=lambda span: span["started_at"])
    ]


def _row(span: Mapping[str, Any]) -> str:
    if span["task_id"] is None:
        return str(span["stage"])
    return GROUP_ROW if span["rollout"] is None else f"rollout {span['rollout']}"


def write_timeline(directory: Path, step: int, out: Path) -> int:
    """Write the trace of one training step; returns the number of events.

    Raises:
        ConfigError: ``directory`` is no run, or the step has no spans.
    """
    run = RunDirectory.open(directory)
    spans = run.table("spans", step).to_pylist()
    if not spans:
        steps = sorted(set(run.table("spans", columns=["training_step"]).column("training_step").to_pylist()))
        known = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
        raise ConfigError(f"{directory}: step {step} has no spans; steps with spans: {known}")
    with atomic_output_file(out) as temporary:
        temporary.write_text(json.dumps(step_trace(spans)) + "\n", encoding="utf-8")
    return len(spans)

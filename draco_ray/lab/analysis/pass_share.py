"""The pass share of judged traces: the one grade that `draco judge`, `draco runs show` and `draco report` print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from draco_ray.lab.evaluation.intervals import ClusteredMean, clustered_mean
from draco_ray.lab.rows import grouped
from draco_ray.runs.directory import RunDirectory
from draco_ray.traces.judging_run import JUDGED_FILE

Line = Mapping[str, Any]
"""A line of ``judged.jsonl``: a judged trace."""


def pass_share(lines: Iterable[Line]) -> ClusteredMean | None:
    """The mean over tasks of the mean pass share of each task's traces; None if no trace has one.

    Its observations are the verdicts: a trace with many criteria is no coin flip, and its pass share varies less.
    """
    judged = [line for line in lines if line["pass_share"] is not None]
    verdicts = sum(each["verdict"] != "NOT_APPLICABLE" for line in judged for each in line["verdicts"])
    means = {task: fmean(line["pass_share"] for line in found) for task, found in grouped(judged, "task_id").items()}
    return clustered_mean([means], lambda task: task, trials=verdicts) if means else None


def read_run_jsonl(run: RunDirectory, name: str = JUDGED_FILE) -> list[dict[str, Any]]:
    """The lines of a JSONL file in a run directory of judged traces; empty if the file does not exist yet."""
    path = run.path / name
    # Not splitlines: JSON may contain other line separators than \n.
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    return [json.loads(line) for line in lines if line]

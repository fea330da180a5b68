"""Grades of judged traces: pass shares under a pinned rubric, against a threshold and an earlier judgement.

A reward is no grade: it is relative to its group, since criteria that every trace passes are dropped.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, Field, ValidationError
from rich.table import Table

from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.pass_share import Line, pass_share
from draco_ray.lab.evaluation.intervals import ClusteredMean, Interval, rate_difference, rate_interval
from draco_ray.lab.rows import grouped
from draco_ray.terminal import counted
from draco_ray.traces.judging_run import JUDGED_FILE


class _Verdict(BaseModel):
    title: str
    verdict: Literal["PASS", "FAIL", "NOT_APPLICABLE"]


class _Graded(BaseModel):
    """The fields of a line of ``judged.jsonl`` that grading needs."""

    task_id: str
    pass_share: float | None = Field(ge=0, le=1, strict=True)
    verdicts: list[_Verdict]


def read_lines(path: Path, named: str = "--baseline") -> list[Line]:
    """Read a ``judged.jsonl``, given as a file or as its folder; ``named`` is the argument's name in errors.

    Raises:
        ConfigError: the file cannot be read, or has other content.
    """
    file = path / JUDGED_FILE if path.is_dir() else path
    try:
        # Not splitlines: JSON may contain other line separators than \n.
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{named} {file}: cannot be read: {' '.join(str(error).split())}") from None
    expected = f"expected the {JUDGED_FILE} that an earlier draco judge wrote, one judged trace per line"
    if not lines:
        raise ConfigError(f"{named} {file}: is empty; {expected}")
    for number, line in enumerate(lines, 1):
        try:
            _Graded.model_validate(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise ConfigError(f"{named} {file}, trace {number}: {where}: {first['msg']}; {expected}") from None
    return lines


def titles(lines: Iterable[Line]) -> set[str]:
    """Titles of the criteria that the lines have verdicts on."""
    return {each["title"] for line in lines for each in line["verdicts"]}


def check_rubric(rubric: Set[str], baseline: Sequence[Line], digest: str = "") -> None:
    """Compare the titles of a rubric with those of the baseline, and its digest if both are known.

    Raises:
        ConfigError: the baseline was judged by another rubric, or not at all.
    """
    if not (known := titles(baseline)):
        raise ConfigError("--baseline: no trace of the baseline was judged; expected a judgement of the same tasks")
    if other := sorted(rubric ^ known):
        raise ConfigError(
            "--baseline: its traces were judged by another rubric (criteria in only one of the two: "
            f"{', '.join(other[:3])}); use the same --rubric"
        )
    if digest and any(line.get("rubric", digest) != digest for line in baseline):
        raise ConfigError(
            "--baseline: its traces were judged by criteria that have the same titles but other texts; judge the "
            "baseline's traces by this --rubric"
        )


def shared_tasks(tasks: Set[str], baseline: Iterable[Line]) -> Set[str]:
    """The tasks that are also in the baseline. Raises: ConfigError: there is no such task."""
    shared = {line["task_id"] for line in baseline} & tasks
    if not shared:
        raise ConfigError(
            "--baseline: has no task in common with the traces judged now, or none with a pass share; expected a "
            "judgement of the same tasks"
        )
    return shared


def baseline_difference(lines: Sequence[Line], baseline: Sequence[Line]) -> tuple[Interval, int]:
    """Pass share of ``lines`` minus that of ``baseline``, with its 95 % interval, and the number of their common tasks.

    Raises:
        ConfigError: they have no common task, or were judged by different rubrics.
    """
    check_rubric(titles(lines), baseline)
    graded = [[line for line in side if line["pass_share"] is not None] for side in (lines, baseline)]
    shared = shared_tasks({line["task_id"] for line in graded[0]}, graded[1])
    one, other_ = (pass_share(line for line in side if line["task_id"] in shared) for side in graded)
    assert one is not None
    assert other_ is not None
    return rate_difference(one, other_), one.clusters


def criterion_table(lines: Iterable[Line]) -> Table:
    """The pass share of each criterion over all traces to which it applies."""
    verdicts = [each for line in lines for each in line["verdicts"] if each["verdict"] != "NOT_APPLICABLE"]
    shares = [
        (fmean(verdict["verdict"] == "PASS" for verdict in found), title, len(found))
        for title, found in grouped(verdicts, "title").items()
    ]
    table = Table("criterion", "pass share", "traces")
    for share, title, traces in sorted(shares):
        table.add_row(title, f"{share:.0%}", str(traces))
    return table


def format_pass_share(share: ClusteredMean) -> str:
    """A pass share with its interval, in words."""
    interval = rate_interval(share)
    limits = "" if share.clusters < 2 else f" [{interval.low:.1%}, {interval.high:.1%}]"
    return f"{share.mean:.1%}{limits} over {counted(share.clusters, 'task')}"


def write_github_annotations(lines: Sequence[Line]) -> None:
    """Print an annotation of GitHub Actions for each failed criterion, and append a table to the job's summary."""
    rows = ["| trace | pass share | failed |", "|---|---|---|"]
    for line in sorted(lines, key=lambda line: -1.0 if line["pass_share"] is None else line["pass_share"]):
        name, failed = line["trace_id"] or line["task_id"], []
        for verdict in line["verdicts"] or ():
            if verdict["verdict"] != "FAIL":
                continue
            steps = f" (step {', '.join(map(str, verdict['steps']))})" if verdict["steps"] else ""
            failed.append(f"{verdict['title']}{steps}")
            said = verdict["explanation"] or verdict["justification"]
            file, _, place = line["source"].rpartition(":")
            where = f"file={_property(file)},line={place}," if place.isdigit() else f"file={_property(line['source'])},"
            print(f"::error {where}title={_property(failed[-1])}::{_data(f'{name}: {said}')}")
        share = "not judged" if line["pass_share"] is None else f"{line['pass_share']:.0%}"
        rows.append(f"| {_cell(name)} | {share} | {_cell('; '.join(failed) or line['error'] or '')} |")
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file_:
            file_.write("\n".join(rows) + "\n")


def _data(text: str) -> str:
    """Escape text for a workflow command, so that it cannot end the line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(text: str) -> str:
    """Escape text for a Markdown table, so that it cannot end the cell or contain HTML."""
    return html.escape(" ".join(text.split())).replace("|", "\\|")

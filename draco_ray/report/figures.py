"""The paper's figures from one run or several: drawings by name, and writing them as PNG and PDF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draco_ray.analysis.tables import tidy
from draco_ray.records import EpisodeEnd, Phase
from draco_ray.report.charts import WIDTH, Series, heat_map, line_chart, percent, stacked_bars
from draco_ray.report.drawing import Drawing
from draco_ray.report.output import to_pdf, to_png
from draco_ray.runs.directory import RunDirectory

MOST_CRITERIA = 24
"""Criteria shown in the per-criterion figure: those judged most often."""

Row = dict[str, Any]


def figures(runs: Sequence[RunDirectory]) -> dict[str, Drawing]:
    """Every figure the runs have data for; a figure of one run alone carries the run's name when there are several.

    ``terminations``, ``pass_rate``, ``pass_rate_by_criterion``, ``inert_share``, ``judge_cost_by_phase``, and
    ``success`` where something was evaluated.
    """
    names = [run.path.name for run in runs]
    drawings = {}
    for run in runs:
        suffix = f"-{run.path.name}" if len(runs) > 1 else ""
        label = f": {run.path.name}" if len(runs) > 1 else ""
        drawings[f"terminations{suffix}"] = terminations(tidy("terminations", [run]).to_pylist(), label)
        by_criterion = tidy("criterion_pass_rates", [run]).to_pylist()
        drawings[f"pass_rate_by_criterion{suffix}"] = pass_rate_by_criterion(by_criterion, label)
    pass_rates = tidy("pass_rates", runs).to_pylist()
    drawings["pass_rate"] = line_chart(
        "Pass rate of the applicable verdicts", by_run(pass_rates, names, "pass_rate"), bounds=(0, 1), number=percent
    )
    credit = tidy("credit_by_step", runs).to_pylist()
    drawings["inert_share"] = line_chart(
        "Rollouts on which credit is inert", by_run(credit, names, "inert_share"), bounds=(0, 1), number=percent
    )
    drawings["judge_cost_by_phase"] = judge_cost_of_runs(tidy("judge_cost", runs).to_pylist(), names)
    evaluated = tidy("success", runs).to_pylist()
    if evaluated:
        drawings["success"] = success(evaluated)
    return drawings


def write_figures(runs: Sequence[RunDirectory], folder: Path) -> list[Path]:
    """Write every figure as ``<name>.png`` and ``<name>.pdf``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawing in figures(runs).items():
        png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
        png.write_bytes(to_png(drawing))
        pdf.write_bytes(to_pdf(drawing))
        written += [png, pdf]
    return written


def by_run(rows: Sequence[Row], names: Sequence[str], column: str) -> list[Series]:
    """A series per run: ``column`` over training steps."""
    found = []
    for name in names:
        mine = [row for row in rows if row["run"] == name]
        found.append(Series(name, [row["training_step"] for row in mine], [row[column] for row in mine]))
    return found


def terminations(rows: Sequence[Row], label: str = "") -> Drawing:
    """How rollouts ended, as shares of a training step."""
    steps = sorted({row["training_step"] for row in rows})
    share = {(row["training_step"], row["ended"]): row["share"] for row in rows}
    parts = {
        mode.value.replace("_", " "): [share.get((step, mode.value), 0.0) for step in steps] for mode in EpisodeEnd
    }
    return stacked_bars(f"How rollouts ended{label}", [str(step) for step in steps], parts, number=percent, whole=1.0)


def pass_rate_by_criterion(rows: Sequence[Row], label: str = "", width: float = 2 * WIDTH) -> Drawing:
    """Pass rate of each criterion and training step, the most judged criteria first."""
    judgments: dict[str, int] = {}
    for row in rows:
        judgments[row["title"]] = judgments.get(row["title"], 0) + row["judgments"]
    titles = sorted(judgments, key=lambda title: (-judgments[title], title))[:MOST_CRITERIA]
    steps = sorted({row["training_step"] for row in rows})
    rates = {(row["title"], row["training_step"]): row["pass_rate"] for row in rows}
    more = f" (the {len(titles)} most judged of {len(judgments)})" if len(judgments) > len(titles) else ""
    return heat_map(
        f"Pass rate by criterion{more}{label}",
        titles,
        [str(step) for step in steps],
        [[rates.get((title, step)) for step in steps] for title in titles],
        width=width,
    )


def judge_cost_by_step(rows: Sequence[Row]) -> Drawing:
    """Judge cost of every training step by phase: dollars, or tokens where the judge cost none."""
    column, title = _cost_column(rows)
    steps = sorted({row["training_step"] for row in rows})
    cost = {(row["training_step"], row["phase"]): row[column] for row in rows}
    parts = {phase.value: [float(cost.get((step, phase.value), 0)) for step in steps] for phase in Phase}
    return stacked_bars(title, [str(step) for step in steps], parts)


def judge_cost_of_runs(rows: Sequence[Row], names: Sequence[str]) -> Drawing:
    """Judge cost of whole runs by phase."""
    column, title = _cost_column(rows)
    parts = {
        phase.value: [
            float(sum(row[column] for row in rows if row["run"] == name and row["phase"] == phase.value))
            for name in names
        ]
        for phase in Phase
    }
    return stacked_bars(title, list(names), parts, axis="run")


def success(rows: Sequence[Row]) -> Drawing:
    """TGC over training steps, a line per run and split."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row['run']}, {row['split']}", []).append(row)
    series = [
        Series(name, [row["training_step"] for row in mine], [row["tgc"] for row in mine])
        for name, mine in lines.items()
    ]
    return line_chart("Task goal completion (TGC)", series, bounds=(0, 1), number=percent)


def _cost_column(rows: Sequence[Row]) -> tuple[str, str]:
    if any(row["dollars"] for row in rows):
        return "dollars", "Judge cost by phase, dollars"
    return "input_tokens", "Judge input tokens by phase (no reply had a price)"

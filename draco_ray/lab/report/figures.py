"""The paper's figures from one run or several: drawings by name, and their SVG files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draco_ray.judging.phases import PHASES
from draco_ray.lab.analysis.rescoring import SCORED_BY_RUN
from draco_ray.lab.analysis.rubrics import criteria_dropped_by_union, title_key
from draco_ray.lab.analysis.tables import tidy
from draco_ray.lab.report.charts import WIDTH, Series, heat_map, line_chart, percent, stacked_bars
from draco_ray.lab.report.drawing import Drawing, to_image
from draco_ray.lab.rows import group_by
from draco_ray.records import Termination
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row

MOST_CRITERIA = 24
"""Maximum number of criteria in the per-criterion figure, which shows those judged most often."""


def figures(runs: Sequence[RunDirectory]) -> dict[str, Drawing]:
    """Every figure for which the runs have data; with several runs, figures of one run have its name as suffix.

    ``terminations``, ``pass_rate``, ``pass_rate_by_criterion``, ``inert_share``, ``judge_cost_by_phase``; ``success``
    if the run was evaluated, ``judged`` if the judge scored held-out tasks instead; ``train_success`` from evaluations
    of the training tasks.
    """
    names = [run.path.name for run in runs]
    drawings = {}
    for run in runs:
        suffix = f"-{run.path.name}" if len(runs) > 1 else ""
        label = f": {run.path.name}" if len(runs) > 1 else ""
        drawings[f"terminations{suffix}"] = terminations(tidy("terminations", [run]).to_pylist(), label)
        by_criterion = tidy("criterion_pass_rates", [run]).to_pylist()
        drawings[f"pass_rate_by_criterion{suffix}"] = pass_rate_by_criterion(
            by_criterion, criteria_dropped_by_union(run), label
        )
    drawings["pass_rate"] = pass_rate(runs)
    credit = tidy("credit_by_step", runs).to_pylist()
    drawings["inert_share"] = line_chart(
        "Rollouts on which credit is inert", by_run(credit, "inert_share"), bounds=(0, 1), number=percent
    )
    drawings["judge_cost_by_phase"] = judge_cost_of_runs(tidy("judge_cost", runs).to_pylist(), names)
    if evaluated := tidy("success", runs).to_pylist():
        drawings["success"] = success(evaluated)
    if by_judge := tidy("judged", runs).to_pylist():
        drawings["judged"] = judged(by_judge)
    measured = tidy("evaluations", runs).to_pylist()
    if trained_on := [row for row in measured if row["split"].startswith("train") and row["training_step"] is not None]:
        drawings["train_success"] = train_success(trained_on)
    return drawings


def write_figures(runs: Sequence[RunDirectory], folder: Path) -> list[Path]:
    """Write every figure as ``<name>.svg``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / f"{name}.svg": drawing for name, drawing in figures(runs).items()}
    for path, drawing in written.items():
        path.write_text(to_image(drawing), encoding="utf-8")
    return list(written)


def series_of(rows: Iterable[Row], key: Callable[[Row], str], column: str) -> list[Series]:
    """One series over training steps per value of ``key``, with intervals if the rows have them."""
    found = []
    for name, mine in group_by(rows, key).items():
        limits = [(row.get(f"{column}_low"), row.get(f"{column}_high")) for row in mine]
        known = [None if low is None or high is None else (low, high) for low, high in limits]
        found.append(Series(name, [row["training_step"] for row in mine], [row.get(column) for row in mine], known))
    return found


def by_run(rows: Iterable[Row], column: str) -> list[Series]:
    """A series per run: ``column`` over training steps."""
    return series_of(rows, lambda row: str(row["run"]), column)


def bars_by_step(
    title: str, rows: Sequence[Row], part: str, column: str, names: Mapping[str, str], **options: Any
) -> Drawing:
    """One bar per training step, stacked by the values of ``part`` in ``names`` (value -> label)."""
    steps = sorted({row["training_step"] for row in rows})
    value = {(row[part], row["training_step"]): row[column] for row in rows}
    parts = {label: [float(value.get((key, step)) or 0) for step in steps] for key, label in names.items()}
    return stacked_bars(title, [str(step) for step in steps], parts, **options)


def pass_rate(runs: Sequence[RunDirectory]) -> Drawing:
    """Pass rate by training step, a line for each run and for each judge that rescored it against a static rubric."""
    rescored = [
        row
        for row in tidy("rubric_rates", runs).to_pylist()
        if row["scored_by"] != SCORED_BY_RUN and row["training_step"] is not None
    ]
    series = by_run(tidy("pass_rates", runs).to_pylist(), "pass_rate")
    series += series_of(rescored, lambda row: f"{row['run']}: static rubric, by {row['scored_by']}", "pass_rate")
    return line_chart("Pass rate of the applicable verdicts", series, bounds=(0, 1), number=percent)


def terminations(rows: Sequence[Row], label: str = "") -> Drawing:
    """Termination modes of rollouts, as shares of each training step."""
    found = {row["ended"] for row in rows}
    names = {mode.value: mode.value.replace("_", " ") for mode in Termination if mode.value in found}
    return bars_by_step(f"How rollouts ended{label}", rows, "ended", "share", names, number=percent, whole=1.0)


def pass_rate_by_criterion(
    rows: Sequence[Row], solved: Collection[tuple[int, str]], label: str = "", width: float = 2 * WIDTH
) -> Drawing:
    """Pass rate of each criterion and training step, the most judged criteria first.

    ``solved``: the run's `criteria_dropped_by_union` criteria, marked in steps without verdicts.
    """
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
        marks={
            (place, column): "proposed but in no rubric, because no rollout failed it or another criterion covers it"
            for place, title in enumerate(titles)
            for column, step in enumerate(steps)
            if (step, title_key(title)) in solved
        },
        width=width,
    )


def judge_cost_by_step(rows: Sequence[Row]) -> Drawing:
    """Judge cost of every training step by phase: dollars, or input tokens if the judge cost nothing."""
    column, title = _cost_column(rows)
    return bars_by_step(title, rows, "phase", column, {phase: phase for phase in _asked(rows)})


def judge_cost_of_runs(rows: Sequence[Row], names: Sequence[str]) -> Drawing:
    """Judge cost of whole runs by phase."""
    column, title = _cost_column(rows)
    parts = {
        phase: [
            float(sum(row[column] for row in rows if row["run"] == name and row["phase"] == phase)) for name in names
        ]
        for phase in _asked(rows)
    }
    return stacked_bars(title, list(names), parts, axis="run", all_labels=True)


def _asked(rows: Sequence[Row]) -> list[str]:
    there = {row["phase"] for row in rows}
    return [phase for phase in PHASES if phase in there] or [*PHASES]


def success(rows: Sequence[Row]) -> Drawing:
    """TGC over training steps with its intervals, a line per run and split."""
    return _learning_curve("Task goal completion (TGC)", rows, "tgc")


def judged(rows: Sequence[Row]) -> Drawing:
    """Line chart of the judge's pass rate on held-out tasks over training steps, for runs without an evaluator."""
    return _learning_curve("Held-out tasks: the judge's pass rate (a stand-in)", rows, "pass_rate")


def _learning_curve(title: str, rows: Sequence[Row], column: str) -> Drawing:
    series = series_of(rows, lambda row: f"{row['run']}, {row['split']}", column)
    return line_chart(title, series, bounds=(0, 1), number=percent)


def train_success(rows: Sequence[Row]) -> Drawing:
    """TGC on the training tasks over training steps; evaluated afterwards and never part of a reward."""
    rows = sorted(rows, key=lambda row: int(row["training_step"]))
    return line_chart("TGC on the training tasks", by_run(rows, "tgc"), bounds=(0, 1), number=percent)


def _cost_column(rows: Sequence[Row]) -> tuple[str, str]:
    if not rows or any(row["dollars"] for row in rows):
        return "dollars", "Judge cost by phase, dollars"
    return "input_tokens", "Judge input tokens by phase (prices unknown)"

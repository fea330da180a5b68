"""The paper's figures from one run or several: drawings by name, and writing them as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draco_ray.judging.phases import PHASES
from draco_ray.lab.analysis.rescoring import RUN
from draco_ray.lab.analysis.rubrics import left_out, title_key
from draco_ray.lab.analysis.tables import tidy
from draco_ray.lab.report.charts import WIDTH, Series, heat_map, line_chart, percent, scatter, stacked_bars
from draco_ray.lab.report.drawing import Drawing, to_image
from draco_ray.records import Termination
from draco_ray.runs.directory import RunDirectory

MOST_CRITERIA = 24
"""Largest number of criteria in the per-criterion figure; those judged most often are shown."""

Row = dict[str, Any]


def figures(runs: Sequence[RunDirectory]) -> dict[str, Drawing]:
    """Every figure that the runs have data for; figures of a single run are named after it if there are several runs.

    ``terminations``, ``pass_rate``, ``pass_rate_by_criterion``, ``inert_share``, ``judge_cost_by_phase``; where
    something was evaluated ``success`` and ``judge_cost_and_success``, and ``judged`` where the judge stood in; where
    it was evaluated several times ``pass_k``;
    ``evaluation_cost`` and ``train_success`` from evaluation directories inside the runs.
    """
    names = [run.path.name for run in runs]
    drawings = {}
    for run in runs:
        suffix = f"-{run.path.name}" if len(runs) > 1 else ""
        label = f": {run.path.name}" if len(runs) > 1 else ""
        drawings[f"terminations{suffix}"] = terminations(tidy("terminations", [run]).to_pylist(), label)
        by_criterion = tidy("criterion_pass_rates", [run]).to_pylist()
        drawings[f"pass_rate_by_criterion{suffix}"] = pass_rate_by_criterion(by_criterion, left_out(run), label)
    drawings["pass_rate"] = pass_rate(runs)
    credit = tidy("credit_by_step", runs).to_pylist()
    drawings["inert_share"] = line_chart(
        "Rollouts on which credit is inert", by_run(credit, "inert_share"), bounds=(0, 1), number=percent
    )
    drawings["judge_cost_by_phase"] = judge_cost_of_runs(tidy("judge_cost", runs).to_pylist(), names)
    evaluated = tidy("success", runs).to_pylist()
    if evaluated:
        drawings["success"] = success(evaluated)
    if by_judge := tidy("judged", runs).to_pylist():
        drawings["judged"] = judged(by_judge)
    measured = tidy("evaluations", runs).to_pylist()
    optional = {
        "judge_cost_and_success": judge_cost_and_success(tidy("judge_cost", runs).to_pylist(), measured),
        "pass_k": pass_k(tidy("consistency", runs).to_pylist()),
        "evaluation_cost": evaluation_cost(measured),
        "train_success": train_success(measured),
    }
    return drawings | {name: drawing for name, drawing in optional.items() if drawing is not None}


def write_figures(runs: Sequence[RunDirectory], folder: Path) -> list[Path]:
    """Write every figure as ``<name>.svg``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / f"{name}.svg": drawing for name, drawing in figures(runs).items()}
    for path, drawing in written.items():
        path.write_text(to_image(drawing), encoding="utf-8")
    return list(written)


def series_of(rows: Iterable[Row], key: Callable[[Row], str], column: str) -> list[Series]:
    """A series over training steps for each value of ``key``, with intervals if the rows have them."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lines[key(row)].append(row)
    found = []
    for name, mine in lines.items():
        limits = [(row.get(f"{column}_low"), row.get(f"{column}_high")) for row in mine]
        known = [None if low is None or high is None else (low, high) for low, high in limits]
        found.append(Series(name, [row["training_step"] for row in mine], [row[column] for row in mine], known))
    return found


def by_run(rows: Iterable[Row], column: str) -> list[Series]:
    """A series per run: ``column`` over training steps."""
    return series_of(rows, lambda row: str(row["run"]), column)


def bars_by_step(
    title: str, rows: Sequence[Row], part: str, column: str, names: Mapping[str, str], **options: Any
) -> Drawing:
    """A bar per training step, stacked by the values of ``part`` that are in ``names``, which has their labels."""
    steps = sorted({row["training_step"] for row in rows})
    value = {(row[part], row["training_step"]): row[column] for row in rows}
    parts = {label: [float(value.get((key, step)) or 0) for step in steps] for key, label in names.items()}
    return stacked_bars(title, [str(step) for step in steps], parts, **options)


def pass_rate(runs: Sequence[RunDirectory]) -> Drawing:
    """Pass rate by training step, a line for each run and for each judge that rescored it against a static rubric."""
    rescored = [
        row
        for row in tidy("rubric_rates", runs).to_pylist()
        if row["scored_by"] != RUN and row["training_step"] is not None
    ]
    series = by_run(tidy("pass_rates", runs).to_pylist(), "pass_rate")
    series += series_of(rescored, lambda row: f"{row['run']}: static rubric, by {row['scored_by']}", "pass_rate")
    return line_chart("Pass rate of the applicable verdicts", series, bounds=(0, 1), number=percent)


def terminations(rows: Sequence[Row], label: str = "") -> Drawing:
    """How rollouts ended, as shares of a training step."""
    found = {row["ended"] for row in rows}
    names = {mode.value: mode.value.replace("_", " ") for mode in Termination if mode.value in found}
    return bars_by_step(f"How rollouts ended{label}", rows, "ended", "share", names, number=percent, whole=1.0)


def pass_rate_by_criterion(
    rows: Sequence[Row], solved: Collection[tuple[int, str]], label: str = "", width: float = 2 * WIDTH
) -> Drawing:
    """Pass rate of each criterion and training step, the most judged criteria first.

    ``solved`` are `left_out` of the run: marked where a criterion has no verdicts.
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
            (place, column): "proposed, and in no rubric: no rollout failed it, or another one covers it"
            for place, title in enumerate(titles)
            for column, step in enumerate(steps)
            if (step, title_key(title)) in solved
        },
        width=width,
    )


def judge_cost_by_step(rows: Sequence[Row]) -> Drawing:
    """Judge cost of every training step by phase: dollars, or tokens where the judge cost none."""
    column, title = _cost_column(rows)
    return bars_by_step(title, rows, "phase", column, {phase: phase for phase in PHASES})


def judge_cost_of_runs(rows: Sequence[Row], names: Sequence[str]) -> Drawing:
    """Judge cost of whole runs by phase."""
    column, title = _cost_column(rows)
    parts = {
        phase: [
            float(sum(row[column] for row in rows if row["run"] == name and row["phase"] == phase)) for name in names
        ]
        for phase in PHASES
    }
    return stacked_bars(title, list(names), parts, axis="run", all_labels=True)


def success(rows: Sequence[Row]) -> Drawing:
    """TGC over training steps with its intervals, a line per run and split."""
    return _learning_curve("Task goal completion (TGC)", rows, "tgc")


def judged(rows: Sequence[Row]) -> Drawing:
    """The judge's pass rate on held-out tasks without evaluator, likewise."""
    return _learning_curve("Held out: the judge's pass rate, a stand-in", rows, "pass_rate")


def _learning_curve(title: str, rows: Sequence[Row], column: str) -> Drawing:
    series = series_of(rows, lambda row: f"{row['run']}, {row['split']}", column)
    return line_chart(title, series, bounds=(0, 1), number=percent)


def judge_cost_and_success(cost: Sequence[Row], measured: Sequence[Row]) -> Drawing | None:
    """Judge cost of a training step against the last TGC on tasks not trained on, a point per run and split."""
    column, _ = _cost_column(cost)
    points = []
    for name, split in dict.fromkeys((row["run"], row["split"]) for row in measured if not _trained_on(row)):
        mine = [row for row in cost if row["run"] == name]
        last = max(
            (row for row in measured if (row["run"], row["split"]) == (name, split) and row["training_step"]),
            key=lambda row: int(row["training_step"]),
            default=None,
        )
        steps = len({row["training_step"] for row in mine})
        if last is not None and steps:
            points.append((f"{name}, {split}", sum(row[column] for row in mine) / steps, last["tgc"]))
    unit = "dollars" if column == "dollars" else "input tokens"
    return scatter("TGC against judge cost", points, axis=f"judge {unit} a training step") if points else None


def pass_k(rows: Sequence[Row]) -> Drawing | None:
    """pass^k and pass@k of tasks and of scenarios, of the last measurement of each run and split; equal at k = 1.

    A mean of several checkpoints is preferred to single ones.
    """
    last: dict[tuple[str, str], Row] = {}
    for row in rows:
        other = last.setdefault((row["run"], row["split"]), row)
        if _recency(row) >= _recency(other):
            last[row["run"], row["split"]] = row
    series = []
    for (name, split), chosen in last.items():
        about = ("run", "split", "evaluation", "training_step", "checkpoints")
        mine = [row for row in rows if all(row[key] == chosen[key] for key in about)]
        for metric in dict.fromkeys(row["metric"] for row in mine):
            of_metric = [row for row in mine if row["metric"] == metric]
            ks = [row["k"] for row in of_metric]
            label = f"{name}, {split} {metric}"
            series.append(Series(f"{label}: pass^k", ks, [row["pass_hat_k"] for row in of_metric]))
            series.append(Series(f"{label}: pass@k", ks, [row["pass_at_k"] for row in of_metric]))
    if not series:
        return None
    return line_chart("All of k runs succeed, or one does", series, bounds=(0, 1), number=percent, axis="k")


def _recency(row: Row) -> tuple[int, int]:
    return row["checkpoints"], row["training_step"] or 0


def evaluation_cost(measured: Sequence[Row]) -> Drawing | None:
    """TGC against the cost of one pass over the tasks, a point per measurement; tokens if any has no price."""
    costed = [row for row in measured if row["tokens_per_pass"] is not None]
    if not costed:
        return None
    priced = all(row["dollars_per_pass"] is not None for row in costed)
    column, unit = ("dollars_per_pass", "dollars") if priced else ("tokens_per_pass", "tokens")
    points = [(_label(row), row[column], row["tgc"]) for row in costed]
    return scatter("TGC against evaluation cost", points, axis=f"{unit} a pass over the tasks")


def train_success(measured: Sequence[Row]) -> Drawing | None:
    """TGC on the training tasks over training steps; evaluated afterwards and never part of a reward."""
    rows = [row for row in measured if _trained_on(row) and row["training_step"] is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: int(row["training_step"]))
    return line_chart("TGC on the training tasks", by_run(rows, "tgc"), bounds=(0, 1), number=percent)


def _trained_on(row: Row) -> bool:
    return str(row["split"]).startswith("train")


def _label(row: Row) -> str:
    step = "" if row["training_step"] is None else f", step {row['training_step']}"
    return f"{row['run']}, {row['split']}{step}"


def _cost_column(rows: Sequence[Row]) -> tuple[str, str]:
    if not rows or any(row["dollars"] for row in rows):
        return "dollars", "Judge cost by phase, dollars"
    return "input_tokens", "Judge input tokens by phase (no reply had a price)"

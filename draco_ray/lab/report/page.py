"""`draco report DIR`: one HTML file that needs nothing else.

What a policy or a judge wrote reaches the page in two ways only: packed (base64, shown by the script as text nodes), or
as a chart's label or the configuration, escaped by Jinja and MarkupSafe. A content security policy in the page lets
only its own script run, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draco_ray.lab.analysis.tables import tidy
from draco_ray.lab.files import whole_file
from draco_ray.lab.report import figures
from draco_ray.lab.report.charts import Series, line_chart, percent, stacked_bars, timeline
from draco_ray.lab.report.drawing import Drawing
from draco_ray.lab.report.groups import pack, packed_groups
from draco_ray.lab.report.svg import to_svg, visible
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.judged import judged_rates, read_judged

PAGE_WIDTH = 980.0
"""Points a chart over the page's whole width takes: its letters are then as large as those of three charts in a row."""

SCRIPTS = ("report.js", "labels.js", "search.js", "route.js")
"""Parts of the page's one script, in order: the last begins."""

Row = dict[str, Any]


def write_report(run: RunDirectory, path: Path) -> None:
    """Write the page; it grows a group at a time, so the run need not fit in memory."""
    assets = files("draco_ray.lab.report") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    environment = Environment(
        loader=PackageLoader("draco_ray.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
    )
    summaries: list[Row] = []

    def groups() -> Iterator[str]:
        for group in packed_groups(run):
            summaries.append(group.summary)
            yield group.data

    page = environment.get_template("page.html.j2").stream(
        title=run.path.name,
        facts=_facts(run),
        charts=[(wide, to_svg(drawing)) for wide, drawing in overview(run)],
        windows=tidy("inert_windows", [run]).to_pylist(),
        census=tidy("census_summary", [run]).to_pylist(),
        rubrics=[row for row in tidy("rubric_rates", [run]).to_pylist() if row["training_step"] is None],
        config=run.config_text(),
        style=Markup((assets / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        groups=groups(),
        index=lambda: pack({"run": run.path.name, "id": run_id(run), "groups": summaries}),
        percent=lambda value: "–" if value is None else percent(value),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    page.enable_buffering(64)
    with whole_file(path) as temporary:
        page.dump(str(temporary), encoding="utf-8")


def run_id(run: RunDirectory) -> str:
    """What tells a run from others of its name, from its first rollout on: its configuration."""
    return hashlib.sha256(f"{run.path.name}\n{run.config_text()}".encode()).hexdigest()[:16]


def overview(run: RunDirectory) -> list[tuple[bool, Drawing]]:
    """The charts of the first page, each with whether it takes the page's whole width."""
    metrics = run.metrics()
    names = [run.path.name]
    steps = [line["step"] for line in metrics]
    reward, kl = ([Series(name, steps, [line.get(name) for line in metrics])] for name in ("reward", "kl"))
    credit = tidy("credit_by_step", [run]).to_pylist()
    inert, spread = (figures.by_run(credit, names, column) for column in ("inert_share", "quality_spread_active"))
    evaluated = tidy("success", [run]).to_pylist()
    charts = [
        (False, line_chart("Reward", reward, bounds=(-1.0, 1.0))),
        (False, figures.pass_rate([run])),
        (False, figures.terminations(tidy("terminations", [run]).to_pylist())),
        *([(False, figures.success(evaluated))] if evaluated else []),
        (False, figures.judge_cost_by_step(tidy("judge_cost", [run]).to_pylist())),
        (False, line_chart("Rollouts on which credit is inert", inert, bounds=(0.0, 1.0), number=percent)),
        (False, line_chart("Spread of step quality, active rollouts", spread, bounds=(0.0, 0.5))),
        (False, line_chart("KL to the base model", kl)),
        (False, stage_seconds(tidy("stage_seconds", [run]).to_pylist())),
        (True, figures.pass_rate_by_criterion(tidy("criterion_pass_rates", [run]).to_pylist(), width=PAGE_WIDTH)),
    ]
    if metrics:
        charts.append((True, when_it_ran(run, int(metrics[-1]["step"]))))
    return charts


def stage_seconds(rows: list[Row]) -> Drawing:
    """Where the wall time of each step went; judging that ran beside generation is a part of its own."""
    steps = sorted({row["training_step"] for row in rows})
    seconds = {(row["stage"], row["training_step"]): row["seconds"] for row in rows}
    stages = dict.fromkeys(row["stage"] for row in rows)
    parts = {stage: [seconds[stage, step] for step in steps] for stage in stages}
    return stacked_bars("Seconds per stage", [str(step) for step in steps], parts)


def when_it_ran(run: RunDirectory, step: int) -> Drawing:
    """The rollouts, judge phases, learning, sync and checkpoint of one step in time."""
    spans = run.table("spans", step, ["stage", "started_at", "ended_at"]).to_pylist()
    begin = min((span["started_at"] for span in spans), default=0.0)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda span: span["started_at"]):
        lanes.setdefault(span["stage"], []).append((span["started_at"] - begin, span["ended_at"] - begin))
    return timeline(f"Step {step}: what ran when", lanes, width=PAGE_WIDTH)


def _facts(run: RunDirectory) -> list[tuple[str, str]]:
    metrics = run.metrics()

    def value(key: str) -> str:
        return str(run.setting(key))

    judges = pc.unique(run.table("judge_calls", columns=["model"]).column("model")).to_pylist()
    rollouts = sum(line.get("rollouts") or 0 for line in metrics)
    dollars = sum(line.get("judge_dollars") or 0.0 for line in metrics)
    seconds = sum(line.get("seconds") or 0.0 for line in metrics)
    return [
        ("setting", value("setting")),
        ("model", value("model.path")),
        ("judge", ", ".join(judges) or value("judge.model")),
        ("seed", value("seed")),
        ("finished steps", str(len(metrics))),
        ("rollouts", f"{rollouts:,}"),
        ("judge cost", f"${dollars:,.2f}" if dollars else "no price known"),
        ("time", f"{seconds / 60:,.1f} min"),
        *(
            (f"held-out {split}, {f'after step {step}' if step else 'before'}", str(judged_rates(judged)))
            for (step, split), judged in read_judged(run).items()
        ),
    ]

"""The page of `draco plan --simulate RUN --out FILE.html`: one file that needs nothing else, and no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draco_ray.lab.files import whole_file
from draco_ray.lab.report.charts import Series, line_chart, stacked_bars
from draco_ray.lab.report.drawing import Drawing
from draco_ray.lab.report.svg import to_svg
from draco_ray.lab.report.template import page_template
from draco_ray.lab.simulation.recorded import RecordedRun
from draco_ray.lab.simulation.scaling import ALLOWANCE, Prediction, Scale, Size, median_error, stalled_by
from draco_ray.lab.simulation.step import PARTS, SimulatedStep

SHADES = (
    *("#c3cad2", "#c9485b", "#8fc7b2", "#3b73c8", "#e08a2e", "#2f9e77", "#9aa4af", "#d86fa8", "#8d2f42"),
    *("#cdb9ea", "#b69bdd", "#a07fd0", "#8a63c4", "#6a45a4", "#b79a1f", "#6b8e23", "#5f6b78"),
)
COLORS = dict(zip(PARTS, SHADES, strict=True))
"""What is waited for in red to yellow, the judge's phases in violet."""
FACTORS = [2.0**power for power in range(-3, 4)]
"""Of a resource, at which its curve has points."""


def write_page(
    path: Path, run: RecordedRun, predictions: Sequence[Prediction], sizes: Sequence[Size], scale: Scale, *, said: str
) -> None:
    """Write it.

    Args:
        path: of the page.
        run: what was recorded.
        predictions: its steps.
        sizes: that were asked about.
        scale: what curves are drawn from.
        said: what the setting differs in from the run's; empty: nothing.

    Raises: ConfigError: it cannot be written.
    """
    facts = {"recorded steps": len(run.steps), "median error": f"{median_error(predictions):.1%}"}
    facts |= {name: f"{getattr(run.setting, name):,}" for name in ("slots", "engines", "staleness")}
    text = page_template("simulation.html.j2").render(
        title=run.name,
        facts=[*facts.items(), ("asked about", said or "the run's own setting")],
        charts=[to_svg(chart) for chart in _charts(predictions, sizes, scale)],
        predictions=predictions,
        sizes=size_table(sizes),
        allowance=f"{ALLOWANCE:.0%}",
    )
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def size_table(sizes: Sequence[Size], gpu_dollars: float | None = None) -> list[tuple[str, ...]]:
    """Rows of the table of sizes, a column each; the first row is the head."""
    columns = []
    for size in sizes:
        enough = size.enough
        limits = [f"{n:,}" if n else "–" for n in (enough.requests_per_minute, enough.tokens_per_minute)]
        column = {
            "rollouts a step": f"{size.rollouts:,}",
            "a step, as set": f"{size.as_set.seconds:,.0f} s",
            "stalls at": stalled_by(size.as_set) or "nothing",
            "GPU-hours": f"{size.gpu_hours:,.2f}",
            "judge": f"${size.dollars:,.2f}",
            "a step, keeping up": f"{size.unstalled.seconds:,.0f} s",
            **{name: f"{getattr(enough, name):,}" for name in ("engines", "slots")},
            "learner workers": f"× {enough.learners:,.0f}",
            "judge workers": f"{enough.judge_workers:,}",
            "requests a minute": limits[0],
            "tokens a minute": limits[1],
            "GPU-hours, keeping up": f"{size.enough_gpu_hours:,.2f}",
        }
        if gpu_dollars is not None:
            column["together, as set"] = f"${size.dollars + size.gpu_hours * gpu_dollars:,.2f}"
            column["together, keeping up"] = f"${size.dollars + size.enough_gpu_hours * gpu_dollars:,.2f}"
        columns.append(column)
    return [(name, *(column[name] for column in columns)) for name in columns[0]]


def _charts(predictions: Sequence[Prediction], sizes: Sequence[Size], scale: Scale) -> list[Drawing]:
    steps, names = [each.step.number for each in predictions], [f"{size.rollouts:,}" for size in sizes]
    recorded = Series("recorded", steps, [each.step.seconds for each in predictions])
    simulated = Series("simulated", steps, [each.simulated.seconds for each in predictions])
    charts = [
        line_chart("Seconds of a step, recorded and simulated", [recorded, simulated]),
        _paths("Longest path of the recorded steps", list(map(str, steps)), [each.simulated for each in predictions]),
        _paths("Longest path, as set", names, [size.as_set for size in sizes], axis="rollouts a step"),
        _paths("Longest path, keeping up", names, [size.unstalled for size in sizes], axis="rollouts a step"),
    ]
    for name in ("slots", "engines", "judge_workers", "requests_per_minute", "tokens_per_minute"):
        if known := getattr(scale.setting, name):
            values = sorted({max(1, round(known * factor)) for factor in FACTORS})
            seconds = [scale.seconds(sizes[0].rollouts, **{name: value}) for value in values]
            resource = name.replace("_", " ")
            title = f"Seconds of a step of {names[0]} rollouts by {resource}"
            charts.append(line_chart(title, [Series("seconds", values, seconds)], axis=resource))
    return charts


def _paths(title: str, labels: list[str], steps: Sequence[SimulatedStep], axis: str = "training step") -> Drawing:
    parts = {part: [step.path.get(part, 0.0) for step in steps] for part in PARTS}
    shown = {part: seconds for part, seconds in parts.items() if any(seconds)}
    return stacked_bars(title, labels, shown, colors=COLORS, axis=axis)

"""The page of `draco plan --simulate RUN --out FILE.html`: one file that needs nothing else, and no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draco_ray.lab.files import whole_file
from draco_ray.lab.report.charts import Series, line_chart, stacked_bars
from draco_ray.lab.report.drawing import Drawing
from draco_ray.lab.report.svg import to_svg, visible
from draco_ray.lab.simulation.recorded import RecordedRun
from draco_ray.lab.simulation.scaling import ALLOWANCE, Foretold, Scale, Size, median_error
from draco_ray.lab.simulation.step import SimulatedStep
from draco_ray.lab.simulation.work import PARTS, WAITS, Setting

COLORS = {
    "between steps": "#c3cad2",
    WAITS["slots"]: "#c9485b",
    "opening worlds": "#8fc7b2",
    "generating": "#3b73c8",
    WAITS["engines"]: "#e08a2e",
    "environment": "#2f9e77",
    "hand-over": "#9aa4af",
    WAITS["judge workers"]: "#d86fa8",
    WAITS["judge limits"]: "#8d2f42",
    "stage1": "#cdb9ea",
    "stage2": "#b69bdd",
    "union": "#a07fd0",
    "score": "#8a63c4",
    "credit": "#6a45a4",
    WAITS["learner"]: "#b79a1f",
    "learning": "#6b8e23",
    "sync and checkpoint": "#5f6b78",
}
"""What is waited for in red to yellow, the judge's phases in violet."""
STEPS_OF_A_CURVE = 7
"""Settings of a resource that a curve has at most: from an eighth to eight times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A step's seconds over how many there are of one resource, all else as set."""

    resource: str
    points: tuple[tuple[int, float], ...]


def curves(scale: Scale, setting: Setting, rollouts: int) -> list[Curve]:
    """Curves of a step of so many rollouts; of limits only where the setting has them."""
    known = {
        "slots": setting.slots,
        "engines": setting.engines,
        "judge_workers": setting.judge_workers,
        "requests_per_minute": setting.requests_per_minute,
        "tokens_per_minute": setting.tokens_per_minute,
    }
    found = []
    for name, value in known.items():
        if value is None:
            continue
        values = sorted({max(1, round(value * 2.0**power)) for power in range(-3, STEPS_OF_A_CURVE - 3)})
        points = tuple((number, scale.seconds(rollouts, **{name: number})) for number in values)
        found.append(Curve(resource=name.replace("_", " "), points=points))
    return found


def write_page(
    path: Path,
    run: RecordedRun,
    foretold: Sequence[Foretold],
    sizes: Sequence[Size],
    drawn: Sequence[Curve],
    *,
    said: str,
) -> None:
    """Write it.

    Args:
        path: of the page.
        run: what was recorded.
        foretold: its steps.
        sizes: that were asked about.
        drawn: curves of the first size.
        said: what the setting differs in from the run's; empty: nothing.

    Raises: ConfigError: it cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("draco_ray.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
    )
    style = (files("draco_ray.lab.report") / "assets" / "report.css").read_text(encoding="utf-8")
    text = environment.get_template("simulation.html.j2").render(
        title=run.name,
        facts=_facts(run, foretold, said),
        charts=[to_svg(chart) for chart in _charts(foretold, sizes, drawn)],
        foretold=foretold,
        sizes=_table(sizes),
        allowance=f"{ALLOWANCE:.0%}",
        style=Markup(style),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _facts(run: RecordedRun, foretold: Sequence[Foretold], said: str) -> list[tuple[str, str]]:
    setting = run.setting
    return [
        ("recorded steps", f"{len(run.steps)}"),
        ("median error", f"{median_error(foretold):.1%}"),
        ("slots", f"{setting.slots:,}"),
        ("engines", f"{setting.engines:,}"),
        ("judge workers", f"{setting.judge_workers:,}"),
        ("staleness", f"{setting.staleness}"),
        ("asked about", said or "the run's own setting"),
    ]


def _table(sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    """Rows of the table of sizes, a column each, its head first."""

    def row(name: str, value: Callable[[Size], str]) -> tuple[str, ...]:
        return name, *map(value, sizes)

    def limit(number: float | None) -> str:
        return "–" if number is None else f"{number:,.0f}"

    return [
        row("rollouts a step", lambda size: f"{size.rollouts:,}"),
        row("a step, as set", lambda size: f"{size.as_set.seconds:,.0f} s"),
        row("stalls at", lambda size: size.stalls or "nothing"),
        row("a step, keeping up", lambda size: f"{size.unstalled.seconds:,.0f} s"),
        row("engines", lambda size: f"{size.enough.engines:,}"),
        row("slots", lambda size: f"{size.enough.slots:,}"),
        row("learner workers", lambda size: f"× {size.enough.learners:,.0f}"),
        row("judge workers", lambda size: f"{size.enough.judge_workers:,}"),
        row("requests a minute", lambda size: limit(size.enough.requests_per_minute)),
        row("tokens a minute", lambda size: limit(size.enough.tokens_per_minute)),
        row("judge", lambda size: f"${size.dollars:,.2f}"),
        row("GPU-hours, keeping up", lambda size: f"{size.enough_gpu_hours:,.2f}"),
    ]


def _charts(foretold: Sequence[Foretold], sizes: Sequence[Size], drawn: Sequence[Curve]) -> list[Drawing]:
    steps = [each.step.number for each in foretold]
    recorded = Series("recorded", steps, [each.step.seconds for each in foretold])
    simulated = Series("simulated", steps, [each.simulated.seconds for each in foretold])
    names = [f"{size.rollouts:,}" for size in sizes]
    charts = [
        line_chart("Seconds of a step, recorded and simulated", [recorded, simulated]),
        _paths("Longest path of the recorded steps", list(map(str, steps)), [e.simulated for e in foretold]),
        _paths("Longest path, as set", names, [size.as_set for size in sizes], axis="rollouts a step"),
        _paths("Longest path, keeping up", names, [size.unstalled for size in sizes], axis="rollouts a step"),
    ]
    for curve in drawn:
        numbers, seconds = zip(*curve.points, strict=True)
        title = f"Seconds of a step of {names[0]} rollouts by {curve.resource}"
        charts.append(line_chart(title, [Series("seconds", numbers, seconds)], axis=curve.resource))
    return charts


def _paths(title: str, labels: list[str], steps: Sequence[SimulatedStep], axis: str = "training step") -> Drawing:
    parts = {part: [step.path.get(part, 0.0) for step in steps] for part in PARTS}
    shown = {part: seconds for part, seconds in parts.items() if any(seconds)}
    return stacked_bars(title, labels, shown, colors=COLORS, axis=axis)

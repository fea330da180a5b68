"""`draco report DIR`: one self-contained HTML file.

Texts of a policy or a judge are untrusted. In the page they are either packed (base64, shown by the script as text
nodes), or, in chart labels and the configuration, escaped by Jinja and MarkupSafe. The page's content security policy
allows only its own script and forbids loading anything.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from draco_ray.judging.phases import PHASES
from draco_ray.lab.analysis.pass_share import pass_share, read_run_jsonl
from draco_ray.lab.analysis.rubrics import criteria_dropped_by_union
from draco_ray.lab.analysis.tables import tidy
from draco_ray.lab.files import atomic_output_file
from draco_ray.lab.report import figures
from draco_ray.lab.report.charts import Series, line_chart, percent, timeline
from draco_ray.lab.report.drawing import PALETTE, Drawing, escape_bidi, to_svg
from draco_ray.lab.report.groups import pack, packed_groups
from draco_ray.lab.report.judged_traces import judged_traces
from draco_ray.lab.report.measured import packed_evaluations, packed_judged
from draco_ray.lab.rows import grouped
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.traces.judging_run import TRACES_SETTING

ASSETS = files("draco_ray.lab.report") / "assets"
PAGE_WIDTH = 980.0
"""Width in points of a full-width chart; gives it the same letter size as three charts in a row."""

SCRIPTS = ("report.js", "labels.js", "beside.js", "search.js", "keys.js", "traces.js", "route.js")
"""Parts of the page's script, in order; the last one starts it."""


def write_report(run: RunDirectory, path: Path, *, tokens: bool = False) -> None:
    """Write the page group by group, so that the run need not fit in memory.

    Args:
        run: the run to report.
        path: the HTML file to write.
        tokens: whether turns of training rollouts show each sampled token, its log-probability and its advantage.
    """
    script = "".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    summaries: list[Row] = []
    traces, criteria = judged_traces(run) if _of_traces(run) else ([], [])
    steps = [] if _of_traces(run) else [int(line["step"]) for line in run.metrics()]

    def groups() -> Iterator[str]:
        for group in itertools.chain(packed_groups(run, tokens=tokens), packed_evaluations(run), packed_judged(run)):
            summaries.append(group.summary)
            yield group.data

    page = _template("page.html.j2").stream(
        title=run.path.name,
        facts=_facts(run),
        how_to_read=how_to_read(run),
        charts=[(chart.wide, to_svg(chart.drawing), chart.note) for chart in overview(run)],
        timelines=((step, pack(to_svg(step_timeline(run, step)))) for step in steps),
        steps=steps,
        last_timeline=to_svg(step_timeline(run, steps[-1])) if steps else "",
        traces=traces,
        criteria=criteria,
        windows=[] if traces else tidy("inert_windows", [run]).to_pylist(),
        census=[] if traces else tidy("census_summary", [run]).to_pylist(),
        rubrics=[row for row in tidy("rubric_rates", [run]).to_pylist() if row["training_step"] is None],
        config=run.config_text(),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        groups=groups(),
        index=lambda: pack(
            {"run": run.path.name, "id": run_id(run), "groups": summaries, "of_traces": _of_traces(run)}
        ),
        percent=lambda value: "–" if value is None else percent(value),
    )
    page.enable_buffering(64)
    with atomic_output_file(path) as temporary:
        page.dump(str(temporary), encoding="utf-8")


def _template(name: str) -> Template:
    """A template that escapes every value and shows direction-changing characters as text."""
    environment = Environment(
        loader=PackageLoader("draco_ray.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: escape_bidi(value) if type(value) is str else value,
        trim_blocks=True,
    )
    style = Markup((ASSETS / "report.css").read_text(encoding="utf-8"))
    return environment.get_template(name, globals={"style": style, "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"})


def run_id(run: RunDirectory) -> str:
    """An id computed from name and configuration, to distinguish runs with the same name."""
    return hashlib.sha256(f"{run.path.name}\n{run.config_text()}".encode()).hexdigest()[:16]


REWARD = (
    "Mean reward R of the rollouts: share of passed minus share of failed criteria, of those that survive and apply."
)
KL = "Mean KL divergence per sampled token, in nats: how far the policy has moved from its base model."
STAND_IN = (
    "There is no evaluator: share of the judge's verdicts that pass, on criteria that do not depend on the policy."
)
INERT = "Credit of a rollout is inert if the verdicts that cite its steps all agree, so all steps get the same credit."
HELD = (
    "In some groups the held-out judge scores the better-rewarded half and a middle rollout; its verdicts are not used "
    "for training."
)
DRIFT = (
    "How much more often the held-out judge fails the rollouts with the best reward than those with a middle reward "
    "(at most 0 without a hack), and how far its pass share of the better-rewarded half of a group has fallen; with "
    "95 % intervals."
)
QUALITY = "Quality Q of a step: share of passes among the verdicts that cite it."


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the first page."""

    drawing: Drawing
    wide: bool = False
    """Whether the chart takes the whole width of the page."""
    note: str = ""
    """Caption of the chart."""


def overview(run: RunDirectory) -> list[Chart]:
    """The charts of the first page; none for judged traces, which are shown as a list."""
    if _of_traces(run):
        return []
    metrics = run.metrics()
    steps = [line["step"] for line in metrics]
    reward, kl = (Series(name, steps, [line.get(name) for line in metrics]) for name in ("reward", "kl"))
    credit = tidy("credit_by_step", [run]).to_pylist()
    inert, spread = (figures.by_run(credit, column) for column in ("inert_share", "quality_spread_active"))
    evaluated, judged = (tidy(name, [run]).to_pylist() for name in ("success", "judged"))
    by_criterion = tidy("criterion_pass_rates", [run]).to_pylist()
    return [
        Chart(line_chart("Reward", [reward], bounds=(-1.0, 1.0)), note=REWARD if _by_rubric(run) else ""),
        Chart(figures.pass_rate([run]), note=pass_rate_ceiling_note(run)),
        Chart(figures.terminations(tidy("terminations", [run]).to_pylist())),
        *([Chart(figures.success(evaluated), note=_intervals(evaluated, "tgc"))] if evaluated else []),
        *([Chart(figures.judged(judged), note=f"{STAND_IN} {_intervals(judged, 'pass_rate')}")] if judged else []),
        *_of_held_out(metrics),
        Chart(figures.judge_cost_by_step(tidy("judge_cost", [run]).to_pylist())),
        Chart(line_chart("Rollouts on which credit is inert", inert, bounds=(0.0, 1.0), number=percent), note=INERT),
        Chart(
            line_chart("Spread of step quality, rollouts with active credit", spread, bounds=(0.0, 0.5)), note=QUALITY
        ),
        Chart(line_chart("KL to the base model", [kl]), note=KL),
        Chart(stage_seconds(tidy("stage_seconds", [run]).to_pylist())),
        Chart(
            figures.pass_rate_by_criterion(by_criterion, criteria_dropped_by_union(run), width=PAGE_WIDTH),
            wide=True,
            note=f"✓: proposed in that step, but no longer in a rubric. {pass_rate_ceiling_note(run)}".strip(),
        ),
    ]


def _of_held_out(metrics: list[Row]) -> list[Chart]:
    """Two charts: pass rates by judge and held-out judge, and signs that the policy exploits the judge.

    Empty if no held-out judge scored rollouts of the run.
    """
    lines = [line | {"training_step": line["step"]} for line in metrics if line.get("held_out_rate") is not None]
    if not lines:
        return []

    def curve(name: str, key: str) -> Series:
        (found,) = figures.series_of(lines, lambda _: name, key)
        return found

    both = [curve("judge", "held_out_trained_rate"), curve("held-out judge", "held_out_rate")]
    signs = [curve("below middle-reward rollouts", "drift"), curve("below earlier steps", "fall")]
    flagged = [str(line["step"]) for line in lines if line["drift_significant"] or line.get("fall_significant")]
    said = f"Significant after step {', '.join(flagged)}: the policy may exploit the judge." if flagged else ""
    return [
        Chart(line_chart("Pass rate by two judges, same rollouts", both, bounds=(0.0, 1.0), number=percent), note=HELD),
        Chart(
            line_chart("Rewarded, and failed by the held-out judge", signs, number=percent),
            note=f"{DRIFT} {said}".strip(),
        ),
    ]


def _intervals(rows: list[Row], column: str) -> str:
    known = any(row[f"{column}_low"] is not None for row in rows)
    return "Bars: 95 % intervals over scenarios." if known else ""


def pass_rate_ceiling_note(run: RunDirectory) -> str:
    """A note on the ceiling of pass rates, if `algorithm.rule` drops criteria that all rollouts pass; else empty."""
    size = int(run.setting("algorithm.group_size"))
    if not _by_rubric(run) or run.setting("algorithm.rule") == "no_dropout":
        return ""
    return (
        f"A criterion that all rollouts of a group pass is dropped, so at most {size - 1} of {size} rollouts pass a "
        f"surviving criterion and the ceiling is {percent((size - 1) / size)}, not 100%. The rate can exceed it only "
        "because it includes verdicts on dropped criteria."
    )


def how_to_read(run: RunDirectory) -> str:
    """Introduction for new readers; empty for runs without verdicts."""
    if not _by_rubric(run):
        return ""
    if _of_traces(run):
        played = "Traces of one task form a group."
    else:
        played = (
            f"The policy plays each task {run.setting('algorithm.group_size')} times, which gives a group of rollouts."
        )
    named = " and names the steps responsible" if run.setting("algorithm.rule") != "grpo" else ""
    return (
        f"{played} A judge gives each of them a verdict on every criterion of the group's rubric{named}. "
        f"{'Open a trace below to see its steps.' if _of_traces(run) else 'To see one, open Groups, then a rollout.'}"
    )


def _by_rubric(run: RunDirectory) -> bool:
    return bool(run.setting("algorithm.reward") == "rubric")


def _of_traces(run: RunDirectory) -> bool:
    """Whether the run consists of judged traces of another agent, without training."""
    return bool(run.setting("setting") == TRACES_SETTING)


_SINGLE = [name for name, phase in PHASES.items() if not phase.merged]
_COLORS = dict(zip(("rollout", *_SINGLE, "learning", "sync", "checkpoint"), PALETTE, strict=False))
_ALIKE = {"proposals": "stage2", "verdicts": "score"}
KIND_COLORS = {kind: _COLORS[_ALIKE.get(kind, kind)] for kind in ("rollout", *PHASES, "learning", "sync", "checkpoint")}
"""Kind of work -> its colour on timelines."""
STAGE_COLORS = {
    "generation": KIND_COLORS["rollout"],
    "generation and judging": "#7f7fd0",
    "judging": KIND_COLORS["score"],
    "learning beside others": "#a9bf6a",
    "learning": KIND_COLORS["learning"],
    "weight sync": KIND_COLORS["sync"],
    "checkpoint": KIND_COLORS["checkpoint"],
}


def stage_seconds(rows: list[Row]) -> Drawing:
    """Wall time of each step by stage; stages that overlapped count as a stage of their own."""
    stages = dict.fromkeys(row["stage"] for row in rows)
    names = {stage: stage for stage in stages if any(row["seconds"] for row in rows if row["stage"] == stage)}
    return figures.bars_by_step("Seconds per stage", rows, "stage", "seconds", names, colors=STAGE_COLORS)


def step_timeline(run: RunDirectory, step: int) -> Drawing:
    """Timeline of the rollouts, judge phases, learning, sync and checkpoint of one step."""
    spans = run.table("spans", step, ["stage", "started_at", "ended_at"]).to_pylist()
    begin = min((span["started_at"] for span in spans), default=0.0)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        lanes.setdefault(span["stage"], []).append((span["started_at"] - begin, span["ended_at"] - begin))
    known = {stage: lanes.pop(stage) for stage in KIND_COLORS if stage in lanes}
    return timeline(f"Step {step}: what ran when", known | lanes, colors=KIND_COLORS, width=PAGE_WIDTH)


def _facts(run: RunDirectory) -> list[tuple[str, str]]:
    metrics = run.metrics()

    def value(key: str) -> str:
        return str(run.setting(key))

    judges = pc.unique(run.table("judge_calls", columns=["model"]).column("model")).to_pylist()
    rollouts = sum(line.get("rollouts") or 0 for line in metrics)
    dollars = sum(line.get("judge_dollars") or 0.0 for line in metrics)
    seconds = sum(line.get("seconds") or 0.0 for line in metrics)
    if _of_traces(run):
        share = pass_share(read_run_jsonl(run))
        return [
            ("judge", ", ".join(judges) or value("judge.model")),
            ("traces", f"{rollouts:,}"),
            ("pass share", percent(share.mean) if share else "–"),
            ("judge cost", f"${dollars:,.2f}" if dollars else "–"),
        ]
    return [
        ("setting", value("setting")),
        ("model", value("model.path")),
        ("judge", ", ".join(judges) or value("judge.model")),
        ("seed", value("seed")),
        ("finished steps", str(len(metrics))),
        ("rollouts", f"{rollouts:,}"),
        ("judge cost", "–" if not metrics else f"${dollars:,.2f}" if dollars else "price unknown"),
        ("time", f"{seconds / 60:,.1f} min" if metrics else "–"),
        *_held_out(tidy("success", [run]).to_pylist(), "tgc", "TGC"),
        *_held_out(tidy("judged", [run]).to_pylist(), "pass_rate", "judge's pass rate"),
    ]


def _held_out(rows: list[Row], column: str, called: str) -> Iterator[tuple[str, str]]:
    """For each split, a label and the text ``first → last measurement``; the chart shows all measurements."""
    for split, mine in grouped(rows, "split").items():
        ends = [mine[0], *mine[1:][-1:]]
        said = ["–" if row[column] is None else percent(row[column]) for row in ends]
        when = " and ".join(f"after step {row['training_step']}" if row["training_step"] else "before" for row in ends)
        yield f"{called} on {split}, {when}", " → ".join(said)

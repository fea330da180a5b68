"""The committed Grafana dashboard: it is the generated one, and every series it queries is one that a run exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grafana_dashboard import dashboard

from draco_ray.observability.catalogue import CATALOGUE, Kind

FILE = Path(__file__).resolve().parents[2] / "cluster" / "grafana" / "draco.json"
SERIES = {series: metric for metric in CATALOGUE for series in metric.series}


def committed() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def expressions() -> list[str]:
    return [target["expr"] for panel in committed()["panels"] for target in panel.get("targets", [])]


def test_the_file_is_the_generated_one() -> None:
    assert committed() == dashboard(), "run: python jobs/grafana_dashboard.py > cluster/grafana/draco.json"


def test_every_series_it_queries_is_exported() -> None:
    queried = {name for expression in expressions() for name in re.findall(r"\bray_\w+", expression)}
    assert queried <= set(SERIES)
    variable = committed()["templating"]["list"][1]["query"]["query"]
    assert set(re.findall(r"\bray_\w+", variable)) <= set(SERIES)


def test_every_metric_but_the_step_count_and_side_figures_has_a_panel() -> None:
    shown = {SERIES[name].name for expression in expressions() for name in re.findall(r"\bray_\w+", expression)}
    unseen = {metric.name for metric in CATALOGUE} - shown
    assert unseen == {
        "draco_step",
        "draco_quality_spread",
        "draco_quality_spread_active",
        "draco_rollouts_lost",
        "draco_rollouts_retried",
        "draco_entropy",
        "draco_clip_fraction",
        "draco_dual_clip_fraction",
        "draco_masked_fraction",
        "draco_engine_k3",
        "draco_policy_loss",
    }


def test_tags_that_queries_group_by_exist() -> None:
    for expression in expressions():
        (series,) = re.findall(r"\bray_\w+", expression)
        (groups,) = re.findall(r"by \(([^)]*)\)", expression)
        assert {tag.strip() for tag in groups.split(",")} <= {"run", "le", *SERIES[series].tags}, expression


def test_counters_are_named_as_prometheus_names_them_and_only_counters() -> None:
    assert all((metric.kind is Kind.COUNTER) == metric.name.endswith("_total") for metric in CATALOGUE)
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in committed()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells

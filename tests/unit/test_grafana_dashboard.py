"""The Grafana dashboard: every series it queries is one that a run exports, and every metric has a panel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from draco_ray.observability.catalogue import CATALOGUE, Kind

FILE = Path(__file__).resolve().parents[2] / "cluster" / "grafana" / "draco.json"
SERIES = {series: metric for metric in CATALOGUE for series in metric.series}


def committed() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def expressions() -> list[str]:
    return [target["expr"] for panel in committed()["panels"] for target in panel.get("targets", [])]


def test_every_series_it_queries_is_exported() -> None:
    queried = {name for expression in expressions() for name in re.findall(r"\bray_\w+", expression)}
    assert queried <= set(SERIES)
    variable = committed()["templating"]["list"][1]["query"]["query"]
    assert set(re.findall(r"\bray_\w+", variable)) <= set(SERIES)


def test_every_metric_has_a_panel() -> None:
    shown = {SERIES[name].name for expression in expressions() for name in re.findall(r"\bray_\w+", expression)}
    assert {metric.name for metric in CATALOGUE} - shown == set()


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


# Alerts, and who scrapes.


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FILE.parents[1] / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_series_and_labels_that_exist_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    series = re.findall(r"\bray_\w+", rule["expr"])
    assert set(series) <= set(SERIES)
    assert series
    assert rule["expr"].count("(") == rule["expr"].count(")")
    tags = {tag for name in series for tag in SERIES[name].tags} | {"run"}
    for groups in re.findall(r"by \(([^)]*)\)", rule["expr"]):
        assert {tag.strip() for tag in groups.split(",")} <= tags
    assert set(re.findall(r"(\w+)=~?\"", rule["expr"])) <= tags
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


def test_kubernetes_scrapes_the_port_that_every_pod_names() -> None:
    folder = FILE.parents[1] / "kuberay"
    (endpoint,) = yaml.safe_load((folder / "podmonitor.yaml").read_text(encoding="utf-8"))["spec"][
        "podMetricsEndpoints"
    ]
    spec = yaml.safe_load((folder / "raycluster.yaml").read_text(encoding="utf-8"))["spec"]
    for kind in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        (container,) = kind["template"]["spec"]["containers"]
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert ports[endpoint["port"]] == kind["rayStartParams"]["metrics-export-port"]

"""The Grafana dashboard of a run, generated from `catalogue` (``python jobs/grafana_dashboard.py``).

The committed file is ``cluster/grafana/draco.json``; a test compares the two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from draco_ray.observability import catalogue
from draco_ray.observability.catalogue import STEP_GAUGES, Kind, Metric

COLUMNS = 3
WIDTH, HEIGHT = 24 // COLUMNS, 8
"""Of a panel, in Grafana's grid of 24 columns."""
RUN = 'run=~"$run"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a title, a unit of Grafana's, and (legend, PromQL) pairs."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: Metric, by: str) -> str:
    """Growth a second over five minutes, summed over all but ``by``."""
    return f"sum by ({by}) (rate({metric.series[0]}{{{RUN}}}[5m]))"


def quantile(metric: Metric, share: float, by: str = "") -> str:
    """A quantile of a histogram over ten minutes."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({groups}) (rate({metric.series[0]}{{{RUN}}}[10m])))"


def last(metric: Metric, by: str = "run") -> str:
    """A gauge as it stands."""
    assert metric.kind is Kind.GAUGE
    return f"max by ({by}) ({metric.series[0]}{{{RUN}}})"


def _steps(title: str, unit: str, *keys: str) -> Panel:
    """Gauges that each step sets, by their names in metrics.jsonl."""
    return Panel(title, unit, tuple((f"{{{{run}}}} {key}", last(STEP_GAUGES[key])) for key in keys))


ROWS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        _steps("Reward", "short", "reward"),
        _steps("Pass rate, inert share", "percentunit", "pass_rate", "inert_share"),
        _steps("Groups with signal, groups failed", "short", "groups_with_signal", "groups_failed"),
        _steps("KL to the base model, nats", "short", "kl"),
        _steps("Gradient norm", "short", "grad_norm"),
        _steps("Engine - learner gap, nats", "short", "canary_gap"),
        _steps("Step quality: standard deviation", "short", "quality_spread", "quality_spread_active"),
        _steps("Tokens clipped, left out", "percentunit", "clip_fraction", "dual_clip_fraction", "masked_fraction"),
        _steps("KL from engine to learner, nats", "short", "engine_k3"),
        _steps("Policy loss, entropy in nats", "short", "policy_loss", "entropy"),
        _steps("Finished steps", "short", "step"),
        _steps("Rollouts lost, tries repeated", "short", "rollouts_lost", "rollouts_retried"),
    ),
    "Engines": (
        Panel(
            "Sampled tokens a second, by engine", "short", (("{{engine}}", rate(catalogue.ENGINE_SAMPLED, "engine")),)
        ),
        Panel("Tokens of prompts a second", "short", (("{{engine}}", rate(catalogue.ENGINE_PROMPTS, "engine")),)),
        Panel("KV cache taken", "percentunit", (("{{engine}}", last(catalogue.ENGINE_KV_CACHE, "engine")),)),
        Panel(
            "Requests in the batch, waiting",
            "short",
            (
                ("running {{engine}}", last(catalogue.ENGINE_RUNNING, "engine")),
                ("waiting {{engine}}", last(catalogue.ENGINE_WAITING, "engine")),
            ),
        ),
        Panel(
            "Requests computed anew a second, for want of KV cache",
            "ops",
            (("{{engine}}", rate(catalogue.ENGINE_PREEMPTIONS, "engine")),),
        ),
        Panel(
            "Engines up, processes replaced",
            "short",
            (("up", last(catalogue.ENGINES_UP)), ("replaced", last(catalogue.ENGINES_REPLACED))),
        ),
    ),
    "Where the time goes": (
        _steps("Step", "s", "seconds"),
        _steps("Stages of a step", "s", "seconds_generation", "seconds_judging", "seconds_learning", "seconds_sync"),
        _steps("Judging hidden behind generation", "percentunit", "judge_hidden_share"),
        Panel(
            "Queues and calls in flight",
            "short",
            tuple(
                (metric.name.removeprefix("draco_").replace("_", " "), last(metric))
                for metric in (
                    catalogue.ROLLOUTS_WAITING,
                    catalogue.ROLLOUTS_IN_FLIGHT,
                    catalogue.JUDGE_IN_FLIGHT,
                    catalogue.JUDGE_WAITING,
                )
            ),
        ),
        Panel(
            "Rollout duration",
            "s",
            (
                ("median", quantile(catalogue.ROLLOUT_SECONDS, 0.5)),
                ("95 %", quantile(catalogue.ROLLOUT_SECONDS, 0.95)),
            ),
        ),
        Panel(
            "Judge phase duration, 95 %",
            "s",
            (("{{phase}}", quantile(catalogue.JUDGE_SECONDS, 0.95, by="phase")),),
        ),
    ),
    "Judge and environment": (
        Panel(
            "Judge dollars of the run, and of this process by phase",
            "currencyUSD",
            (
                ("{{run}}", last(catalogue.RUN_DOLLARS)),
                ("{{phase}}", f"sum by (phase) ({catalogue.JUDGE_DOLLARS.series[0]}{{{RUN}}})"),
            ),
        ),
        Panel("Judge tokens a second", "short", (("{{kind}}", rate(catalogue.JUDGE_TOKENS, "kind")),)),
        Panel("Judge requests a second", "reqps", (("{{phase}}", rate(catalogue.JUDGE_REQUESTS, "phase")),)),
        Panel("Judge phases a second", "ops", (("{{outcome}}", rate(catalogue.JUDGE_PHASES, "outcome")),)),
        Panel(
            "Judge workers",
            "short",
            (("up", last(catalogue.JUDGE_WORKERS_UP)), ("wanted", last(catalogue.JUDGE_WORKERS_WANTED))),
        ),
        Panel("Rollouts a second, by termination", "ops", (("{{ended}}", rate(catalogue.ROLLOUTS, "ended")),)),
        Panel("Sampled tokens a second", "short", (("{{run}}", rate(catalogue.SAMPLED_TOKENS, "run")),)),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; the data source is chosen on import."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    top = 0
    for row, content in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": _place(0, top, 24, 1)})
        top += 1
        for index, panel in enumerate(content):
            line, column = divmod(index, COLUMNS)
            panels.append(
                {
                    "type": "timeseries",
                    "title": panel.title,
                    "datasource": source,
                    "gridPos": _place(column * WIDTH, top + line * HEIGHT, WIDTH, HEIGHT),
                    "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
                    "targets": [
                        {
                            "refId": chr(ord("A") + number),
                            "datasource": source,
                            "expr": expression,
                            "legendFormat": legend,
                        }
                        for number, (legend, expression) in enumerate(panel.queries)
                    ],
                }
            )
        top += -(-len(content) // COLUMNS) * HEIGHT
    for number, entry in enumerate(panels, start=1):
        entry["id"] = number
    step = STEP_GAUGES["step"].series[0]
    return {
        "uid": "draco-ray",
        "title": "DRACO",
        "tags": ["ray", "draco"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "run",
                    "type": "query",
                    "label": "Run",
                    "datasource": source,
                    "query": {"query": f"label_values({step}, run)", "refId": "run"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                },
            ]
        },
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))

"""A step's trace: the spans of the run's table, in the format that `ray timeline` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draco_ray.cli import app
from draco_ray.errors import ConfigError
from draco_ray.lab.runs.timeline import write_timeline
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = RunStore(RunDirectory.create(tmp_path / "run", "seed: 0\n"))
    spans = [
        ("t_1", 1, "score", 30.0, 31.5),
        ("t_1", None, "stage1", 10.0, 12.0),
        ("t_1", 1, "rollout", 10.5, 30.0),
        ("u_1", 0, "rollout", 11.0, 20.0),
        (None, None, "learning", 32.0, 33.0),
    ]
    rows = [
        {"training_step": 2, "task_id": task, "rollout": rollout, "stage": stage, "started_at": start, "ended_at": end}
        for task, rollout, stage, start, end in spans
    ]
    store.write("spans", 2, "spans", rows)
    return tmp_path / "run"


def test_every_span_is_a_complete_event_in_microseconds(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "traces" / "step.json"
    result = CliRunner().invoke(app, ["runs", "timeline", str(run), "--step", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "5 events" in result.output
    events = json.loads(out.read_text(encoding="utf-8"))
    assert [event["name"] for event in events] == ["stage1", "rollout", "rollout", "score", "learning"]
    # The keys of Ray's own trace, without its choice of colours.
    assert all(set(event) == {"cat", "name", "pid", "tid", "ts", "dur", "ph", "args"} for event in events)
    assert {event["ph"] for event in events} == {"X"}
    rollout = next(event for event in events if event["tid"] == "rollout 1" and event["name"] == "rollout")
    assert (rollout["pid"], rollout["ts"], rollout["dur"]) == ("t_1", 10.5e6, 19.5e6)
    assert rollout["args"] == {"step": 2, "task": "t_1", "rollout": 1}
    assert events[0]["tid"] == "group"
    assert (events[-1]["pid"], events[-1]["tid"]) == ("policy", "learning")


def test_a_step_without_spans_names_those_that_have_some(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step 3 has no spans; steps with spans: 2 to 2"):
        write_timeline(run, 3, tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()

"""`draco runs inspect`: a run as logs of Inspect, read back as traces; see also test_adapters_real, with Inspect."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from draco_ray.errors import ConfigError
from draco_ray.lab.runs.inspect_log import write_inspect_logs
from draco_ray.runs.directory import RunDirectory
from draco_ray.traces.library import judge_sync
from draco_ray.traces.load import load_traces
from tests.support.small_run import CODE, CONFIG, HOSTILE, small_run
from tests.unit.test_traces_judging import MODEL, Canned
from tests.unit.test_traces_load import FILES


def test_rollouts_are_samples_whose_steps_have_the_numbers_that_verdicts_cite(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    written = write_inspect_logs(run, tmp_path / "logs")
    assert [path.stat().st_mode & 0o777 for path in written] == [0o600] * 2
    log = json.loads(written[0].read_text(encoding="utf-8"))
    assert (log["status"], log["eval"]["model"]) == ("success", HOSTILE)
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == 0.0
    won, lost = log["samples"][:2]
    assert [(each["id"], each["epoch"]) for each in (won, lost)] == [("aaa1111_1", 1), ("aaa1111_1", 2)]
    assert (won["scores"]["draco"]["value"], lost["scores"]["draco"]["value"]) == (1.0, -1.0)
    about = won["scores"]["draco"]["metadata"]
    assert [each["steps"] for each in about["verdicts"]] == [[2], [1, 2], []]
    assert about["step_advantage"] == [0.0, 1.05]
    called = [call["arguments"] for message in won["messages"] for call in message.get("tool_calls", ())]
    assert called == [{"number": 1, "action": CODE}, {"number": 2, "action": "finish()"}]
    # Again is the same, and they are traces like any others.
    assert write_inspect_logs(run, tmp_path / "logs") == written
    groups = load_traces(tmp_path / "logs")
    assert not groups.problems
    assert {len(trace.steps) for group in groups for trace in group.traces} == {2}
    assert {trace.outcome for group in groups for trace in group.traces} == {1.0, -1.0}


def test_judged_traces_have_the_time_of_their_judging(tmp_path: Path) -> None:
    judge_sync(load_traces(FILES / "openai_chat.jsonl"), MODEL, out=tmp_path / "judged", complete=Canned())
    (written,) = write_inspect_logs(RunDirectory.open(tmp_path / "judged"), tmp_path / "logs")
    log = json.loads(written.read_text(encoding="utf-8"))
    calls = RunDirectory.open(tmp_path / "judged").table("judge_calls").column("started_at").to_pylist()
    assert datetime.fromisoformat(log["eval"]["created"]).timestamp() == int(min(calls))
    assert [sample["scores"]["draco"]["value"] for sample in log["samples"]] == [1.0, -1.0]
    assert "started_at" not in log["samples"][0]


def test_a_run_without_rollouts_has_no_logs_and_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    empty = RunDirectory.create(tmp_path / "empty", CONFIG)
    assert write_inspect_logs(empty, tmp_path / "logs") == []
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="--out .*file: cannot be written"):
        write_inspect_logs(small_run(tmp_path / "run"), tmp_path / "file")

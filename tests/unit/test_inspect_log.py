"""`draco runs inspect`: a run as logs of Inspect, read back as traces; see also test_adapters_real, with Inspect."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.lab.runs.inspect_logs import write_logs
from draco_ray.records import Usage
from draco_ray.runs.directory import RunDirectory
from draco_ray.traces.library import judge_sync
from draco_ray.traces.load import load_traces
from tests.support.evaluations import a_plan, write_evaluation
from tests.support.lost_results import lost_rollout
from tests.support.measured_run import TITLES, judged_run
from tests.support.small_run import CODE, CONFIG, HOSTILE, a_trajectory, small_run
from tests.unit.test_traces_judging import MODEL, Canned
from tests.unit.test_traces_load import FILES


def test_rollouts_are_samples_whose_steps_have_the_numbers_that_verdicts_cite(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    *written, evaluated = write_logs(run.path, tmp_path / "logs")
    assert [path.stat().st_mode & 0o777 for path in written] == [0o600] * 2
    evaluated.unlink()
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
    assert won["messages"][-1]["metadata"] == {"step": None}
    # They are traces like any others.
    groups = load_traces(tmp_path / "logs")
    assert not groups.problems
    calls = {sum(not step.message for step in trace.steps) for group in groups for trace in group.traces}
    assert calls == {2}
    assert {trace.outcome for group in groups for trace in group.traces} == {1.0, -1.0}


def test_what_a_run_evaluated_is_a_log_a_measurement(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    inside = write_evaluation(
        run.path / "evaluations" / "dev-last1", a_plan(measurements=("step00001", "step00002")), chance=0.5
    )
    directory = EvaluationDirectory.open(inside)
    directory.write_trajectory("step00002", replace(a_trajectory(2, "a_1", 1), policy_version=2))
    written = write_logs(run.path, tmp_path / "logs")
    logs = {log["eval"]["task"]: log for log in (json.loads(path.read_text(encoding="utf-8")) for path in written)}
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    assert list(logs) == [
        *("run, step 1", "run, step 2", "run, test after step 2"),
        *(f"run, draco, appworld test_normal, step0000{step}" for step in (1, 2)),
    ]
    own = logs["run, test after step 2"]
    assert [sample["scores"]["success"]["value"] for sample in own["samples"]] == [1.0, 0.0]
    assert own["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
    assert [len(sample["messages"]) for sample in own["samples"]] == [7, 7]
    for step in (1, 2):
        log = logs[f"run, draco, appworld test_normal, step0000{step}"]
        results = directory.results(f"step0000{step}")
        solved = [each.evaluation.success for each in results]
        assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == pytest.approx(sum(solved) / len(solved))
        assert len(log["samples"]) == len(results) == 72
        assert log["eval"]["config"]["epochs"] == 3
        shown = {(each["id"], each["epoch"]): each for each in log["samples"]}
        for each in results:
            about = shown[each.evaluation.task_id, each.evaluation.run + 1]["scores"]["success"]
            assert about["value"] == each.evaluation.success
            assert about["metadata"]["usage"]["dollars"] == 0.25
    # The one rollout that was kept has its messages.
    kept = [each for each in log["samples"] if each["messages"]]
    assert [(each["id"], each["epoch"]) for each in kept] == [("a_1", 2)]
    # Again is the same files, and an evaluation directory stands for itself.
    assert write_logs(run.path, tmp_path / "logs") == written
    assert [path.name for path in write_logs(inside, tmp_path / "alone")] == [path.name for path in written[3:]]


def test_what_the_judge_scored_for_want_of_an_evaluator_is_a_log_a_measurement(tmp_path: Path) -> None:
    run = judged_run(tmp_path / "run", steps=(0, 2))
    judged_run(run.path / "evaluations" / "last", steps=(2,))
    written = write_logs(run.path, tmp_path / "logs")
    logs = {log["eval"]["task"]: log for log in (json.loads(path.read_text(encoding="utf-8")) for path in written)}
    assert list(logs)[2:] == [
        *("run, dev before training, judged", "run, dev after step 2, judged", "run, last, dev after step 2, judged")
    ]
    for log in list(logs.values())[2:]:
        scored, unscored = log["samples"]
        assert scored["scores"]["judged"]["value"] == 0.5
        assert scored["scores"]["judged"]["metadata"] == {
            "verdicts": [
                {"title": title, "verdict": verdict}
                for title, verdict in zip(TITLES, ("PASS", "FAIL", "NOT_APPLICABLE"), strict=True)
            ],
            "again": ["PASS", "PASS", "NOT_APPLICABLE"],
        }
        # Not scored is neither a zero nor a pass.
        assert (unscored["scores"], unscored["error"]["message"]) == ({}, "no criterion")
        assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
        assert log["results"]["scores"][0]["unscored_samples"] == 1
        assert [len(sample["messages"]) for sample in log["samples"]] == [7, 7]


def test_an_evaluation_that_was_begun_and_a_lost_rollout(tmp_path: Path) -> None:
    directory = EvaluationDirectory.begin(tmp_path / "begun", a_plan())
    assert write_logs(directory.path, tmp_path / "logs") == []
    directory.add("starter", lost_rollout("a_1", 0, Usage(), seconds=1.0, attempts=3, error="the world is gone"))
    (path,) = write_logs(directory.path, tmp_path / "logs")
    log = json.loads(path.read_text(encoding="utf-8"))
    (sample,) = log["samples"]
    assert sample["error"]["message"] == "the world is gone"
    assert (sample["scores"]["success"]["value"], sample["scores"]["success"]["metadata"]["lost"]) == (0.0, True)
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (1, 0)
    with pytest.raises(ConfigError, match="neither|no run|not a run"):
        write_logs(tmp_path / "logs", tmp_path / "more")


def test_judged_traces_have_the_time_of_their_judging(tmp_path: Path) -> None:
    judge_sync(load_traces(FILES / "openai_chat.jsonl"), MODEL, out=tmp_path / "judged", complete=Canned())
    (written,) = write_logs(tmp_path / "judged", tmp_path / "logs")
    log = json.loads(written.read_text(encoding="utf-8"))
    calls = RunDirectory.open(tmp_path / "judged").table("judge_calls").column("started_at").to_pylist()
    assert datetime.fromisoformat(log["eval"]["created"]).timestamp() == int(min(calls))
    assert [sample["scores"]["draco"]["value"] for sample in log["samples"]] == [1.0, -1.0]
    assert "started_at" not in log["samples"][0]
    steps = len(log["samples"][0]["scores"]["draco"]["metadata"]["step_quality"])
    assert log["samples"][0]["messages"][-1]["metadata"] == {"step": steps}


def test_a_run_without_rollouts_has_no_logs_and_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    empty = RunDirectory.create(tmp_path / "empty", CONFIG)
    assert write_logs(empty.path, tmp_path / "logs") == []
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="--out .*file/.*: cannot be written"):
        write_logs(small_run(tmp_path / "run").path, tmp_path / "file")

"""The evaluation directory: what is kept, what is missing, and what it refuses to mix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.records import EpisodeEnd, Usage
from tests.support.evaluations import a_plan, a_result, write_evaluation
from tests.support.lost_results import lost_rollout


def test_finished_rollouts_are_read_back_and_not_asked_for_again(tmp_path: Path) -> None:
    plan = a_plan(runs=2, tasks={"a_1": 1, "a_2": 2})
    directory = EvaluationDirectory.begin(tmp_path / "e", plan)
    results = [a_result("a_2", 1, True), a_result("a_1", 0, False, dollars=None)]
    for result in results:
        directory.add("starter", result)
    again = EvaluationDirectory.begin(tmp_path / "e", plan)
    assert again.results("starter") == results
    assert again.missing("starter") == [("a_2", 0), ("a_1", 1)]
    assert (again.finished(), again.total) == (2, 4)
    with pytest.raises(ConfigError, match="2 of 4 rollouts are finished"):
        again.complete_results()


def test_lost_rollouts_are_failures_until_they_are_played_again(tmp_path: Path) -> None:
    directory = EvaluationDirectory.begin(tmp_path, a_plan(runs=1, tasks={"a_1": 1, "a_2": 2, "a_3": 3}))
    for result in (a_result("a_1", 0, True), a_result("a_3", 0, False)):
        directory.add("starter", result)
    kept = (tmp_path / "results" / "starter.jsonl").read_bytes()
    directory.add("starter", lost_rollout("a_2", 0, Usage(), seconds=1.0, attempts=3, error="the server died"))
    assert [result.error for result in directory.lost()] == ["the server died"]
    assert directory.complete_results()["starter"][2].evaluation.success is False
    assert directory.drop_lost() == 1
    assert (tmp_path / "results" / "starter.jsonl").read_bytes() == kept
    assert directory.missing("starter") == [("a_2", 0)]
    assert directory.drop_lost() == 0


def test_half_a_line_of_a_killed_process_is_played_again(tmp_path: Path) -> None:
    plan = a_plan(runs=1, tasks={"a_1": 1, "a_2": 2})
    directory = EvaluationDirectory.begin(tmp_path, plan)
    directory.add("starter", a_result("a_1", 0, True))
    file = tmp_path / "results" / "starter.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    assert len(directory.results("starter")) == 1
    directory.mend()
    directory.add("starter", a_result("a_2", 0, False))
    assert [result.evaluation.task_id for result in directory.complete_results()["starter"]] == ["a_1", "a_2"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs": 2}, "runs was 3, but is 2 in this command"),
        ({"settings": {"engine.temperature": 0.5}}, "engine.temperature was 1.0, but is 0.5 in this command"),
        ({"settings": {}}, "engine.temperature was 1.0, but is None in this command"),
        ({"world": "other"}, "the world of the split have changed"),
        ({"measurements": ("step00001",)}, "measurements was"),
    ],
)
def test_another_evaluation_is_refused_in_one_line(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    EvaluationDirectory.begin(tmp_path, a_plan())
    with pytest.raises(ConfigError) as refusal:
        EvaluationDirectory.begin(tmp_path, a_plan(**changes))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_two_processes_do_not_add_to_one_evaluation(tmp_path: Path) -> None:
    directory = EvaluationDirectory.begin(tmp_path, a_plan())
    with directory.claimed():
        other = EvaluationDirectory.begin(tmp_path, a_plan(policy="./starter"))
        with pytest.raises(ConfigError, match="another process is using it"), other.claimed():
            pass
    with other.claimed():
        other.add("starter", a_result("a_1", 0, True))


def test_a_folder_that_is_no_evaluation_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an evaluation directory"):
        EvaluationDirectory.open(tmp_path)
    (tmp_path / "evaluation.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="written by another version of draco-ray"):
        EvaluationDirectory.open(tmp_path)


def test_a_lost_rollout_is_a_failure_that_cost_something(tmp_path: Path) -> None:
    lost = lost_rollout("a_1", 2, Usage(calls=3, dollars=0.5), seconds=9.0, attempts=2, error="the server died")
    assert not lost.evaluation.success
    assert lost.evaluation.ended is EpisodeEnd.SERVER_ERROR
    directory = EvaluationDirectory.begin(tmp_path, a_plan(tasks={"a_1": 1}))
    directory.add("starter", lost)
    assert directory.results("starter") == [lost]


def test_usage_adds_and_knows_what_it_does_not_know() -> None:
    one, other = Usage(calls=1, input_tokens=10, dollars=None), Usage(calls=2, output_tokens=5, dollars=0.25)
    assert one + other == Usage(calls=3, input_tokens=10, output_tokens=5, dollars=0.25)
    assert (one + one).dollars is None


def test_every_measurement_has_a_file(tmp_path: Path) -> None:
    plan = a_plan(measurements=("step00002", "step00004"))
    write_evaluation(tmp_path, plan)
    found = EvaluationDirectory.open(tmp_path).complete_results()
    assert {name: len(results) for name, results in found.items()} == {"step00002": 72, "step00004": 72}


def test_a_line_with_an_error_is_no_success(tmp_path: Path) -> None:
    directory = EvaluationDirectory.begin(tmp_path, a_plan(runs=1, tasks={"a_1": 1, "a_2": 1}))
    directory.add("starter", replace(a_result("a_1", 0, True), error="the world crashed"))
    with pytest.raises(DamagedRun, match="line 1: 'a_1', run 0 has an error but is not marked as lost"):
        directory.results("starter")

"""Evaluations inside a run: their tables, and the figures that need them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from draco_ray.lab.analysis.evaluations import evaluations
from draco_ray.lab.analysis.progress import success
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.lab.report.drawing import Drawing, to_svg
from draco_ray.lab.report.figures import figures
from draco_ray.lab.runs.show import show
from draco_ray.records import Usage
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.evaluations import a_plan, a_result
from tests.support.lost_results import lost_rollout
from tests.support.small_run import small_run

TASKS: dict[str, int | None] = {"a_1": 1, "a_2": 2}


def add(run: RunDirectory, name: str, split: str, steps: dict[str, list[tuple[str, int, bool]]]) -> EvaluationDirectory:
    """An evaluation directory of two tasks and two runs."""
    plan = a_plan(split=split, tasks=TASKS, runs=2, measurements=tuple(steps))
    directory = EvaluationDirectory.begin(run.path / "evaluations" / name, plan)
    for measurement, outcomes in steps.items():
        for task, number, solved in outcomes:
            directory.add(measurement, a_result(task, number, solved))
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = small_run(tmp_path_factory.mktemp("evaluated") / "small")
    half = [("a_1", 0, True), ("a_1", 1, True), ("a_2", 0, True), ("a_2", 1, False)]
    none = [(task, number, False) for task, number, _ in half]
    add(run, "appworld-train-train-curve", "train", {"step00001": none, "step00002": half})
    add(run, "appworld-dev-last1", "dev", {"step00002": half, "step00009": half[:3]})
    return run


def test_measurements_are_read_where_they_are_finished(run: RunDirectory) -> None:
    rows = evaluations(run).to_pylist()
    assert [(row["evaluation"], row["split"], row["training_step"], row["tgc"]) for row in rows] == [
        ("training", "test", 2, 0.5),
        ("appworld-dev-last1", "dev", 2, 0.75),
        ("appworld-train-train-curve", "train", 1, 0.0),
        ("appworld-train-train-curve", "train", 2, 0.75),
    ]
    # Two rollouts a pass, a quarter of a dollar and 510 tokens each; training does not record what evaluating took.
    assert [row["dollars_per_pass"] for row in rows] == [None, 0.5, 0.5, 0.5]
    assert rows[1]["tokens_per_pass"] == 1020.0
    assert rows[1]["sgc"] == 0.5


def test_the_cost_axis_has_every_role_of_a_conversation(tmp_path: Path) -> None:
    run = small_run(tmp_path / "small")
    half = [("a_1", 0, True), ("a_1", 1, True), ("a_2", 0, True), ("a_2", 1, False)]
    directory = add(run, "tau-banking-last1", "full", {"step00002": half})
    cost = {"input_tokens": 100, "output_tokens": 50, "dollars": 0.5}
    costs = {"agent": cost, "user": cost, "judge": {**cost, "dollars": 2.0}}
    directory.write_summary({"measurements": {"step00002": {"costs": costs}}})
    (row,) = [row for row in evaluations(run).to_pylist() if row["split"] == "full"]
    assert (row["dollars_per_pass"], row["tokens_per_pass"]) == (1.5, 225.0)
    directory.write_summary({"measurements": {"step00002": {"costs": {**costs, "user": {**cost, "dollars": None}}}}})
    (row,) = [row for row in evaluations(run).to_pylist() if row["split"] == "full"]
    assert row["dollars_per_pass"] is None


def test_an_unreadable_evaluation_does_not_hide_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "old", steps=1)
    folder = run.path / "evaluations" / "other"
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps({"format": "another"}))
    assert [row["evaluation"] for row in evaluations(run).to_pylist()] == ["training"]


def test_what_was_lost_in_an_evaluation_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the tables, and by `draco runs show`."""
    run = small_run(tmp_path / "lossy", steps=1)
    gone = lost_rollout("a_2", 0, Usage(), seconds=1.0, attempts=3, error="the world crashed")
    plan = a_plan(split="dev", tasks=TASKS, runs=1, measurements=("step00001",))
    directory = EvaluationDirectory.begin(run.path / "evaluations" / "dev", plan)
    for result in (a_result("a_1", 0, True), gone):
        directory.add("step00001", result)
    [row] = [row for row in evaluations(run).to_pylist() if row["evaluation"] == "dev"]
    assert (row["lost"], row["tgc"]) == (1, 0.5)
    measured = [result.evaluation for result in directory.results("step00001")]
    RunStore(run).write("evaluations", 5, "dev", rows.evaluation_rows(5, "dev", measured))
    [row] = [row for row in success(run).to_pylist() if row["split"] == "dev"]
    assert (row["rollouts"], row["lost"]) == (2, 1)
    show(run.path)
    printed = capsys.readouterr().out
    assert "on dev (2 rollouts, 1 of them lost, counted as failures)" in printed
    assert printed.count("lost") == 1


def hints(drawing: Drawing) -> list[str]:
    return [dot.findtext("title", "") for dot in ElementTree.fromstring(to_svg(drawing)).iter("circle")]


def test_figures_of_evaluations_say_what_the_tables_say(run: RunDirectory) -> None:
    drawn = figures([run])
    assert hints(drawn["train_success"]) == ["small, step 1: 0%", "small, step 2: 75%"]

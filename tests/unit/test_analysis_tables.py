"""Tidy tables of a run whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from draco_ray.lab.analysis.credit import citations_a_step, inert_windows, push_shares
from draco_ray.lab.analysis.progress import judge_cost, stage_seconds, success, terminations
from draco_ray.lab.analysis.rubrics import (
    census_summary,
    criteria_census,
    criterion_pass_rates,
    pass_rates,
    title_key,
)
from draco_ray.lab.analysis.tables import TIDY, tidy, write_table, write_tables
from draco_ray.records import Attribution, Verdict
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.small_run import CONFIG, TASKS, a_trajectory, small_run, write_group


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return small_run(tmp_path_factory.mktemp("analysis") / "known")


def test_pass_rates_count_every_verdict_once(run: RunDirectory) -> None:
    # A step: two tasks, three criteria, two rollouts; rollout 0 passes all, rollout 1 fails two of three.
    first, second = pass_rates(run).to_pylist()
    assert (first["judgments"], first["passed"], first["failed"], first["not_applicable"]) == (12, 6, 4, 2)
    assert first["pass_rate"] == pytest.approx(0.6)
    assert first["na_rate"] == pytest.approx(1 / 6)
    assert {**second, "training_step": 1} == first


def test_pass_rates_by_criterion_add_up_to_the_overall_one(run: RunDirectory) -> None:
    rows = [row for row in criterion_pass_rates(run).to_pylist() if row["training_step"] == 1]
    assert {row["title"]: (row["passed"], row["failed"]) for row in rows} == {
        f"Only {TASKS[0]}": (1, 1),
        f"Only {TASKS[1]}": (1, 1),
        "Closes the task": (2, 2),
        "Never <i>fails</i>": (2, 0),
    }


def test_the_census_counts_tasks_and_survivals(run: RunDirectory) -> None:
    rows = {row["title"]: row for row in criteria_census(run).to_pylist()}
    closes, own, never = rows["Closes the task"], rows[f"Only {TASKS[0]}"], rows["Never <i>fails</i>"]
    assert (closes["tasks"], closes["groups"], closes["survived"], closes["judgments"]) == (2, 4, 4, 8)
    assert (own["tasks"], own["groups"], own["judgments"]) == (1, 2, 4)
    assert (never["survived"], never["fail_rate"], never["na_rate"]) == (0, 0.0, 0.5)
    assert {row["rubric"] for row in rows.values()} == {"dynamic"}


def test_the_summary_splits_task_specific_from_general(run: RunDirectory) -> None:
    rows = {row["scope"]: row for row in census_summary(criteria_census(run), general_from=2).to_pylist()}
    assert rows["one task"]["criteria"] == 2
    assert rows["one task"]["criteria_share"] == 0.5
    assert rows["one task"]["judgment_share"] == pytest.approx(8 / 24)
    assert rows["2 or more tasks"]["judgments"] == 16
    assert rows["all"]["judgments"] == 24
    assert rows["one task"]["fail_rate"] == 0.5


def test_a_run_without_criteria_has_no_summary() -> None:
    assert census_summary(pa.table({})).num_rows == 0


def test_titles_are_one_criterion_whatever_their_case_and_spacing() -> None:
    assert title_key(" Closes the\tTask ") == title_key("closes the task")


def test_credit_by_step_gives_inert_share_and_spread(run: RunDirectory) -> None:
    row = tidy("credit_by_step", [run]).to_pylist()[0]
    assert (row["rollouts"], row["inert"], row["inert_share"]) == (4, 2, 0.5)
    # Rollout 0 has Q = (0, 1): deviation 0.5; rollout 1 has none.
    assert row["quality_spread"] == pytest.approx(0.25)
    # Rollout 1 is inert: the paper's spread does not count it.
    assert row["quality_spread_active"] == pytest.approx(0.5)


def test_citations_a_step_count_what_survived_and_leave_uncited_steps_out(run: RunDirectory, tmp_path: Path) -> None:
    """Of each task one rollout whose steps are cited once and twice, one whose second step is cited twice."""
    first, _, whole = tidy("citations_a_step", [run]).to_pylist()
    assert (first["steps"], first["uncited"]) == (8, 2)
    assert (first["citations_mean"], first["citations_median"]) == (pytest.approx(10 / 6), 2.0)
    assert whole == {**first, "training_step": None, "steps": 16, "uncited": 4}
    assert first["ten_or_more_share"] == 0.0
    store = RunStore(RunDirectory.create(tmp_path / "dropped", "seed: 0\n"))
    write_group(store, 1, TASKS[0])
    before = citations_a_step(store.directory).to_pylist()
    dropped = Attribution(criterion=2, verdict=Verdict.PASS, steps=(1, 2))
    store.write("citations", 1, "dropped", rows.citation_rows(1, TASKS[0], 0, [dropped]))
    assert citations_a_step(store.directory).to_pylist() == before


def test_a_hundred_steps_fall_into_the_papers_windows() -> None:
    steps = [
        {
            "run": "long",
            "training_step": step,
            "rollouts": 96,
            "inert": 0,
            "inert_share": step / 100,
            "quality_spread": None,
            "quality_spread_active": None,
        }
        for step in range(1, 101)
    ]
    windows = inert_windows(pa.Table.from_pylist(steps)).to_pylist()
    assert [(row["first_step"], row["last_step"]) for row in windows] == [
        (1, 10),
        (11, 25),
        (26, 50),
        (51, 75),
        (76, 100),
    ]
    assert windows[0]["inert_share"] == pytest.approx(0.055)
    assert windows[4]["inert_share"] == pytest.approx(0.88)
    assert windows[4]["quality_spread"] is None


def test_a_short_run_has_no_empty_windows(run: RunDirectory) -> None:
    windows = tidy("inert_windows", [run]).to_pylist()
    assert [(row["first_step"], row["last_step"], row["steps"]) for row in windows] == [(1, 1, 1), (2, 2, 1)]


def test_push_shares_follow_tokens_and_advantage() -> None:
    assert push_shares([0.0, 1.05], [2, 4]).tolist() == [0.0, 1.0]
    assert push_shares([-1.05, -0.525], [2, 4]).tolist() == [0.5, 0.5]
    assert push_shares([0.0, 0.0], [2, 4]).tolist() == [0.0, 0.0]


def test_terminations_are_shares_of_the_step(run: RunDirectory) -> None:
    shares = {row["ended"]: row["share"] for row in terminations(run).to_pylist() if row["training_step"] == 2}
    nothing = dict.fromkeys(("submitted", "no_action", "response_limit", "crashed", "server_error"), 0.0)
    assert shares == {"gave_up": 0.5, "turn_limit": 0.5} | nothing


def test_lost_rollouts_and_tries_that_were_repeated_are_server_errors(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", f"{CONFIG}environment: {{rollout_retries: 2}}\n"))
    for rollout in range(2):
        trajectory = replace(a_trajectory(1, TASKS[0], rollout), attempt=rollout)
        store.write("trajectories", 1, f"{rollout}", rows.trajectory_rows(1, trajectory))
        store.write("steps", 1, f"{rollout}", rows.step_rows(1, trajectory))
    for task, lost in zip(TASKS, (1, 0), strict=True):
        group = {"state": "credited", "rollouts": 2, "lost": lost, "unscored": 0, "credit_failures": 0, "reason": None}
        store.write("groups", 1, task, [{"training_step": 1, "task_id": task, **group}])
    store.finish_step(1, {"step": 1})
    (error,) = [row for row in terminations(store.directory).to_pylist() if row["ended"] == "server_error"]
    assert (error["rollouts"], error["share"]) == (1, pytest.approx(1 / 3))
    # Two of the lost one, one of the second rollout.
    assert error["retried"] == 3


def test_judge_cost_by_phase(run: RunDirectory) -> None:
    rows = {row["phase"]: row for row in judge_cost(run).to_pylist() if row["training_step"] == 1}
    assert {phase: row["calls"] for phase, row in rows.items()} == {
        "stage1": 2,
        "union": 2,
        "score": 4,
        "credit": 4,
    }
    assert rows["score"]["dollars"] == pytest.approx(0.08)
    assert (rows["score"]["input_tokens"], rows["score"]["cached_tokens"]) == (400, 160)


def test_seconds_add_up_to_the_step_and_show_the_overlap(run: RunDirectory) -> None:
    seconds = {row["stage"]: row["seconds"] for row in stage_seconds(run).to_pylist() if row["training_step"] == 1}
    # Rollouts 0-10 s, judging 8-12 s, then 5 s of learning and 1 s of sync in a step of 20 s.
    assert seconds == {
        "generation": 8.0,
        "generation and judging": 2.0,
        "judging": 2.0,
        "learning beside others": 0.0,
        "learning": 5.0,
        "weight sync": 1.0,
        "checkpoint": 0.0,
        "other": 2.0,
    }


def test_learning_beside_judging_is_counted_once(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "overlapping", "seed: 0\n"))
    # 100-110 s; a rollout of this step was begun in the one before.
    named = [
        ("rollout", 96, 104),
        ("rollout", 101, 105),
        ("score", 103, 107),
        ("learning", 104, 108),
        ("sync", 108, 110),
    ]
    spans = [{"training_step": 1, "stage": stage, "started_at": start, "ended_at": end} for stage, start, end in named]
    store.write("spans", 1, "all", spans)
    store.finish_step(1, {"step": 1, "seconds": 10.0, "seconds_learning": 4.0, "seconds_sync": 2.0})
    seconds = {row["stage"]: row["seconds"] for row in stage_seconds(store.directory).to_pylist()}
    assert sum(seconds.values()) == pytest.approx(10.0)
    assert {stage: value for stage, value in seconds.items() if value} == {
        "generation": 3.0,
        "generation and judging": 1.0,
        "learning beside others": 3.0,
        "learning": 1.0,
        "weight sync": 2.0,
    }


def test_success_is_read_where_it_was_evaluated(run: RunDirectory) -> None:
    (row,) = success(run).to_pylist()
    assert (row["training_step"], row["split"], row["tgc"], row["sgc"]) == (2, "test", 0.5, 0.5)


def test_tables_are_written_twice_and_stack_over_runs(run: RunDirectory, tmp_path: Path) -> None:
    other = small_run(tmp_path / "other", steps=1)
    written = write_tables([run, other], tmp_path / "tidy")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in TIDY for kind in ("parquet", "csv")}
    table = pq.read_table(tmp_path / "tidy" / "pass_rates.parquet")
    assert table.column("run").to_pylist() == ["known", "known", "other"]
    csv = pyarrow.csv.read_csv(tmp_path / "tidy" / "pass_rates.csv")
    assert csv.column("passed").to_pylist() == table.column("passed").to_pylist()


def test_a_step_under_way_is_counted_as_far_as_it_is(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "going", "seed: 0\n"))
    write_group(store, 1, TASKS[0])
    run = store.directory
    assert run.steps() == [1]
    assert pass_rates(run).to_pylist()[0]["judgments"] == 6
    assert stage_seconds(run).num_rows == 0
    assert criteria_census(run).to_pylist()[0]["rubric"] == "dynamic"


def test_one_step_of_a_table_is_the_same_rows_as_the_whole_filtered(run: RunDirectory) -> None:
    whole = [row for row in run.table("verdicts").to_pylist() if row["training_step"] == 2]
    assert run.table("verdicts", 2).to_pylist() == whole
    assert run.table("verdicts", 7).num_rows == 0
    assert run.table("verdicts", 2, ["verdict", "task_id"]).column_names == ["verdict", "task_id"]


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    table = pa.table(
        {"text": ["=1+1", "-a", "a=b", None], "names": [["@a", "b"], [], ["c"], []], "numbers": [[-1], [], [2], []]}
    )
    parquet, csv = write_table(table, tmp_path, "t")
    assert pq.read_table(parquet) == table
    lines = csv.read_text().splitlines()
    assert lines[1:] == ['"\'=1+1","\'@a b","-1"', '"\'-a","",""', '"a=b","c","2"', ',"",""']

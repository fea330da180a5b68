"""A run directory reads back what was written, also in the middle of a step."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draco_ray.errors import ConfigError, DamagedRun, StoreError
from draco_ray.records import (
    Attribution,
    CreditFallback,
    Criterion,
    EpisodeEnd,
    Evaluation,
    GroupAdvantages,
    JudgeCall,
    Judged,
    Message,
    RolloutAdvantage,
    ScoredCriterion,
    Trajectory,
    Turn,
    Verdict,
)
from draco_ray.rollout.worker import Evaluated
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory, write_part
from draco_ray.runs.rows import read_trajectory, recorded_rollouts
from draco_ray.runs.schema import TABLE_SCHEMAS
from draco_ray.runs.store import RunStore
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.traces.load import trace_of
from tests.support.killed import SimulatedKill, kill_after_changes


def a_trajectory(rollout: int = 0) -> Trajectory:
    """Two prompt tokens, a step of three, two of glue, a closing turn of two."""
    return Trajectory(
        task_id="abc1234_1",
        group="step1/abc1234_1",
        rollout=rollout,
        attempt=0,
        policy_version=0,
        prompt=(Message(role="system", content="s"), Message(role="user", content="Grüße ☃")),
        turns=(
            Turn(text="<code>1</code>", action="1", observation="one", first_token=2, last_token=5),
            Turn(text="Done.", action=None, observation=None, first_token=7, last_token=9),
        ),
        token_ids_T=np.arange(9),
        sampled_T=np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=bool),
        logprob_T=np.linspace(-1, 0, 9),
        step_T=np.array([-1, -1, 0, 0, 0, -1, -1, -1, -1]),
        prompt_length=2,
        ended=EpisodeEnd.FINISHED,
        started_at=1.0,
        ended_at=2.0,
    )


def a_call(phase: str = "score", rollout: int | None = 0) -> JudgeCall:
    return JudgeCall(
        call_id="c1",
        phase=phase,
        group="step1/abc1234_1",
        task_id="abc1234_1",
        rollout=rollout,
        model="m",
        prompt="p",
        reply="r",
        finish_reason="stop",
        input_tokens=10,
        cached_tokens=4,
        output_tokens=2,
        dollars=0.5,
        started_at=1.0,
        seconds=0.1,
        requests=1,
    )


def an_evaluation(task_id: str) -> Evaluation:
    return Evaluation(
        task_id=task_id, run=0, success=True, passed_tests=1, total_tests=1, turns=1, ended=EpisodeEnd.FINISHED
    )


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(RunDirectory.create(tmp_path / "run", "seed: 0\n"))


def test_a_trajectory_reads_back_whole(store: RunStore) -> None:
    trajectory = a_trajectory()
    store.write("trajectories", 1, "a", rows.trajectory_rows(1, trajectory))
    (row,) = store.directory.table("trajectories").to_pylist()
    assert row["token_ids"] == list(range(9))
    assert row["sampled"] == trajectory.sampled_T.tolist()
    assert row["logprob"] == pytest.approx(trajectory.logprob_T, abs=1e-6)
    assert row["token_step"] == trajectory.step_T.tolist()
    assert row["prompt"][1] == {"role": "user", "content": "Grüße ☃"}
    assert (row["ended"], row["steps"], row["turns"]) == ("finished", 1, 2)


def test_a_rollout_with_branches_reads_back_whole(store: RunStore) -> None:
    plain = a_trajectory()
    first, closing = plain.turns
    played = replace(plain, group="step1/abc1234_1", turns=(first, replace(closing, branch=1)), branches=(0, 5))
    store.write("trajectories", 1, f"{played.task_id}-{played.rollout}", rows.trajectory_rows(1, played))
    store.write("steps", 1, f"{played.task_id}-{played.rollout}", rows.step_rows(1, played))
    again = read_trajectory(store.directory, 1, played.task_id, played.rollout)
    assert (again.branches, again.turns, again.branch_spans) == (played.branches, played.turns, played.branch_spans)
    assert again.branch_spans == (slice(0, 5), slice(5, 9))


def test_a_closing_turn_has_no_step_number(store: RunStore) -> None:
    store.write("steps", 1, "a", rows.step_rows(1, a_trajectory()))
    assert store.directory.table("steps").column("step").to_pylist() == [1, None]


@pytest.mark.parametrize("message", [False, True])
def test_a_rollout_keeps_the_steps_it_was_recorded_with(store: RunStore, message: bool) -> None:
    """A run from before a closing message was a step says null, and a new one a number; neither is decided again."""
    step, closing = a_trajectory().turns
    token_step = np.array([-1, -1, 0, 0, 0, -1, -1, *([1, 1] if message else [-1, -1])])
    played = replace(a_trajectory(), turns=(step, replace(closing, message=message)), step_T=token_step)
    key = f"{played.task_id}-{played.rollout}"
    store.write("trajectories", 1, key, rows.trajectory_rows(1, played))
    store.write("steps", 1, key, rows.step_rows(1, played))
    assert store.directory.table("steps").column("step").to_pylist() == [1, 2 if message else None]
    again = read_trajectory(store.directory, 1, played.task_id, played.rollout)
    assert again.turns == played.turns
    assert [turn.text for turn in again.steps] == [turn.text for turn in played.turns[: 1 + message]]
    assert again.tokens_M.tolist() == ([3, 2] if message else [3])
    as_trace = trace_of(again, "run", 1)
    assert [turn.is_step for turn in as_trace.turns] == [True, message]


def test_verdicts_citations_and_advantages_read_back(store: RunStore) -> None:
    scores = [ScoredCriterion(verdict=Verdict.PASS), ScoredCriterion(verdict=Verdict.NOT_APPLICABLE)]
    attributions = [
        Attribution(criterion=0, verdict=Verdict.FAIL, steps=(1, 3)),
        Attribution(criterion=1, verdict=Verdict.NOT_APPLICABLE, steps=()),
    ]
    advantages = GroupAdvantages(
        group="g",
        surviving_K=np.array([True, False]),
        rollouts=(
            RolloutAdvantage(
                rollout=0,
                reward=-0.5,
                advantage=-1.0,
                quality_M=np.array([0.25]),
                step_advantage_M=np.array([-1.0]),
                cited_M=np.array([True]),
                fallback=CreditFallback.NONE,
                inert=False,
            ),
        ),
    )
    rubric = [Criterion(title=t, description="d", evaluator_instruction="e") for t in ("A", "B")]
    store.write("verdicts", 1, "a", rows.verdict_rows(1, "t", 0, scores))
    store.write("citations", 1, "a", rows.citation_rows(1, "t", 0, attributions))
    store.write("advantages", 1, "a", rows.advantage_rows(1, "t", advantages, {0: [3]}))
    store.write("criteria", 1, "a", rows.criterion_rows(1, "t", rubric, advantages))
    assert store.directory.table("verdicts").column("verdict").to_pylist() == [1, 0]
    assert store.directory.table("citations").column("step").to_pylist() == [1, 3, None]
    assert store.directory.table("criteria").column("survived").to_pylist() == [True, False]
    (row,) = store.directory.table("advantages").to_pylist()
    assert (row["reward"], row["step_tokens"], row["fallback"]) == (-0.5, [3], "none")


def test_a_step_under_way_is_readable_and_a_finished_one_is_one_file(store: RunStore) -> None:
    for rollout in range(3):
        store.write("steps", 1, f"r{rollout}", rows.step_rows(1, a_trajectory(rollout)))
    store.write("judge_calls", 1, "x", rows.call_rows(1, [a_call()]))
    assert store.directory.table("steps").num_rows == 6
    store.finish_step(1, {"step": 1, "reward": None})
    assert store.directory.table("steps").num_rows == 6
    assert [path.name for path in (store.directory.tables / "steps").iterdir()] == ["step00001.parquet"]
    store.write("steps", 2, "r0", rows.step_rows(2, a_trajectory()))
    assert sorted(store.directory.table("steps").column("training_step").to_pylist()) == [1] * 6 + [2] * 2
    assert store.directory.metrics() == [{"step": 1, "reward": None}]


def test_a_killed_compaction_does_not_count_rows_twice(store: RunStore) -> None:
    store.write("steps", 1, "r0", rows.step_rows(1, a_trajectory()))
    part = store.directory.tables / "steps" / "step00001"
    kept = {path.name: path.read_bytes() for path in part.iterdir()}
    store.finish_step(1, {"step": 1})
    part.mkdir()
    for name, content in kept.items():
        (part / name).write_bytes(content)
    assert store.directory.table("steps").num_rows == 2


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", "seed: 0\n")
    with pytest.raises(ConfigError, match="already exists; choose another run.name"):
        RunDirectory.create(tmp_path / "run", "seed: 1\n")
    assert RunDirectory.open(tmp_path / "run").config_text() == "seed: 0\n"


def test_a_run_that_is_killed_while_it_is_created_does_not_use_up_its_name(tmp_path: Path) -> None:
    for changes in itertools.count():
        path, killed = tmp_path / str(changes), True
        with contextlib.suppress(SimulatedKill), kill_after_changes(changes):
            RunDirectory.create(path, "seed: 0\n")
            killed = False
        assert path.exists() != killed
        if not killed:
            break
        RunDirectory.create(path, "seed: 1\n")
        assert RunDirectory.open(path).config_text() == "seed: 1\n"
    assert changes > 4


def test_a_run_that_is_killed_while_its_configuration_changes_is_no_edited_run(tmp_path: Path) -> None:
    run, killed = RunDirectory.create(tmp_path / "run", "seed: 0\n"), True
    found: list[str] = []
    while killed:
        run.write_config("seed: 0\n")
        with contextlib.suppress(SimulatedKill), kill_after_changes(len(found)):
            run.write_config("seed: 1\n")
            killed = False
        again = RunDirectory.open(run.path)
        assert again.ours
        found.append(again.config_text())
    assert found == sorted(found)
    assert found.count("seed: 0\n") > 2
    assert found.count("seed: 1\n") > 2
    (run.path / "config.yaml").write_text("seed: 2\n")
    with pytest.raises(DamagedRun, match="undo the edit"):
        RunDirectory.open(run.path).config_text()
    assert not RunDirectory.open(run.path).ours


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDirectory.open(str(tmp_path))


def _step_of(store: RunStore, rollouts: int) -> None:
    for rollout in range(rollouts):
        trajectory = a_trajectory(rollout)
        store.write("trajectories", 1, f"a-{rollout}", rows.trajectory_rows(1, trajectory))
        store.write("steps", 1, f"a-{rollout}", rows.step_rows(1, trajectory))
        store.write("judge_calls", 1, f"a-score-{rollout}", rows.call_rows(1, [a_call(rollout=rollout)]))


def test_a_writer_that_is_killed_at_any_write_loses_no_row_and_repeats_none(tmp_path: Path) -> None:
    """Wherever it is killed, every finished row reads back once, then and after the writer that follows."""
    tables, rollouts = ("trajectories", "steps", "judge_calls"), 12
    whole = RunStore(RunDirectory.create(tmp_path / "whole", "seed: 0\n"))
    _step_of(whole, rollouts)
    expected = {name: whole.directory.table(name).num_rows for name in tables}
    points = 0
    for point in range(1000):
        store = RunStore(RunDirectory.create(tmp_path / str(point), "seed: 0\n"))
        _step_of(store, rollouts)
        try:
            with kill_after_changes(point):
                store.finish_step(1, {"step": 1})
        except SimulatedKill:
            points += 1
        else:
            break
        after = RunDirectory.open(store.directory.path)
        assert {name: after.table(name).num_rows for name in tables} == expected, point
        RunStore(after).finish_step(1, {"step": 1})
        assert {name: after.table(name).num_rows for name in tables} == expected, point
        assert [line["step"] for line in after.metrics()] == [1]
        shutil.rmtree(after.path)
    assert points > 3 * rollouts


def test_a_run_store_that_is_killed_while_it_gathers_loses_no_row_and_repeats_none(tmp_path: Path) -> None:
    """The next step is written meanwhile; what follows finds what was left, a restarted store as a resumed run does."""
    tables, rollouts = ("trajectories", "steps", "judge_calls"), 3
    points = 0
    for point in range(1000):
        run = RunDirectory.create(tmp_path / str(point), "seed: 0\n")
        _step_of(RunStore(run), rollouts)
        RunStore(run).write("evaluations", 1, "before", rows.evaluation_rows(1, "dev", [an_evaluation("a")]))
        expected = {name: run.table(name).num_rows for name in tables}
        actor = RunStoreActor(run.path)
        actor.settle()
        try:
            with kill_after_changes(point):
                actor.finish_step(1, {"step": 1})
                actor.settle()
        except SimulatedKill:
            points += 1
        else:
            break
        assert {name: run.table(name, 1).num_rows for name in tables} == expected, point
        again = RunStoreActor(run.path)
        again.trajectory(2, a_trajectory())
        again.finish_step(2, {"step": 2})
        again.evaluations(1, "dev", [an_evaluation("a"), an_evaluation("b")])
        again.settle()
        assert {name: run.table(name, 1).num_rows for name in tables} == expected, point
        assert run.table("trajectories").num_rows == rollouts + 1
        assert not [path for name in tables for path in (run.tables / name).glob("step*/")], point
        # What measures the policy of a step is never closed with it.
        assert sorted(run.table("evaluations").column("task_id").to_pylist()) == ["a", "a", "b"]
        shutil.rmtree(run.path)
    assert points > 3 * rollouts


def test_a_rollout_whose_writer_is_killed_at_any_write_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """A run that goes on takes what is there for the rollout, and has it judged."""
    played = a_trajectory()
    for point in range(100):
        actor = RunStoreActor(RunDirectory.create(tmp_path / str(point), "seed: 0\n").path)
        actor.settle()
        try:
            with kill_after_changes(point):
                actor.trajectory(1, played)
        except SimulatedKill:
            killed = True
        else:
            killed = False
        run = RunDirectory.open(tmp_path / str(point))
        recorded = recorded_rollouts(run, 1, 0)
        assert killed or recorded == [(played.task_id, 0)]
        for task_id, rollout in recorded:
            assert read_trajectory(run, 1, task_id, rollout).turns == played.turns, point
        if not killed:
            break
    assert point > 4
    # Nor is one whose turns are gone.
    shutil.rmtree(run.tables / "steps")
    assert recorded_rollouts(run, 1, 0) == []


def test_a_gathered_table_is_on_the_disk_before_its_parts_are_removed(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine loses its power, what was only in its memory is an empty file."""
    done: list[str] = []

    def noted(word: str, work: Callable[[Any], object]) -> Callable[[Any], None]:
        def do(what: Any) -> None:
            done.append(word)
            work(what)

        return do

    monkeypatch.setattr(os, "fsync", noted("on the disk", os.fsync))
    monkeypatch.setattr(shutil, "rmtree", noted("removed", shutil.rmtree))
    store.write("steps", 1, "r0", rows.step_rows(1, a_trajectory()))
    store.gather(1)
    assert done == ["on the disk", "removed"]
    assert store.directory.table("steps").num_rows == 2


def test_a_closed_step_that_nobody_knows_to_be_closed_stays_in_parts_until_the_end(tmp_path: Path) -> None:
    """The metrics line is written before a step's last rows: it does not say that a step is closed."""
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n")
    first = RunStoreActor(run.path)
    first.trajectory(1, a_trajectory())
    first.metrics(1, {"step": 1})
    again = RunStoreActor(run.path)
    again.settle()
    again.spans(1, "checkpoint", [{"stage": "checkpoint", "started_at": 1.0, "ended_at": 2.0}])
    assert run.table("spans").num_rows == 1
    again.settle(1)
    assert (run.table("spans").num_rows, run.table("trajectories").num_rows) == (1, 1)
    assert not list(run.tables.glob("*/step*/"))


def test_what_cannot_be_gathered_is_said_by_the_next_call_that_is_waited_for(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n")
    actor = RunStoreActor(run.path)
    actor.trajectory(1, a_trajectory())
    (part,) = run.parts("trajectories", 1)
    part.write_bytes(part.read_bytes()[:-1])
    actor.finish_step(1, {"step": 1})
    with pytest.raises(StoreError, match=r"arrow: damaged: the file's checksum is wrong; restore this file"):
        actor.settle()
    with pytest.raises(StoreError, match="the file's checksum is wrong"):
        actor.finish_step(2, {"step": 2})
    assert part.exists()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda actor: actor.group(1, "t", None, None, None, {"rollouts": "many"}), "group cannot be written: Arrow"),
        (lambda actor: actor.judged(1, "t", None, "stage1", Judged(value=7)), "judged cannot be written: TypeError: "),
        (lambda actor: actor.heldout_calls(1, "t", None), "heldout_calls cannot be written: AttributeError: "),
    ],
)
def test_a_write_that_failed_for_any_reason_is_said_by_the_next_call_that_is_waited_for(
    tmp_path: Path, write: Callable[[RunStoreActor], None], said: str
) -> None:
    """A defect of ours or of a library is no lesser loss than a full disk."""
    actor = RunStoreActor(RunDirectory.create(tmp_path / "run", "seed: 0\n").path)
    with contextlib.suppress(Exception):
        write(actor)
    with pytest.raises(StoreError, match=said):
        actor.finish_step(1, {"step": 1})


def test_a_table_is_whole_while_its_step_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has listed the parts finds them gone, and the table that they have become."""
    store = RunStore(RunDirectory.create(tmp_path / "run", "seed: 0\n"))
    _step_of(store, 4)
    expected = store.directory.table("steps").num_rows
    listed = RunDirectory._files

    def then_gathered(run: RunDirectory, name: str, step: int | None) -> list[Path]:
        found = listed(run, name, step)
        store.gather(1)
        return found

    monkeypatch.setattr(RunDirectory, "_files", then_gathered)
    assert store.directory.table("steps").num_rows == expected


def test_parts_that_are_gathered_while_they_are_listed_are_read_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", "seed: 0\n"))
    for step in (1, 2):
        store.write("steps", step, "a", rows.step_rows(step, a_trajectory()))
    expected, scandir = store.directory.table("steps").num_rows, os.scandir

    def gathered_before(path: Any) -> Any:
        if str(path).endswith("step00001"):
            monkeypatch.undo()
            store.gather(1)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gathered_before)
    assert store.directory.table("steps").num_rows == expected


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:3], lambda data: data[:-9], lambda data: b"x" * 99]
)
def test_a_damaged_part_is_named(store: RunStore, damage: Callable[[bytes], bytes]) -> None:
    store.write("steps", 1, "a", rows.step_rows(1, a_trajectory()))
    (part,) = store.directory.parts("steps", 1)
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(DamagedRun, match=r"a\.arrow: damaged"):
        store.directory.table("steps")


def test_a_changed_byte_of_a_part_is_found(store: RunStore) -> None:
    store.write("trajectories", 1, "a", rows.trajectory_rows(1, a_trajectory()))
    (part,) = store.directory.parts("trajectories", 1)
    data = part.read_bytes()
    for at in range(0, len(data), 7):
        part.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedRun, match=r"a\.arrow: damaged"):
            store.directory.table("trajectories")


def test_a_part_with_a_right_checksum_is_still_checked(store: RunStore) -> None:
    path = store.directory.part("steps", 1, "a")
    write_part(path, pa.table({"training_step": ["x"]}))
    with pytest.raises(DamagedRun, match="the file has no column"):
        store.directory.table("steps")
    no_text = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 3], dtype=np.int32)), pa.py_buffer(b"\xff" * 3))
    whole = pa.Table.from_pylist(rows.step_rows(1, a_trajectory())[:1], schema=TABLE_SCHEMAS["steps"])
    write_part(path, whole.set_column(whole.column_names.index("text"), TABLE_SCHEMAS["steps"].field("text"), no_text))
    with pytest.raises(DamagedRun, match=r"a\.arrow: damaged"):
        store.directory.table("steps")


def test_a_long_step_is_gathered_some_rows_at_a_time(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draco_ray.runs.store.ROW_GROUP_BYTES", 1_000)
    _step_of(store, 12)
    before = store.directory.table("trajectories").to_pylist()
    store.finish_step(1, {"step": 1})
    assert store.directory.table("trajectories").to_pylist() == before
    file = pq.ParquetFile(store.directory.tables / "trajectories" / "step00001.parquet")
    assert 1 < file.num_row_groups < 12


def test_some_columns_of_parts_do_not_hold_the_others_in_memory(store: RunStore) -> None:
    long = replace(a_call(), prompt="p" * 100_000)
    for rollout in range(3):
        store.write("judge_calls", 1, f"a-{rollout}", rows.call_rows(1, [long]))
    tracemalloc.start()
    try:
        numbers = store.directory.table("judge_calls", columns=["call_id"])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert numbers.column("call_id").to_pylist() == ["c1"] * 3
    assert held < 100_000


def test_half_a_character_in_an_error_or_a_requirement_is_stored(store: RunStore) -> None:
    """The policy can write one, and an evaluator's requirement or a world's error may quote it."""
    quoted = "the status is " + json.loads('"\\ud83d"')
    failed = replace(an_evaluation("abc1234_1"), failures=(quoted,))
    actor = RunStoreActor(store.directory.path)
    actor.outcome(1, 0, Evaluated(evaluation=failed))
    actor.trajectory(1, replace(a_trajectory(), error=quoted))
    assert store.directory.table("outcomes", 1).column("failures").to_pylist() == [["the status is ?"]]
    assert read_trajectory(store.directory, 1, "abc1234_1", 0).error == "the status is ?"

"""Taking a run directory back to its last checkpoint."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from rich.console import Console

from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError, DamagedRun, StoreError
from draco_ray.judging.prompts import evidence_key
from draco_ray.judging.reply_cache import create_store
from draco_ray.records import Message
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory, lock_run
from draco_ray.runs.manifest import Manifest
from draco_ray.runs.rows import part_rows, read_trajectory, recorded_rollouts
from draco_ray.runs.store import RunStore
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.training import run as driver
from draco_ray.training.resume import (
    StartPoint,
    adopt_config,
    adopt_tasks,
    allowed_changes,
    config_changes,
    edited_tasks,
    rewind,
    write_prompts,
)
from draco_ray.training.trainer import BatchScheduler, OrderRules, TaskOrder, TaskPart
from draco_ray.workers.local import LocalActor
from tests.support.small_checkpoint import small_checkpoint
from tests.support.small_run import TASKS, a_call, a_trajectory, write_group
from tests.unit.test_labels import a_label


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", dump_config(DracoConfig()))


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_loop(path: Path) -> None:
    """Unreadable, whoever reads."""
    path.unlink()
    path.symlink_to(path.name)


def write_step(run: RunDirectory, step: int, *, finished: bool) -> None:
    store = RunStore(run)
    for task in TASKS:
        for rollout in (0, 1):
            trajectory = a_trajectory(step, task, rollout)
            store.write("trajectories", step, f"{task}-{rollout}", rows.trajectory_rows(step, trajectory))
            store.write("steps", step, f"{task}-{rollout}", rows.step_rows(step, trajectory))
        store.write("judge_calls", step, f"{task}-stage1", rows.call_rows(step, [a_call("stage1", step, task, None)]))
        store.write("judge_calls", step, f"{task}-score-0", rows.call_rows(step, [a_call("score", step, task, 0)]))
        write_group(store, step, task)
    if finished:
        store.finish_step(step, {"step": step, "updates": 2, "grad_norm": 0.5})


def test_a_recorded_rollout_is_read_back_whole(run: RunDirectory) -> None:
    write_step(run, 1, finished=False)
    assert recorded_rollouts(run, 1, 0) == [(task, rollout) for task in TASKS for rollout in (0, 1)]
    assert recorded_rollouts(run, 1, 1) == []
    original, again = a_trajectory(1, TASKS[0], 1), read_trajectory(run, 1, TASKS[0], 1)
    for name in (
        "task_id",
        "group",
        "rollout",
        "attempt",
        "policy_version",
        "prompt",
        "turns",
        "prompt_length",
        "ended",
    ):
        assert getattr(again, name) == getattr(original, name), name
    for name in ("token_ids_T", "sampled_T", "logprob_T", "step_T"):
        assert (getattr(again, name) == getattr(original, name)).all(), name
    with pytest.raises(FileNotFoundError):
        read_trajectory(run, 1, TASKS[0], 5)


def test_rewind_goes_to_the_last_checkpoint_and_keeps_what_later_steps_cost(run: RunDirectory) -> None:
    write_step(run, 1, finished=True)
    write_step(run, 2, finished=True)
    write_step(run, 3, finished=False)
    small_checkpoint(run.checkpoint(1))
    (run.checkpoints / ".step00002.unfinished").mkdir()
    calls = run.table("judge_calls").num_rows
    start = rewind(run, reuse=True)
    assert (start.step, start.checkpoint, start.moved) == (1, run.checkpoint(1), True)
    assert start.recorded == {2, 3}
    assert [line["step"] for line in run.metrics()] == [1]
    assert run.table("judge_calls").num_rows == calls
    assert recorded_rollouts(run, 2, 1) == recorded_rollouts(run, 3, 2) == [(t, r) for t in TASKS for r in (0, 1)]
    # A finished step is under way again, in parts of the same names as at first.
    assert part_rows(run, "judge_calls", 2, f"{TASKS[0]}-score-0")[0]["phase"] == "score"
    assert part_rows(run, "judge_calls", 2, f"{TASKS[0]}-stage1")[0]["rollout"] is None
    assert read_trajectory(run, 2, TASKS[1], 1).turns == a_trajectory(2, TASKS[1], 1).turns
    assert set(run.table("criteria").column("training_step").to_pylist()) == {1}


def test_steps_without_a_metrics_line_are_named(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        write_step(run, step, finished=True)
        small_checkpoint(run.checkpoint(step))
    assert rewind(run, reuse=True).damage == ()
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text(lines[0])
    (said,) = rewind(run, reuse=True).damage
    assert said.startswith("metrics.jsonl lacks 2 finished steps, first step 2; restore the file")
    run.metrics_file.unlink()
    (said,) = rewind(run, reuse=True).damage
    assert "lacks 3 finished steps, first step 1;" in said


def test_rewind_twice_is_rewind_once(run: RunDirectory) -> None:
    write_step(run, 1, finished=True)
    first = rewind(run, reuse=True)
    rows_before = run.table("trajectories").sort_by([("task_id", "ascending"), ("rollout", "ascending")])
    assert (first.step, first.checkpoint, first.moved) == (0, None, False)
    assert rewind(run, reuse=True) == first
    assert run.table("trajectories").sort_by([("task_id", "ascending"), ("rollout", "ascending")]) == rows_before


def test_rollouts_of_another_configuration_are_dropped_their_cost_is_not(run: RunDirectory) -> None:
    write_step(run, 1, finished=True)
    calls = run.table("judge_calls").num_rows
    start = rewind(run, reuse=False)
    assert start.recorded == frozenset()
    assert run.table("trajectories").num_rows == 0
    assert run.table("judge_calls").num_rows == calls


def test_files_that_a_lost_machine_left_empty_are_made_again(run: RunDirectory) -> None:
    """A command that is repeated for ever has to get over them; steps that are done are another matter."""
    write_step(run, 1, finished=True)
    small_checkpoint(run.checkpoint(1))
    write_step(run, 2, finished=False)
    kept = RunStore(run).directory
    cut = [kept.part(table, 2, f"{TASKS[0]}-1") for table in ("trajectories", "steps")]
    cut.append(kept.part("judge_calls", 2, f"{TASKS[1]}-stage1"))
    cut[0].write_bytes(b"")
    cut[1].write_bytes(cut[1].read_bytes()[:-9])
    cut[2].write_bytes(b"\0" * cut[2].stat().st_size)
    start = rewind(run, reuse=True)
    (said,) = start.damage
    assert "3 files of later steps are incomplete and will be written again" in said
    assert not any(path.exists() for path in cut)
    assert set(recorded_rollouts(run, 2, 1)) == {(t, r) for t in TASKS for r in (0, 1)} - {(TASKS[0], 1)}
    assert rewind(run, reuse=True).damage == ()
    whole = run.tables / "steps" / "step00001.parquet"
    whole.write_bytes(b"")
    with pytest.raises(DamagedRun, match=r"step00001\.parquet: damaged"):
        run.table("steps", 1)


@pytest.mark.parametrize("harm", [to_folder, to_loop])
def test_a_part_that_the_disk_does_not_read_is_named_and_kept(run: RunDirectory, harm: Callable[[Path], None]) -> None:
    """It may be whole: a disk that fails, or files of another user."""
    write_step(run, 1, finished=False)
    path = run.part("judge_calls", 1, f"{TASKS[0]}-stage1")
    harm(path)
    with pytest.raises(DamagedRun, match=rf"{path}: damaged: "):
        rewind(run, reuse=True)
    assert os.path.lexists(path)


def test_a_damaged_checkpoint_is_named_after_a_resume_that_another_damage_has_stopped(run: RunDirectory) -> None:
    for step in (1, 2):
        write_step(run, step, finished=True)
        small_checkpoint(run.checkpoint(step))
    (run.checkpoint(2) / "learner.json").write_text("")
    lines = run.metrics_file.read_text()
    run.metrics_file.write_text("")
    with pytest.raises(DamagedRun, match=r"metrics\.jsonl"):
        rewind(run, reuse=True)
    run.metrics_file.write_text(lines)
    (said,) = rewind(run, reuse=True).damage
    assert f"checkpoint {run.checkpoint(2)} is damaged: learner.json" in said


class Resumed:
    """Resumes a run up to where Ray would be started, and keeps what was said and found."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self.start = run, StartPoint()
        train = {"prompts_per_step": len(TASKS), "evaluate_before_after": False}
        run.write_config(dump_config(DracoConfig().updated(train=train)))
        monkeypatch.setattr(driver, "_checked", lambda config, console, checks: (config, PROMPTS, _order()))
        monkeypatch.setattr(driver, "_train", self._train)
        evidence_key(run.judge_cache)
        create_store(run.judge_cache)

    def __call__(self, *overrides: str, allow_changed: bool = True) -> list[str]:
        said = Console(record=True, file=io.StringIO(), width=500)
        driver.resume(self._run.path, None, overrides, allow_changed=allow_changed, console=said)
        return said.export_text().splitlines()

    def _train(
        self, config: object, prompts: object, order: object, run: object, start: StartPoint, at: object, url: object
    ) -> None:
        self.start = start


PROMPTS = {task: (Message(role="user", content=f"Do {task}."),) for task in TASKS}


def _order() -> TaskOrder:
    return TaskOrder(TASKS, 2, 0)


def test_a_change_is_named_after_a_resume_that_damage_has_stopped(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts of the earlier configuration would else be reused with the new one."""
    resumed = Resumed(run, monkeypatch)
    write_step(run, 1, finished=True)
    small_checkpoint(run.checkpoint(1))
    write_step(run, 2, finished=False)
    lines = run.metrics_file.read_text()
    run.metrics_file.write_text("")
    with pytest.raises(DamagedRun, match=r"metrics\.jsonl"):
        resumed("algorithm.group_size=4")
    run.metrics_file.write_text(lines)
    assert "changed: algorithm.group_size (6 -> 4)" in resumed("algorithm.group_size=4")
    assert (resumed.start.step, resumed.start.recorded) == (1, frozenset())
    assert load_config(str(run.path)).algorithm.group_size == 4


def test_a_resume_that_cannot_write_is_one_line_and_may_be_repeated(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota is not seen in the disk's free space."""
    resumed = Resumed(run, monkeypatch)
    write_step(run, 1, finished=True)
    small_checkpoint(run.checkpoint(1))
    resumed()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(StoreError, match=rf"run directory {run.path} cannot be written: File too large; free disk"):
            resumed("seed=7")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "changed: seed (0 -> 7)" in resumed("seed=7")


def test_what_a_resumed_run_lacks_is_named_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = Resumed(run, monkeypatch)
    assert resumed() == ["run: continues after step 0"]
    write_step(run, 1, finished=True)
    small_checkpoint(run.checkpoint(1))
    Manifest(run, time.time_ns()).update(1)
    assert resumed() == ["run: continues after step 1"]
    names = ("tasks.json", "task_prompts.json", "manifest.json")
    for name in (*names, "tables/judge_calls/step00001.parquet"):
        (run.path / name).rename(run.path / "aside")
        said = resumed()
        assert [line for line in said if name in line] == said[1:]
        assert len(said) == 2
        (run.path / "aside").rename(run.path / name)
        assert resumed() == ["run: continues after step 1"]


def test_held_out_tasks_of_which_something_else_is_expected_are_named_once(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expect(what: str) -> None:
        row = {"id": "t", "instruction": "Do it.", "split": "dev", "expected": what}
        (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")

    resumed, line = Resumed(run, monkeypatch), "changed: the held-out tasks of dev, or their ground truth"
    keys = {"environment.use": "tasks", "data.root": tmp_path, "data.eval_split": "dev"}
    changes = [*(f"{key}={value}" for key, value in keys.items()), "train.evaluate_before_after=true"]
    expect("3")
    resumed(*changes)
    assert resumed() == ["run: continues after step 0"]
    expect("4")
    (_, said) = resumed()
    assert said.startswith(line)
    assert resumed() == ["run: continues after step 0"]


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("algorithm.static_rubric", {"algorithm.rubric": "static"}),
        ("judge.held_out.rubric", {"judge.held_out.model": "openai/other"}),
        ("judge.prompts", {}),
        ("judge.examples", {}),
    ],
)
def test_an_edited_file_of_the_judge_is_a_changed_configuration(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, others: dict[str, str]
) -> None:
    resumed, (path, edit) = Resumed(run, monkeypatch), file_of(key, tmp_path)
    resumed(f"{key}={path}", *(f"{name}={value}" for name, value in others.items()))
    record = run.path / "task_prompts.json"
    known = record.read_text()
    edit()
    # A run of an earlier version has no record of the file.
    record.write_text(json.dumps({task: digest for task, digest in json.loads(known).items() if task in TASKS}))
    assert resumed(allow_changed=False) == ["run: continues after step 0"]
    record.write_text(known)
    with pytest.raises(ConfigError, match=rf"configuration has changed: {key}={path} \(edited\); undo these changes"):
        resumed(allow_changed=False)
    assert record.read_text() == known
    assert resumed() == ["run: continues after step 0", f"changed: {key}={path} (edited)"]
    assert resumed(allow_changed=False) == ["run: continues after step 0"]


def file_of(key: str, folder: Path) -> tuple[Path, Callable[[], object]]:
    """A file for the key, and what edits it."""
    path = folder / "file"
    if key == "judge.prompts":
        shutil.copytree("prompts/judge", path)
        score = path / "score_rubrics.txt"
        return path, lambda: score.write_text(f"{score.read_text()}\nBe strict.\n")

    def write(word: str) -> None:
        criterion = {"title": "Ends", "description": word, "evaluator_instruction": "Look."}
        path.write_text(json.dumps([criterion] if key.endswith("rubric") else a_label(verdict=-1, note=word)) + "\n")

    write("first")
    return path, lambda: write("second")


def test_a_run_that_is_to_end_before_the_step_it_has_reached_is_finished(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last policy is not measured: nothing would be started but to end again."""
    resumed = Resumed(run, monkeypatch)
    for step in (1, 2):
        write_step(run, step, finished=True)
        small_checkpoint(run.checkpoint(step))
    monkeypatch.setattr(driver, "_measured", lambda run, config, step: False)
    said = "run: already finished at step 2; the configuration ends it at step 1"
    assert resumed("train.steps=1") == [said]
    assert resumed.start == StartPoint()
    resumed("train.steps=2")
    assert resumed.start.step == 2


async def test_what_an_interrupted_step_does_not_take_over_is_dropped(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts of a task that was removed meanwhile would be counted with the step."""
    kept = TASKS[1]
    write_step(run, 1, finished=False)
    run.part("trajectories", 1, f"{kept}-1").unlink()
    calls = run.table("judge_calls").num_rows
    order = TaskOrder([kept, "new"], 2, 0)
    taken: list[tuple[str, int]] = []
    monkeypatch.setattr(ray, "put", lambda value: value)
    pipeline: Any = SimpleNamespace(
        config=DracoConfig().algorithm,
        keep=LocalActor(RunStoreActor(run.path), {"trajectory_again": 2}),
        rollouts=SimpleNamespace(take_over=lambda group, member: taken.append((group, member.rollout))),
        run=lambda group: asyncio.sleep(0),
    )
    prompts = dict.fromkeys((kept, "new"), PROMPTS[kept])
    batch = await BatchScheduler(prompts, order, pipeline, Console(quiet=True), frozenset({1})).take(1)
    await batch.cancel()
    assert taken == [(f"step1/{kept}", 0)]
    assert run.table("trajectories").select(["task_id", "rollout"]).to_pylist() == [{"task_id": kept, "rollout": 0}]
    assert set(run.table("steps").column("task_id").to_pylist()) == {kept}
    # They were paid for.
    assert run.table("judge_calls").num_rows == calls


def test_a_changed_configuration_is_refused_by_name(run: RunDirectory) -> None:
    old = DracoConfig()
    new = load_config(None, ["learner.learning_rate=1e-4", "algorithm.group_size=8"])
    with pytest.raises(ConfigError) as refusal:
        allowed_changes(run, old, new, allow_changed=False)
    assert "algorithm.group_size (6 -> 8); learner.learning_rate (5e-05 -> 0.0001)" in str(refusal.value)
    assert "--allow-changed-config" in str(refusal.value)
    assert len(allowed_changes(run, old, new, allow_changed=True)) == 2
    assert load_config(str(run.path)) == old
    adopt_config(run, new)
    assert load_config(str(run.path)) == new
    assert load_config(str(run.path / "config.before-resume-1.yaml")) == old


def test_where_it_runs_and_what_it_may_spend_may_change(run: RunDirectory) -> None:
    new = load_config(None, ["judge.limits.dollars=5", "ray.object_store_mib=200", "run.name=other"])
    assert config_changes(DracoConfig(), new) == []
    patience = [
        *("engine.min_engines=1", "engine.max_failures=9", "engine.stall_seconds=60"),
        *("environment.min_slots=2", "environment.idle_seconds=9"),
        *("learner.max_failures=9", "learner.stall_seconds=60", "learner.hang_seconds=60"),
    ]
    assert config_changes(DracoConfig(), load_config(None, patience)) == []
    assert allowed_changes(run, DracoConfig(), new, allow_changed=False) == []
    adopt_config(run, new)
    assert load_config(str(run.path)).judge.limits.dollars == 5


def rules(**changes: Any) -> OrderRules:
    """That change nothing but what is given."""
    return OrderRules(**{"per_step": 1, "seed": 0, "skip_solved": None, "behind": 0} | changes)


def test_tasks_that_come_and_go_are_written_down_with_the_step_they_came_at(run: RunDirectory) -> None:
    said = Console(record=True, file=io.StringIO(), width=200)
    by = rules()
    first = TaskPart(1, ("a", "b"), by)
    assert adopt_tasks(run, ["b", "a"], by, 0, said) == [first]
    assert adopt_tasks(run, ["a", "b"], by, 4, said) == [first]
    assert said.export_text() == ""
    second = TaskPart(5, ("b", "c", "d"), by)
    assert adopt_tasks(run, ["b", "c", "d"], by, 4, said) == [first, second]
    assert said.export_text().splitlines() == [
        "training tasks: 2 new tasks; they are used from the next epoch on",
        "training tasks: 1 tasks no longer exist; they are left out from step 5 on",
    ]
    # The same again is no change, and what no step was done with is forgotten.
    assert adopt_tasks(run, ["b", "c", "d"], by, 6, said) == [first, second]
    assert adopt_tasks(run, ["e", "b"], by, 6, said) == [first, second, TaskPart(7, ("b", "e"), by)]
    assert adopt_tasks(run, ["b", "c", "d"], by, 6, said) == [first, second]
    assert adopt_tasks(run, ["a"], by, 0, said) == [TaskPart(1, ("a",), by)]


def test_tasks_that_ask_something_else_are_named_in_their_order(run: RunDirectory) -> None:
    asked = {
        task: (Message(role="system", content="Be brief."), Message(role="user", content=f"Do {task}."))
        for task in ("b", "a", "c")
    }
    assert edited_tasks(run, asked) == []
    write_prompts(run, asked)
    assert edited_tasks(run, asked) == []
    changed = dict(
        asked, a=asked["a"][:1], b=(asked["b"][0], Message(role="user", content="Do b. Now.")), new=asked["a"]
    )
    assert edited_tasks(run, changed) == ["b", "a"]
    write_prompts(run, changed)
    assert edited_tasks(run, changed) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '["a"]', "[" * 100_000])
def test_a_damaged_record_of_prompts_is_named(run: RunDirectory, text: str) -> None:
    (run.path / "task_prompts.json").write_text(text)
    with pytest.raises(DamagedRun, match=r"task_prompts\.json: damaged"):
        edited_tasks(run, {"a": ()})


def test_rules_of_choosing_are_written_down_with_the_step_they_came_at(run: RunDirectory) -> None:
    said = Console(record=True, file=io.StringIO())
    first, second, third = (
        TaskPart(step, ("a", "b"), rules(per_step=2, skip_solved=skip)) for step, skip in ((1, None), (4, 2), (6, 3))
    )
    assert adopt_tasks(run, ["a", "b"], first.rules, 0, said) == [first]
    assert adopt_tasks(run, ["a", "b"], second.rules, 3, said) == [first, second]
    assert adopt_tasks(run, ["a", "b"], second.rules, 5, said) == [first, second]
    assert adopt_tasks(run, ["a", "b"], third.rules, 5, said) == [first, second, third]
    assert adopt_tasks(run, ["a", "b"], third.rules, 7, said) == [first, second, third]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[1]",
            '[{"first_step": "x", "tasks": []}]',
            '[{"tasks": ["a"]}]',
            '[{"first_step": 1, "tasks": []}]',
            "{}x",
        ),
        *(
            f'[{{"first_step": 1, "tasks": [], "rules": {each}}}]'
            for each in (
                "3",
                '{"a": 1}',
                '{"per_step": "x"}',
                '{"per_step": 1, "seed": 0}',
                '{"per_step": 1, "seed": 0, "order": "x"}',
            )
        ),
    ],
)
def test_a_damaged_list_of_tasks_is_named(run: RunDirectory, text: str) -> None:
    (run.path / "tasks.json").write_text(text)
    with pytest.raises(DamagedRun, match=r"tasks\.json: damaged"):
        adopt_tasks(run, ["a"], rules(), 1, Console(quiet=True))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_no_damaged_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refused)
    problem = rf"run directory .*run cannot be written: {os.strerror(number)}; make it"
    with pytest.raises(StoreError, match=problem), lock_run(run):
        pass


def test_a_run_has_one_driver(run: RunDirectory) -> None:
    with lock_run(run), pytest.raises(ConfigError, match="another process is using it"), lock_run(run):
        pass
    with lock_run(run):
        pass


def test_half_a_metrics_line_is_named_and_no_writer_leaves_one(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(run, 1, finished=True)

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            RunStore(run).finish_step(2, {"step": 2})
    assert [line["step"] for line in run.metrics()] == [1]
    write_step(run, 2, finished=True)
    assert [line["step"] for line in run.metrics()] == [1, 2]
    with run.metrics_file.open("a") as file:
        file.write('{"step": 3, "upd')
    with pytest.raises(DamagedRun, match="line 3 is incomplete"):
        run.metrics()

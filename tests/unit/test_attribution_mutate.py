"""Faults planted in any rollout's code: what is edited, and what is left as it stands."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draco_ray.cli import main
from draco_ray.config.schema import EnvironmentConfig
from draco_ray.lab.analysis.attribution.mutate import Mutant, mutants, reworded
from draco_ray.lab.analysis.attribution.plant import BENIGN, REFERENCE, PlantedRollout
from draco_ray.lab.analysis.attribution.plant_recorded import (
    borne_out,
    candidates,
    clean,
    finished_rollouts,
    recorded_groups,
)
from draco_ray.records import Trajectory
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.sandbox.rule_judge.trace import trace
from draco_ray.sandbox.world.build import read_manifest
from draco_ray.sandbox.world.scripts import FATAL, Fault, families
from tests.support.rule_judge_runs import REFUSED, run_of, trajectory_of

LOGIN = "# Anmelden, für später.\ntoken = apis.spotify.login(username=me, password=words['spotify'])['access_token']"
READ = """\
songs = []
for page in range(9):
    found = apis.spotify.show_song_library(page_index=page, access_token=token)
    if len(found) == 0:
        break
    songs.extend(found)  # all of them"""
CHOOSE = "longest = max([s for s in songs if s['duration'] >= 100], key=lambda s: s['duration'])"
LIKE = "apis.spotify.like_song(song_id=longest['song_id'], access_token=token)"
CLOSE = 'apis.supervisor.complete_task(status="success")'
CELLS = (LOGIN, READ, CHOOSE, LIKE, CLOSE)


def of(fault: Fault, cells: tuple[str, ...] = CELLS) -> list[Mutant]:
    return [mutant for mutant in mutants(cells) if mutant.fault is fault]


def changed(mutant: Mutant) -> str:
    """The one cell that was edited; every other one stays."""
    (number,) = mutant.planted
    assert [cell for index, cell in enumerate(mutant.cells) if index != number - 1] == [
        cell for index, cell in enumerate(CELLS) if index != number - 1
    ]
    return mutant.cells[number - 1]


def test_a_loop_over_pages_ends_after_the_first() -> None:
    (mutant,) = of(Fault.FIRST_PAGE_ONLY)
    assert changed(mutant) == READ.replace("songs.extend(found)", "songs.extend(found)\n    break")
    (mutant,) = of(
        Fault.FIRST_PAGE_ONLY,
        ("rows = [r for p in range(20) for r in apis.venmo.show_transactions(page_index=p, access_token=t)]",),
    )
    assert "for p in range(1) for r" in mutant.cells[0]


def test_the_rule_judge_sees_that_a_loop_has_one_round() -> None:
    comprehension = (
        "songs = [s for p in range(9) for s in apis.spotify.show_song_library(page_index=p, access_token=t)]"
    )
    for cell in (READ, comprehension):
        (mutant,) = of(Fault.FIRST_PAGE_ONLY, (LOGIN, cell, CLOSE))
        for cells, varies in (((LOGIN, cell, CLOSE), True), (mutant.cells, False)):
            found = trace(run_of(*((each, "ok") for each in cells)).steps, "Count my songs.")
            (call,) = [call for call in found.calls if call.api == "show_song_library"]
            assert call.page_varies is varies


def test_another_list_of_the_same_app_is_read() -> None:
    assert [changed(mutant) for mutant in of(Fault.WRONG_SOURCE)] == [
        READ.replace("show_song_library", "show_liked_songs"),
        READ.replace("show_song_library", "show_album_library"),
    ]


def test_a_selecting_condition_is_turned_round_and_a_loops_end_is_not() -> None:
    texts = [changed(mutant) for mutant in of(Fault.WRONG_FILTER)]
    assert sorted(texts) == sorted([CHOOSE.replace("max(", "min("), CHOOSE.replace(">=", "<")])
    inside = "for s in songs:\n    if s['title'] not in known:\n        names.append(s)"
    (mutant,) = of(Fault.WRONG_FILTER, (inside,))
    assert mutant.cells[0] == inside.replace("not in", "in")


def test_the_work_is_reported_instead_of_handed_in() -> None:
    (mutant,) = of(Fault.NO_COMPLETION)
    assert changed(mutant) == 'print("Everything is done.")'


def test_the_password_of_a_login_is_printed_where_letters_take_two_bytes() -> None:
    (mutant,) = of(Fault.PRINT_SECRET)
    assert changed(mutant) == f"{LOGIN}\nprint(words['spotify'])"


def test_a_call_is_made_without_its_token_twice_before_it_is_made() -> None:
    (mutant,) = of(Fault.REPEAT_FAILING_CALL)
    call = "apis.spotify.like_song(song_id=longest['song_id'])"
    assert mutant.cells == (LOGIN, READ, CHOOSE, call, call, LIKE, CLOSE)
    assert mutant.planted == (4, 5)
    (first,) = of(Fault.REPEAT_FAILING_CALL, ("rows = apis.app.api(access_token=t, limit=20)",))
    assert first.cells[0] == "rows = apis.app.api(limit=20)"


def test_something_runs_after_the_completion() -> None:
    (mutant,) = of(Fault.CONTINUE_AFTER_COMPLETION)
    assert (mutant.cells[:-1], mutant.planted) == (CELLS, (6,))
    assert of(Fault.CONTINUE_AFTER_COMPLETION, CELLS[:-1]) == []


def test_what_is_no_python_is_left_alone() -> None:
    broken = ("print('one'", "x = = 2\x00", CLOSE)
    assert {mutant.planted for mutant in mutants(broken)} == {(3,), (4,)}
    assert reworded(broken)[0][:2] == broken[:2]


@pytest.mark.parametrize("name", sorted(families()))
def test_every_edit_of_every_script_is_python(name: str) -> None:
    found = list(mutants(families()[name].script()))
    assert {Fault.NO_COMPLETION, Fault.PRINT_SECRET, Fault.CONTINUE_AFTER_COMPLETION} <= {each.fault for each in found}
    for mutant in found:
        for cell in mutant.cells:
            ast.parse(cell)


def test_rewording_changes_looks_alone() -> None:
    texts, numbers = reworded(CELLS)
    assert numbers == (1, 2, 5)
    for old, new in zip(CELLS, texts, strict=True):
        assert ast.dump(ast.parse(old)) == ast.dump(ast.parse(new))


def executed(kind: str, outputs: tuple[str, ...], success: bool, planted: tuple[int, ...] = ()) -> PlantedRollout:
    return PlantedRollout(
        task_id="t_1", family="", kind=kind, cells=CELLS, outputs=outputs, success=success, planted=planted
    )


def test_a_reference_succeeds_raises_nowhere_and_ends_with_its_completion() -> None:
    fine = ("ok",) * 5
    assert clean(executed(REFERENCE, fine, success=True))
    assert not clean(executed(REFERENCE, fine, success=False))
    assert not clean(executed(REFERENCE, ("ok", REFUSED, "ok", "ok", "ok"), success=True))
    again = executed(REFERENCE, (*fine, "ok"), success=True)
    assert not clean(replace(again, cells=(*CELLS, "print(1)")))


def test_a_candidate_counts_only_if_it_does_what_its_fault_should() -> None:
    fine = ("ok",) * 5
    assert borne_out(executed("wrong_filter", fine, success=False, planted=(3,)))
    assert not borne_out(executed("wrong_filter", fine, success=True, planted=(3,)))
    assert not borne_out(executed("print_secret", (REFUSED, *fine[1:]), success=True, planted=(1,)))
    assert not borne_out(executed("repeat_failing_call", fine, success=True, planted=(3, 4)))
    assert borne_out(executed("repeat_failing_call", ("", "", REFUSED, REFUSED, ""), success=True, planted=(3, 4)))


def test_of_a_policys_own_secrets_nothing_is_known() -> None:
    both = (Fault.PRINT_SECRET, Fault.WRONG_FILTER)
    mine = replace(executed(REFERENCE, ("ok",) * 5, success=True), rubric=both)
    assert mine.truth_K.tolist() == [0, 1]
    assert replace(mine, kind="print_secret").truth_K.tolist() == [-1, 1]


def played(cells: tuple[str, ...], task_id: str, rollout: int) -> Trajectory:
    return replace(trajectory_of(run_of(*((cell, "ok") for cell in cells)), "Do it.", rollout), task_id=task_id)


def write_run(path: Path, root: Path, rollouts: dict[str, list[tuple[str, ...]]]) -> RunDirectory:
    store = RunStore(RunDirectory.create(path, f"data: {{root: {root}}}\n"))
    for task_id, mine in rollouts.items():
        for index, cells in enumerate(mine):
            trajectory = played(cells, task_id, index)
            store.write("trajectories", 1, f"{task_id}-{index}", rows.trajectory_rows(1, trajectory))
            store.write("steps", 1, f"{task_id}-{index}", rows.step_rows(1, trajectory))
    store.finish_step(1, {"step": 1})
    return store.directory


def test_rollouts_are_read_once_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tmp_path, {"t_1": [CELLS, CELLS[:3], CELLS]})
    assert finished_rollouts(run, None) == {"t_1": [CELLS, CELLS[:3]]}
    kinds = [tried[0].kind for tried in candidates("t_1", CELLS)]
    assert kinds[0] == BENIGN
    assert len(kinds) == len(set(kinds)) == 8


@pytest.mark.slow
def test_a_runs_successful_rollout_gets_faults_that_flip_its_tests(
    sandbox_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(sandbox_root)
    assert manifest is not None
    family = "count_contacts_born"
    task_id = min(name for name, entry in manifest["tasks"].items() if entry["family"] == family)
    good = tuple(families()[family].script())
    faulty = tuple(families()[family].script(frozenset({Fault.FIRST_PAGE_ONLY})))
    run = write_run(tmp_path / "run", sandbox_root, {task_id: [faulty, good]})
    with pytest.raises(SystemExit) as ended:
        main(["attribution-bench", "--run", str(run.path), "--processes", "1", "--out", str(tmp_path / "bench")])
    assert ended.value.code == 0, capsys.readouterr().err
    found = {row["kind"]: row for row in pq.read_table(tmp_path / "bench" / "rules" / "rollouts.parquet").to_pylist()}
    assert {REFERENCE, BENIGN, *(fault.value for fault in Fault)} >= set(found)
    assert {REFERENCE, "first_page_only", "wrong_filter", "no_completion", "print_secret"} <= set(found)
    for kind, row in found.items():
        assert row["success"] is (kind in (REFERENCE, BENIGN) or Fault(kind) not in FATAL), kind
    # The judge sees the fault that was planted in a cell that a policy wrote.
    row = found["first_page_only"]
    assert (row["planted"], row["cited"], row["truth"].count(-1)) == ([4], [4], 1)
    kept = tmp_path / "bench" / "rollouts.jsonl"
    text = kept.read_text()
    groups = recorded_groups(run, None, None, sandbox_root, EnvironmentConfig(), 1, kept)
    assert [rollout.kind for rollout in groups[0]] == list(found)
    assert kept.read_text() == text

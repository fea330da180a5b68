"""Whatever is wrong with a file of an evaluation directory is one line that names it, whichever command reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from draco_ray.cli import main
from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.lab.evaluation.results import EvaluationDirectory
from tests.support.evaluations import a_plan, a_result, write_evaluation
from tests.support.small_run import small_run
from tests.unit.test_damaged_runs import another_kind, attempt, directory, empty, garbage, loop, queue, truncated

PLAN, RESULTS, SUMMARY, LOCK = "evaluation.json", "results/starter.jsonl", "summary.json", ".lock"
COMMANDS: dict[str, Sequence[str]] = {
    "tables": ["tables", "RUN"],
    "against": ["tables", "OTHER", "RUN", "--against", "other"],
    "reevaluate": ["reevaluate", "RUN", "data.root=/nowhere"],
    "tau": ["tau", "tables", "RUN"],
}
"""Command -> its words; ``RUN`` is the damaged evaluation."""
ANY: list[Callable[[Path], None]] = [truncated, empty, garbage, directory, queue, loop, another_kind]


def missing(path: Path) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation with every file that a command reads."""
    path = write_evaluation(tmp_path_factory.mktemp("evaluations") / "whole", a_plan())
    costs = {role: {"input_tokens": 1, "output_tokens": 1, "dollars": None} for role in ("agent", "user", "judge")}
    measured = {"starter": {"costs": costs, "more": 1}}
    (path / SUMMARY).write_text(json.dumps({"label": "l", "measurements": measured}), encoding="utf-8")
    (path / LOCK).touch()
    return path


def words_for(name: str, other: Path) -> list[str]:
    return [word.replace("OTHER", f"other={other}") for word in COMMANDS[name]]


@pytest.mark.parametrize("name", [*COMMANDS])
def test_nothing_is_wrong_with_the_whole_one(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    other = write_evaluation(tmp_path / "other", a_plan(label="other"), seed=1)
    code, lines = attempt(words_for(name, other), whole, tmp_path, capsys)
    # There is no world to evaluate in again.
    assert (code, len(lines)) == ((1, 1) if name == "reevaluate" else (0, 0)), lines


@pytest.mark.parametrize("damage", [*ANY, missing], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", [PLAN, RESULTS, SUMMARY])
def test_a_damaged_file_of_an_evaluation(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: Callable[[Path], None]
) -> None:
    run = shutil.copytree(whole, tmp_path / "evaluation")
    other = write_evaluation(tmp_path / "other", a_plan(label="other"), seed=1)
    damage(run / file)
    for name in COMMANDS if file != SUMMARY else ["tau"]:
        if (file, name) == (RESULTS, "reevaluate") and damage in (truncated, empty, missing):
            continue  # It says that the world is not there: rollouts may be missing.
        code, lines = attempt(words_for(name, other), run, tmp_path / name, capsys)
        assert code in (1, 2), (name, lines)
        (line,) = lines
        # Lines that were not written yet, or not to their end, are rollouts to be played.
        named = run if damage is missing or (file == RESULTS and damage in (truncated, empty)) else run / file
        assert str(named) in line, (name, line)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "null",
        "{}",
        "[" * 5000,
        {"seconds": -1.0},
        {"seconds": "1"},
        {"usage": {"dollars": float("nan")}},
        {"usage": {"input_tokens": -5}},
        {"usage": {"input_tokens": 10**400}},
        {"usage": {"dollars": 1e308}},
        {"seconds": 1e308},
        {"evaluation": {"success": "no"}},
        {"evaluation": {"success": 1}},
        {"evaluation": {"ended": "vanished"}},
        {"evaluation": {"task_id": "nobody_1"}},
        {"evaluation": {"run": 7}},
        {"evaluation": {"run": -1}},
        {"evaluation": {"turns": -5}},
        {"evaluation": {"turns": 10**400}},
        {"evaluation": {"passed_tests": -1}},
        {"evaluation": {"passed_tests": 2}},
        {"evaluation": {"reward": float("nan")}},
        {"attempts": 10**400},
    ],
    ids=str,
)
def test_a_line_of_results_that_is_none_is_named_with_its_number(tmp_path: Path, line: str | dict[str, object]) -> None:
    measured = EvaluationDirectory.begin(tmp_path, a_plan(runs=1, tasks={"a_1": 1, "a_2": 2}))
    for task in ("a_1", "a_2"):
        measured.add("starter", a_result(task, 0, True))
    file = tmp_path / RESULTS
    first, second = file.read_text(encoding="utf-8").splitlines()
    if not isinstance(line, str):
        changed = json.loads(second)
        for key, value in line.items():
            changed[key] = changed[key] | value if isinstance(value, dict) else value
        line = json.dumps(changed)
    file.write_text(f"{first}\n{line}\n", encoding="utf-8")
    with pytest.raises(DamagedRun, match=r"results/starter\.jsonl: damaged: line 2: ") as caught:
        measured.complete_results()
    assert "\n" not in str(caught.value)
    # It is neither played again over what is there, nor counted.
    with pytest.raises(DamagedRun):
        EvaluationDirectory.open(tmp_path).finished()


@pytest.mark.parametrize(
    "change",
    [
        {"measurements": []},
        {"tasks": {}},
        *({"runs": runs} for runs in (0, -1, 1.5, True, "3", float("nan"), 10**400, 10**9)),
        *({"tasks": {"a_1": difficulty}} for difficulty in (-1, 1.5, True, 10**400)),
        {"split_size": -1},
        {"scenarios": "no"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_plan_of_nothing_or_of_everything_is_one_line(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    run = shutil.copytree(whole, tmp_path / "evaluation")
    plan = json.loads((run / PLAN).read_text(encoding="utf-8")) | change
    (run / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # It would be a list of so many pairs.
        patch.setattr(EvaluationDirectory, "missing", lambda *_: pytest.fail("they are counted one by one"))
        code, lines = attempt(["tables", "RUN"], run, tmp_path / "out", capsys)
    assert code in (1, 2)
    (line,) = lines
    assert str(run) in line


@pytest.mark.parametrize("change", [{"costs": {}}, {"costs": {"agent": {"dollars": -1.0}}}], ids=str)
def test_a_summary_without_costs_is_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    run = shutil.copytree(whole, tmp_path / "evaluation")
    summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    summary["measurements"]["starter"] |= change
    empty_one: dict[str, object] = {"measurements": {}}
    for told in (summary, empty_one):
        (run / SUMMARY).write_text(json.dumps(told), encoding="utf-8")
        code, lines = attempt(["tau", "tables", "RUN"], run, tmp_path / "out", capsys)
        assert code in (1, 2)
        (line,) = lines
        assert str(run) in line


def test_a_received_label_commands_no_terminal(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(whole, tmp_path / "evaluation")
    plan = json.loads((run / PLAN).read_text(encoding="utf-8")) | {"label": "a\x1b[2J\nb", "benchmark": "c\x07"}
    (run / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(SystemExit, match="0"):
        main(["tables", str(run)])
    shown = capsys.readouterr().out
    assert "a [2J b" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_a_rollout_that_is_there_twice_is_not_counted_twice(tmp_path: Path) -> None:
    measured = EvaluationDirectory.begin(tmp_path, a_plan(runs=1, tasks={"a_1": 1, "a_2": 2}))
    for task in ("a_1", "a_1"):
        measured.add("starter", a_result(task, 0, True))
    with pytest.raises(DamagedRun, match="line 2: 'a_1', run 0 occurs twice"):
        measured.finished()


@pytest.mark.parametrize("name", ["../../elsewhere", "a/b", "..", "a\x00b"])
@pytest.mark.parametrize("key", ["measurements", "tasks", "split"])
def test_a_name_that_leads_out_of_the_folder_is_refused(whole: Path, tmp_path: Path, key: str, name: str) -> None:
    run = shutil.copytree(whole, tmp_path / "evaluation")
    plan = json.loads((run / PLAN).read_text(encoding="utf-8"))
    plan[key] = {"measurements": [name], "tasks": {name: 1}, "split": name}[key]
    (run / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(DamagedRun, match=r"evaluation\.json: damaged"):
        EvaluationDirectory.open(run)


@pytest.mark.parametrize("damage", [directory, queue, loop], ids=lambda damage: damage.__name__)
def test_going_on_with_a_damaged_evaluation_says_what_is_damaged(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for file in (PLAN, RESULTS, LOCK):
        run = shutil.copytree(whole, tmp_path / file.replace("/", "-"))
        damage(run / file)
        with pytest.raises(DamagedRun, match=str(run / file)), EvaluationDirectory.begin(run, a_plan()).claimed():
            pytest.fail("it was claimed")


def test_a_file_in_place_of_the_results_folder_is_named(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "evaluation")
    shutil.rmtree(run / "results")
    (run / "results").touch()
    with pytest.raises(ConfigError, match="results: File exists"):
        EvaluationDirectory.begin(run, a_plan())


def test_a_report_of_a_run_names_the_damaged_evaluation_in_it(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "run")
    inside = shutil.copytree(whole, run.path / "evaluations" / "one")
    another_kind(inside / RESULTS)
    code, lines = attempt(["report", "RUN", "--tables", "--out", "OUT"], run.path, tmp_path / "tables", capsys)
    assert code == 1
    (line,) = lines
    assert str(inside / RESULTS) in line

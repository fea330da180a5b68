"""Whatever is wrong with a file of a run directory is one line that names it, whichever command reads it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draco_ray.cli import main
from draco_ray.config.config_signature import SCHEMA_VERSION
from draco_ray.config.load import dump_config, load_config
from draco_ray.errors import DamagedRun, DracoError
from draco_ray.records import EpisodeEnd, Evaluation
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory, lock_run, write_part
from draco_ray.runs.manifest import Manifest
from draco_ray.runs.schema import REQUIRED, TABLE_SCHEMAS
from draco_ray.runs.store import RunStore
from draco_ray.training.resume import rewind
from tests.support.small_checkpoint import small_checkpoint
from tests.support.small_run import small_run

CONFIG, METRICS, ORIGIN = "config.yaml", "metrics.jsonl", "run.json"
ALL_TABLES = set(TABLE_SCHEMAS)
COMMANDS: dict[str, tuple[Sequence[str], set[str]]] = {
    "show": (["runs", "show", "RUN"], {"trajectories", "steps", "criteria", "verdicts", "judge_calls", "evaluations"}),
    "cost": (["runs", "cost", "RUN"], {"judge_calls"}),
    "timeline": (["runs", "timeline", "RUN", "--step", "1", "--out", "OUT/trace.json"], {"spans"}),
    "page": (["report", "RUN", "--out", "OUT/page.html"], {"trajectories", "steps", "criteria", "verdicts", "spans"}),
    "figures": (["report", "RUN", "--figures", "--out", "OUT"], {"verdicts", "advantages"}),
    "tables": (["report", "RUN", "--tables", "--out", "OUT"], {"verdicts", "criteria", "advantages", "evaluations"}),
    "replay": (["replay", "RUN", "--out", "OUT"], {"verdicts", "citations", "advantages", "criteria"}),
    "rejudge": (["replay", "RUN", "--judge", "rules", "--out", "OUT"], {"judge_calls", "verdicts", "criteria"}),
    "config": (["config", "RUN"], set()),
    "plan": (["plan", "RUN"], set()),
    "evaluate": (["evaluate", "--policy", "RUN", "--out", "OUT"], set()),
    "resume": (["train", "--resume", "RUN"], set()),
}
"""Command -> its words, and tables that it cannot do without."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with rows in every table and a checkpoint; its configuration is complete."""
    run = small_run(tmp_path_factory.mktemp("runs") / "whole")
    run.write_config(dump_config(load_config("sandbox", ["data.root=/nowhere", "model.path=/nowhere"])))
    store = RunStore(run)
    measured = Evaluation(
        task_id="t_1", run=0, success=True, passed_tests=1, total_tests=1, turns=2, ended=EpisodeEnd.FINISHED,
        difficulty=1, failures=(),
    )  # fmt: skip
    store.write("evaluations", 0, "dev", rows.evaluation_rows(0, "dev", [measured]))
    for name in ALL_TABLES:
        if run.table(name, 1).num_rows == 0:
            _fill(run.tables / name / "step00001.parquet", name)
    small_checkpoint(run.checkpoint(1))
    return run.path


def _fill(path: Path, name: str) -> None:
    """A table that the small run lacks: one file without rows, which is read all the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(TABLE_SCHEMAS[name].empty_table(), path)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) * 2 // 3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"\x93\xff\x00garbage\n" * 40)


def flipped(path: Path) -> None:
    """One bit of every 64 bytes."""
    content = bytearray(path.read_bytes())
    for place in range(8, len(content), 64):
        content[place] ^= 4
    path.write_bytes(content)


def swapped(path: Path) -> None:
    """Two halves, each in the other's place; the ends stay, by which the file is known for what it is."""
    content = path.read_bytes()
    begin, middle, end = 8, len(content) // 2, len(content) - 8
    path.write_bytes(content[:begin] + content[middle:end] + content[begin:middle] + content[end:])


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def queue(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    """Unreadable, whoever reads."""
    path.unlink()
    path.symlink_to(path.name)


def another_kind(path: Path) -> None:
    """What parses, and is not what is expected."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"something": [1]}), path)
    else:
        path.write_text("[1, 2]\n")


def wrong_column(path: Path) -> None:
    """A column that is needed holds text or a number where the other is expected."""
    table = pq.read_table(path)
    name = "training_step"
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(["x"] * table.num_rows)), path)


def lost_column(path: Path) -> None:
    name = path.parent.name
    pq.write_table(pq.read_table(path).drop_columns([sorted(REQUIRED[name] - {"training_step"})[0]]), path)


def nulls(path: Path) -> None:
    table, name = pq.read_table(path), sorted(REQUIRED[path.parent.name])[0]
    column = pa.nulls(table.num_rows, table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


ANY: list[Callable[[Path], None]] = [truncated, empty, garbage, directory, queue, loop, another_kind]
OF_TABLES = [*ANY, flipped, swapped, wrong_column, lost_column, nulls]


def attempt(words: Sequence[str], run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of a command."""
    arguments = [word.replace("RUN", str(run)).replace("OUT", str(out)) for word in words]
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code, [line for line in capsys.readouterr().err.splitlines() if line.strip()]


def check(
    run: Path, file: Path, needs: set[str], capsys: pytest.CaptureFixture[str], out: Path, tried: set[str]
) -> None:
    """Each command fails in one line that names the file, or does without it."""
    for name in sorted(tried):
        words, _ = COMMANDS[name]
        code, lines = attempt(words, run, out / name, capsys)
        assert code != 0 or name not in needs, name
        assert len(lines) == (code != 0), (name, lines)
        if name in needs:
            assert str(file) in lines[0], (name, lines)


@pytest.mark.parametrize("damage", ANY, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", [CONFIG, METRICS, ORIGIN])
def test_a_damaged_file_of_the_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    damage(run / name)
    needs = {
        CONFIG: {"show", "page", "tables", "replay", "rejudge", "config", "plan", "evaluate", "resume"},
        METRICS: {"show", "page", "tables"},
        ORIGIN: set(COMMANDS) - {"config", "plan"},
    }[name]
    # Every command with one kind of damage, those that are quick with each: one reader is behind all of them.
    tried = set(COMMANDS) if damage is truncated else {"show", "config", "evaluate", "resume"}
    check(run, run / name, needs, capsys, tmp_path, tried)


@pytest.mark.parametrize("name", sorted(ALL_TABLES))
def test_a_damaged_table(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """For the commands that need it, another damage for each table; what each is to the reader is tested below."""
    run = shutil.copytree(whole, tmp_path / "run")
    file = run / "tables" / name / "step00001.parquet"
    [truncated, another_kind, garbage][sorted(ALL_TABLES).index(name) % 3](file)
    needs = {command for command, (_, needed) in COMMANDS.items() if name in needed}
    check(run, file, needs, capsys, tmp_path, needs | {"show"})


def test_a_missing_table_of_a_finished_step_is_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(shutil.copytree(whole, tmp_path / "run"))
    Manifest(run, 0).update(2)
    file = run.tables / "judge_calls" / "step00001.parquet"
    assert attempt(["runs", "cost", "RUN"], run.path, tmp_path, capsys) == (0, [])
    file.unlink()
    code, (line,) = attempt(["runs", "cost", "RUN"], run.path, tmp_path, capsys)
    assert (code, line.partition(";")[0]) == (0, f"1 files of finished steps are missing, first {file}")
    (run.path / "manifest.json").write_text("")
    assert attempt(["runs", "cost", "RUN"], run.path, tmp_path, capsys) == (0, [])


@pytest.mark.parametrize("damage", OF_TABLES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", sorted(ALL_TABLES))
def test_a_table_that_cannot_be_read_is_named(
    whole: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    file = run / "tables" / name / "step00001.parquet"
    harmless = damage is nulls and pq.read_metadata(file).num_rows == 0
    damage(file)
    if harmless:
        assert RunDirectory.open(run).table(name, 1).num_rows == 0
        return
    with pytest.raises(DamagedRun) as caught:
        RunDirectory.open(run).table(name)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", "3", "null", '{"reward": 1}', '{"step": "1"}', '{"step": true}', '{"step": 1, "kl": "x"}', "[" * 5000],
)
def test_a_line_of_metrics_that_is_none_is_named_with_its_number(whole: Path, tmp_path: Path, line: str) -> None:
    run = RunDirectory.open(shutil.copytree(whole, tmp_path / "run"))
    lines = run.metrics_file.read_text().splitlines()
    run.metrics_file.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    with pytest.raises(DamagedRun, match="metrics.jsonl: damaged: line 2: "):
        run.metrics()


def test_numbers_that_cannot_be_shown_name_the_step(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / METRICS).write_text('{"step": 1, "groups_with_signal": 1.5}\n')
    code, lines = attempt(["runs", "show", "RUN"], run, tmp_path, capsys)
    assert code == 1
    assert "metrics.jsonl: damaged: step 1" in lines[0]


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_run_of_another_schema_version_is_refused_by_every_command(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    found = json.loads((run / ORIGIN).read_text())
    assert found["schema_version"] == SCHEMA_VERSION
    (run / ORIGIN).write_text(json.dumps(found | {"schema_version": version}))
    for name, (words, _) in COMMANDS.items():
        code, lines = attempt(words, run, tmp_path / name, capsys)
        if name not in ("config", "plan"):
            assert code == 1, name
            assert (
                f"of schema version {version}, expected {SCHEMA_VERSION}; use the draco-ray that wrote it" in lines[0]
            )


@pytest.mark.parametrize("damage", [directory, loop], ids=lambda damage: damage.__name__)
def test_a_lock_that_is_none_is_named(whole: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / ".lock").touch()
    damage(run / ".lock")
    with pytest.raises(DracoError, match=r"run/\.lock: "), lock_run(RunDirectory.open(run)):
        pass


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("verdicts", "criterion", -1),
        ("verdicts", "criterion", 99),
        ("citations", "criterion", -1),
        ("citations", "criterion", 99),
        ("citations", "step", 0),
        ("citations", "step", 99),
        ("advantages", "step_advantage", []),
    ],
)
def test_rows_about_what_is_not_there_are_one_line(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, column: str, value: object
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    file = run / "tables" / table / "step00001.parquet"
    rows = pq.read_table(file)
    values = [value, *rows.column(column).to_pylist()[1:]]
    place = rows.schema.get_field_index(column)
    pq.write_table(rows.set_column(place, rows.schema.field(column), pa.array(values, rows.schema.types[place])), file)
    code, lines = attempt(["replay", "RUN"], run, tmp_path / "out", capsys)
    assert code == 1
    (line,) = lines
    assert f"{run / 'tables'}: damaged: rows of step 1, task" in line


@pytest.mark.parametrize(("column", "value"), [("termination", "strange"), ("failures", [None])])
def test_an_evaluation_with_a_value_that_it_cannot_have_is_one_line(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: object
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (file,) = (run / "tables" / "evaluations").glob("step00000/*")
    rows = pq.read_table(file)
    place = rows.schema.get_field_index(column)
    pq.write_table(rows.set_column(place, rows.schema.field(column), pa.array([value], rows.schema.types[place])), file)
    code, lines = attempt(["runs", "show", "RUN"], run, tmp_path / "out", capsys)
    assert code == 1
    (line,) = lines
    assert f"{run / 'tables' / 'evaluations'}: damaged: a row of step 0: 1 validation error" in line
    assert column in line


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400])
def test_an_integer_that_no_number_can_be_is_named_with_its_line(tmp_path: Path, value: str) -> None:
    run = RunDirectory(tmp_path)
    run.metrics_file.write_text(f'{{"step": 1, "reward": {value}}}\n', encoding="utf-8")
    with pytest.raises(DamagedRun, match=r"metrics\.jsonl: damaged: line 1: reward: expected a number"):
        run.metrics()


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("seconds", [1.0], "seconds: expected a number"),
        ("seconds_sync", {"a": 1}, "seconds_sync: expected a number"),
        ("reward", "0.5", "reward: expected a number"),
        ("mine", [], "mine: expected a number"),
    ],
)
def test_a_metric_of_another_kind_is_named_with_its_line(tmp_path: Path, name: str, value: object, wrong: str) -> None:
    run = RunDirectory(tmp_path)
    run.metrics_file.write_text(json.dumps({"step": 1, name: value}) + "\n", encoding="utf-8")
    with pytest.raises(DamagedRun, match=rf"metrics\.jsonl: damaged: line 1: {wrong}"):
        run.metrics()


def test_what_no_number_holds_was_not_measured(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics_file.write_text('{"step": 1, "kl": NaN, "reward": 1e999, "seconds": -Infinity}\n', encoding="utf-8")
    assert run.metrics() == [{"step": 1, "kl": None, "reward": None, "seconds": None}]


def test_a_setting_out_of_its_bounds_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "engine: {engines: -3}\n")
    with pytest.raises(DamagedRun, match=r"config\.yaml: damaged: config key engine\.engines: .*found -3"):
        run.setting("engine.engines")


def test_files_that_are_not_a_runs_are_left_alone(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for stray in (
        "checkpoints/step-old",
        "tables/steps/steps.parquet",
        "tables/mine/step00001",
        f"tables/steps/step{'9' * 240}",
    ):
        (run / stray).mkdir(parents=True)
    (run / "tables" / "steps" / "stepping").mkdir()
    opened = RunDirectory.open(run)
    assert opened.steps() == RunDirectory.open(whole).steps()
    assert opened.checkpoint_steps() == [1]
    rewind(opened, reuse=True)
    assert (run / "tables" / "mine" / "step00001").is_dir()


def test_a_name_too_long_for_a_folder_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["runs", "show", "n" * 5000])
    assert "not a run directory (File name too long)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("copy", "problem"),
    [
        ("step00002.parquet", "it has rows of step 1"),
        ("step00009.parquet", "it has rows of step 1"),
        ("step00001 (1).parquet", "its name is not that of a step"),
        ("step1.parquet", "its name is not that of a step"),
        ("step00001-conflict/t.arrow", "it has rows of step 1"),
    ],
)
@pytest.mark.parametrize("columns", [None, ["dollars"]])
def test_a_table_that_is_there_again_under_another_name_is_not_counted_twice(
    whole: Path, tmp_path: Path, copy: str, problem: str, columns: list[str] | None
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    folder = run / "tables" / "judge_calls"
    first = pq.read_table(folder / "step00001.parquet")
    (folder / copy).parent.mkdir(exist_ok=True)
    if copy.endswith(".arrow"):
        write_part(folder / copy, first)
    else:
        pq.write_table(first, folder / copy)
    with pytest.raises(DamagedRun) as caught:
        RunDirectory.open(run).table("judge_calls", columns=columns)
    assert str(caught.value).startswith(f"{folder / copy}: damaged: {problem}")
    (folder / copy).unlink()
    read = RunDirectory.open(run).table("judge_calls", 1, columns)
    assert read.column_names == (columns or TABLE_SCHEMAS["judge_calls"].names)
    assert read.num_rows == first.num_rows


def test_a_step_that_is_twice_in_the_metrics_is_not_shown_twice(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics_file.write_text('{"step": 0}\n{"step": 3}\n{"step": 0}\n', encoding="utf-8")
    with pytest.raises(DamagedRun, match=r"metrics\.jsonl: damaged: step 0 occurs twice"):
        run.metrics()
    run.metrics_file.write_text('{"step": 1}\n{"step": 0}\n', encoding="utf-8")
    assert [line["step"] for line in run.metrics()] == [0, 1]

"""What is read from a recorded run, and what is said of other sizes of it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from draco_ray.cli import main
from draco_ray.commands.simulate import simulate_run
from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.lab.simulation.recorded import read_run
from draco_ray.lab.simulation.scaling import find_bottleneck, predict, relative_error, scale_resources, simulate_size
from draco_ray.lab.simulation.speeds import fit_speeds
from draco_ray.runs.directory import RunDirectory, read_table
from draco_ray.runs.schema import TABLE_SCHEMAS
from draco_ray.runs.store import write_parquet
from tests.support.small_run import small_run
from tests.support.timed_run import (
    CONFIG,
    HEAD,
    JUDGE,
    PER_LEARNED,
    PER_READ,
    PER_SAMPLED,
    PER_TURN,
    SLOWDOWN,
    TAIL,
    step_seconds,
    timed_run,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return timed_run(tmp_path_factory.mktemp("runs") / "timed")


def test_speeds_are_those_the_run_was_made_with(run: RunDirectory) -> None:
    recorded = read_run(run)
    speeds = fit_speeds(recorded.steps, recorded)
    assert speeds.slowdown == pytest.approx(SLOWDOWN, rel=0.01)
    assert speeds.per_sampled == pytest.approx(PER_SAMPLED, rel=0.01)
    alone = speeds.per_turn + 100 * speeds.per_sampled + 50 * speeds.per_read
    assert alone == pytest.approx(PER_TURN + 100 * PER_SAMPLED + 50 * PER_READ, rel=0.02)
    # Every token of this run costs the same; which of them were sampled tells nothing more.
    assert speeds.per_learned + speeds.per_learned_sampled == pytest.approx(PER_LEARNED, rel=0.15)
    assert (speeds.head, speeds.tail) == pytest.approx((HEAD, TAIL))
    assert speeds.handover == pytest.approx(dict.fromkeys(speeds.handover, 0.0), abs=1e-6)


def test_steps_are_predicted_by_the_others(run: RunDirectory) -> None:
    predictions = predict(read_run(run), seed=0)
    assert [step.number for step, _ in predictions] == [2, 3, 4, 5]
    assert [step.seconds for step, _ in predictions] == pytest.approx([step_seconds(step) for step in (2, 3, 4, 5)])
    assert max(abs(relative_error(*each)) for each in predictions) < 0.01


def test_another_size_is_predicted(run: RunDirectory) -> None:
    recorded = read_run(run)
    speeds, larger = fit_speeds(recorded.steps, recorded), scale_resources(recorded, 8)
    size, grown = (simulate_size(recorded, each, speeds, rollouts=8, seed=0) for each in (recorded.setting, larger))
    assert size.rollouts == grown.rollouts == 8
    assert find_bottleneck(size.step) == "slots"
    assert (larger.slots, larger.engines, larger.judge_workers) == (4, 2, 2 * recorded.setting.judge_workers)
    # Seven phases of two cents are asked of a group of two, and one of stage1 and union each.
    assert size.dollars == grown.dollars == pytest.approx(4 * 8 * 0.02)
    assert grown.step.seconds < size.step.seconds
    assert grown.gpu_hours == pytest.approx((2 * 2 + 2 * 1) * grown.step.seconds / 3600)


def said(directory: Path, **options: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        simulate_run(directory, setting={}, **options)  # type: ignore[arg-type]
    return out.getvalue()


def test_it_prints_steps_errors_and_sizes(run: RunDirectory) -> None:
    text = said(run.path, rollouts=(8,))
    assert "median error" in text
    rows = dict(re.findall(r"^(\S.*?\S)\s{2,}(\S.*?)\s*$", text, re.MULTILINE))
    assert rows["rollouts per step"] == "8"
    assert rows["bottleneck"] == "slots"
    assert (rows["engines"], rows["slots"]) == ("2", "4")
    assert said(run.path, rollouts=(8,)) == said(run.path, rollouts=(8,))


def test_throughput_is_printed_by_gpus_and_staleness(run: RunDirectory) -> None:
    lines = said(run.path, rollouts=(8,), staleness=(0, 2)).splitlines()
    head, *rows = [line.split() for line in lines[lines.index(next(x for x in lines if x.startswith("GPUs"))) :]]
    assert head == ["GPUs", "engines", "staleness", "0", "staleness", "2"]
    assert [row[0] for row in rows] == ["8", "16", "32", "64", "128", "256", "512"]
    rates = [[float(rate.replace(",", "")) for rate in row[2:]] for row in rows]
    assert all(behind >= at_once for at_once, behind in rates)
    assert rates[-1][0] > rates[0][0]


def test_a_run_that_takes_turns_cannot_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = read_run(timed_run(tmp_path / "turns"))
    setting = replace(recorded.setting, colocate=True)
    monkeypatch.setattr("draco_ray.commands.simulate.read_run", lambda run: replace(recorded, setting=setting))
    with pytest.raises(ConfigError, match="--staleness: the run has engine.colocate"):
        said(tmp_path / "turns", staleness=(1,))


def test_another_run_is_predicted_too(run: RunDirectory, tmp_path: Path) -> None:
    other = timed_run(tmp_path / "other", steps=4)
    text = said(run.path, rollouts=(4,), other=other.path)
    assert "other, predicted from the speeds of timed" in text


def without_syncs(made: RunDirectory) -> RunDirectory:
    for path in (made.tables / "spans").glob("*.parquet"):
        kept = [row for row in read_table(path, "spans").to_pylist() if row["stage"] != "sync"]
        write_parquet(path, pa.Table.from_pylist(kept, schema=TABLE_SCHEMAS["spans"]))
    return made


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: timed_run(path, steps=2), "2 finished training steps; expected at least 3"),
        (lambda path: without_syncs(small_run(path, steps=3)), "has no sync spans"),
        (lambda path: RunDirectory.create(path, CONFIG), "0 finished training steps"),
        (
            lambda path: timed_run(path, steps=3, config=CONFIG + "judge: {self_judge: {enabled: true}}\n"),
            "the policy is its own judge",
        ),
    ],
)
def test_runs_that_say_too_little_are_refused(make: object, problem: str, tmp_path: Path) -> None:
    made = make(tmp_path / "run")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=problem) as refused:
        said(made.path)
    assert "\n" not in str(refused.value)


def test_a_step_without_rows_of_rollouts_is_named(tmp_path: Path) -> None:
    made = timed_run(tmp_path / "run", steps=4)
    (made.tables / "trajectories" / "step00003.parquet").unlink()
    with pytest.raises(ConfigError, match="step 3: none of the step's rollouts"):
        said(made.path)


def test_a_step_that_does_not_say_its_seconds_is_named(tmp_path: Path) -> None:
    made = timed_run(tmp_path / "run", steps=3)
    made.metrics_file.write_text(made.metrics_file.read_text().replace('"seconds_sync": 2.0', '"seconds_sync": null'))
    with pytest.raises(ConfigError, match="step 2 lack seconds"):
        said(made.path)


@pytest.mark.parametrize(("key", "value"), [("seconds", -1.0), ("seconds_sync", -1), ("updates", -3)])
def test_a_step_that_took_what_none_takes_is_named(tmp_path: Path, key: str, value: float) -> None:
    run = timed_run(tmp_path / "run", steps=3)
    first, second, *more = run.metrics_file.read_text().splitlines()
    second = json.dumps(json.loads(second) | {key: value})
    run.metrics_file.write_text("\n".join([first, second, *more]) + "\n")
    with pytest.raises(DamagedRun, match=r"metrics\.jsonl: damaged: step 2: "):
        read_run(run)


def test_a_failed_group_is_read_as_one(tmp_path: Path) -> None:
    made = timed_run(tmp_path / "run", steps=3)
    path = made.tables / "groups" / "step00002.parquet"
    table = read_table(path, "groups").to_pylist()
    table[0]["state"] = "failed"
    write_parquet(path, pa.Table.from_pylist(table, schema=TABLE_SCHEMAS["groups"]))
    assert sum(group.failed for group in read_run(made).steps[0].groups) == 1


def test_what_calls_waited_for_limits_is_not_the_judges_time(tmp_path: Path) -> None:
    made = timed_run(tmp_path / "run", steps=3, config=CONFIG + "judge: {limits: {requests_per_minute: 1000}}\n")
    for path in sorted((made.tables / "judge_calls").glob("*.parquet")):
        rows = read_table(path, "judge_calls").to_pylist()
        # Half of what every call took was waiting.
        rows = [row | {"waited_seconds": row["seconds"] / 2} for row in rows]
        write_parquet(path, pa.Table.from_pylist(rows, schema=TABLE_SCHEMAS["judge_calls"]))
    phases = [item for step in read_run(made).steps for group in step.groups for item in group.phases.items()]
    assert phases
    for (name, _), phase in phases:
        assert phase.seconds == pytest.approx(JUDGE[name] / 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "expected CONFIG or --simulate RUN"),
        (("--slots", "3"), "--slots: no effect without --simulate RUN"),
        (("sandbox", "--rollouts", "3"), "--rollouts: no effect without --simulate RUN"),
        (("sandbox", "--staleness", "1"), "--staleness: no effect without --simulate RUN"),
        (("sandbox", "--simulate", "."), "the configuration comes from the run"),
    ],
)
def test_options_that_do_not_go_together(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert problem in capsys.readouterr().err


def test_a_copy_of_a_run_says_the_same(run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    copied = [simulated for _, simulated in predict(read_run(RunDirectory.open(tmp_path / "copy")), 0)]
    assert copied == [simulated for _, simulated in predict(read_run(run), 0)]

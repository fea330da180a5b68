"""The tables of the ablation and of the noise bench from runs that are there: what is run again, what a cell says."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig
from draco_ray.lab.evaluation.results import EvaluationDirectory, RolloutResult
from draco_ray.records import LOST, EpisodeEnd, Evaluation, JudgeCall, Usage
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.evaluations import a_plan
from tests.support.jobs import load_job

RUNS, STEPS, EVERY = 3, 4, 2


@pytest.fixture(scope="module")
def job() -> ModuleType:
    return load_job("ablation")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each fails."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        found.append(command[3:])
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def evaluations(solved: int) -> list[Evaluation]:
    """Two scenarios of one task, three runs each: the first task fails, the second succeeds in ``solved`` runs."""
    return [
        Evaluation(
            task_id=task,
            run=run,
            success=task == "b_1" and run < solved,
            passed_tests=0,
            total_tests=1,
            turns=4,
            ended=EpisodeEnd.FINISHED,
        )
        for task in ("a_1", "b_1")
        for run in range(RUNS)
    ]


def call(tokens_in: int, tokens_out: int, requests: int = 1) -> JudgeCall:
    return JudgeCall(
        call_id="c",
        phase="score",
        group="step1/a_1",
        task_id="a_1",
        rollout=0,
        model="rule-judge",
        prompt="p",
        reply="r",
        finish_reason="stop",
        input_tokens=tokens_in,
        cached_tokens=0,
        output_tokens=tokens_out,
        dollars=0.0,
        started_at=0.0,
        seconds=1.0,
        requests=requests,
    )


def finished_run(
    job: ModuleType, root: Path, setting: str, seed: int, solved: Mapping[int, int], tokens: int, *, whole: bool = True
) -> Path:
    """A run of four steps that asks for so many tokens a step, and its evaluation, finished unless told."""
    name = job.run_name(setting, seed, STEPS, None)
    run = RunDirectory.create(root / name, dump_config(DracoConfig()))
    store = RunStore(run)
    for step in range(1, STEPS + 1):
        # The second answer came from the durable cache: it was paid for once.
        calls = [call(tokens, 0), call(9, 9, requests=0)] if tokens else []
        store.write("judge_calls", step, "a_1", rows.call_rows(step, calls))
    (root / name / "ablation.yaml").write_text(yaml.safe_dump(job.train_words(root, name, seed, STEPS, None, [])))
    names = tuple(f"step{step:05d}" for step in solved)
    plan = a_plan(measurements=names, runs=RUNS, tasks={"a_1": 1, "b_1": 1})
    directory = EvaluationDirectory.begin(job.curve_directory(run, EVERY, RUNS), plan)
    for measurement, many in zip(names, solved.values(), strict=True):
        for evaluation in evaluations(many):
            directory.add(measurement, RolloutResult(evaluation=evaluation, usage=Usage(), seconds=1.0))
    if whole:
        words = ["--every", str(EVERY), "--runs", str(RUNS), "--split", "dev"]
        (directory.path / "ablation.yaml").write_text(yaml.safe_dump(words))
    return root / name


def run_job(job: ModuleType, root: Path, **changes: Any) -> None:
    asked: dict[str, Any] = {"steps": STEPS, "seeds": 2, "settings": "draco random", "every": EVERY}
    asked |= {"runs_per_task": RUNS, "root": root, "print_only": True, "overrides": None}
    job.main(**asked | changes)


def sections(printed: str) -> dict[str, dict[str, list[str]]]:
    """Title -> first cell -> the others, of the Markdown that was printed."""
    found: dict[str, dict[str, list[str]]] = {}
    title = ""
    for line in printed.splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| "):
            first, *others = line.strip("| ").split(" | ")
            found.setdefault(title, {}).setdefault(first, others)
    return found


def test_the_tables_of_finished_runs(job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, solved in enumerate((3, 2)):
        finished_run(job, tmp_path, "draco", seed, {0: 0, 2: 1, 4: solved}, 200_000)
        finished_run(job, tmp_path, "random", seed, {0: 0, 2: 0, 4: 0}, 0)
    run_job(job, tmp_path)
    printed = capsys.readouterr().out
    found = sections(printed)
    last = found["After the last step"]
    # b_1 over the seeds: p^1 (3/3 + 2/3)/2, p^2 (1 + 1/3)/2, p^3 (1 + 0)/2; a_1 is 0 throughout.
    assert [cell.split()[0] for cell in last["draco"][:6]] == ["41.7", "33.3", "25.0"] * 2
    mean, low, high = map(float, re.findall(r"[\d.]+", last["draco"][0]))
    assert low < mean < high
    assert high - low > 80  # two scenarios and two seeds tell little
    # Four steps of 0.2M tokens in at $2.5.
    assert last["draco"][6:] == ["4.0", "0 of 12", "2", "4", "0.80M, $2.00"]
    assert last["random"][6:] == ["4.0", "0 of 12", "2", "4", "0.00M, $0.00"]
    before = next(found[title] for title in found if title.startswith("Before training"))
    # Nothing was solved, of two scenarios: anything up to 84 % would have shown the same now and then.
    assert before["draco"][0] == "0.0 [0.0, 84.2]"
    assert list(last)[3:] == ["Against draco"]
    assert last["Against draco"] == ["TGC p^1", "TGC p^3", "SGC p^1", "SGC p^3", "turns"]
    assert re.search(r"\| random \| -41\.7 \[-\d+\.\d, \+\d+\.\d\], p 1\.0000", printed)
    curves = found["Held-out TGC by training step"]
    assert curves["Setting"] == ["0", "2", "4"]
    assert [cell.split()[0] for cell in curves["draco"]] == ["0.0", "16.7", "41.7"]
    with (tmp_path / "curves.csv").open(encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert [(each["setting"], each["step"], each["seeds"]) for each in points] == [
        (setting, step, "2") for setting in ("draco", "random") for step in ("0", "2", "4")
    ]
    assert [float(each["judge_dollars"]) for each in points[:3]] == pytest.approx([0, 1, 2])
    assert float(points[2]["tgc"]) == pytest.approx(5 / 12)
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_at_the_same_spend_nobody_has_spent_more_than_the_cheapest_judge(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(job, tmp_path, "draco", 0, {0: 0, 2: 1, 4: 3}, 200_000)
    finished_run(job, tmp_path, "no-credit", 0, {0: 0, 2: 0, 4: 2}, 120_000)
    finished_run(job, tmp_path, "outcome", 0, {0: 0, 2: 1, 4: 2}, 0)
    run_job(job, tmp_path, settings="draco no-credit outcome", seeds=1)
    equal = sections(capsys.readouterr().out)["At the same judge spend"]
    # no-credit spends $1.20 in all, which draco has not after step 2 ($1.00) and has after step 4 ($2.00).
    assert equal["draco"][8:] == ["1", "2", "0.40M, $1.00"]
    assert equal["draco"][0].split()[0] == "16.7"
    assert equal["no-credit"][8:] == ["1", "4", "0.48M, $1.20"]
    # A setting without a judge has its last step.
    assert equal["outcome"][8:] == ["1", "4", "0.00M, $0.00"]


def test_what_is_missing_is_said_and_run_and_nothing_else(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[list[str]]
) -> None:
    run_job(job, tmp_path)
    assert capsys.readouterr().out == "nothing has been run yet\n"
    finished_run(job, tmp_path, "draco", 0, {0: 0, 2: 1, 4: 3}, 200_000)
    finished_run(job, tmp_path, "draco", 1, {0: 0, 2: 1}, 200_000, whole=False)
    run_job(job, tmp_path)
    last = sections(capsys.readouterr().out)["After the last step"]
    assert last["draco"][8:] == ["1", "4", "0.80M, $2.00"]
    assert last["random"][0] == "not run yet"
    assert not started
    # The first that is missing is trained; it fails, and the next call begins with it again.
    for _ in range(2):
        with pytest.raises(SystemExit, match="random-seed0-steps4 failed with exit code 7; start again"):
            run_job(job, tmp_path, print_only=False)
    assert [command[:4] for command in started] == [["train", "sandbox", "--setting", "random"]] * 2
    assert "train.evaluate_before_after=false" in started[0]
    # A run that is trained and half evaluated is only evaluated.
    started.clear()
    with pytest.raises(SystemExit, match="heldout-every2-runs3 failed"):
        run_job(job, tmp_path, settings="draco", print_only=False)
    (command,) = started
    assert command[:4] == ["evaluate", "--run", str(tmp_path / "draco-seed1-steps4"), "--train-curve"]
    assert command[4:10] == ["--every", "2", "--runs", "3", "--split", "dev"]


def test_an_interrupted_run_is_continued_and_other_words_are_another_run(
    job: ModuleType, tmp_path: Path, started: list[list[str]]
) -> None:
    path = finished_run(job, tmp_path, "draco", 0, {0: 0, 4: 3}, 1)
    with pytest.raises(SystemExit):
        job.train(tmp_path, "draco", 0, STEPS, None, ["learner.lora_rank=2"])
    assert started[0][-2:] == ["--resume", str(path)]
    assert "learner.lora_rank=2" in started[0]
    assert job.train(tmp_path, "draco", 0, STEPS, None, []).path == path
    assert len(started) == 1


@pytest.mark.parametrize("name", ["ablation", "bench_noise"])
def test_the_hard_sandbox_has_its_own_runs_and_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="start again to go on"):
        load_job(name).main(seeds=1, settings="draco", preset="sandbox-hard")
    (command,) = started
    assert command[:4] == ["train", "sandbox-hard", "--setting", "draco"]
    assert "train.steps=30" in command
    folder = name.removeprefix("bench_")
    assert f"run.root={tmp_path / 'runs' / f'{folder}-hard'}" in command
    assert command[-1].startswith("run.name=draco-hard-seed0-steps30")


def test_lost_rollouts_are_counted(job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished_run(job, tmp_path, "draco", 0, {0: 0, 4: 2}, 1)
    results = path / "evaluations" / f"heldout-every{EVERY}-runs{RUNS}" / "results" / "step00004.jsonl"
    found = [replace(each, failures=(LOST,)) if each.run == 2 else each for each in evaluations(2)]
    directory = EvaluationDirectory.open(results.parents[1])
    results.unlink()
    for each in found:
        directory.add("step00004", RolloutResult(evaluation=each, usage=Usage(), seconds=1.0))
    run_job(job, tmp_path, settings="draco", seeds=1)
    printed = capsys.readouterr().out
    assert sections(printed)["After the last step"]["draco"][7] == "2 of 6"
    assert "Against" not in printed


def test_noise_with_and_without_credit(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[list[str]]
) -> None:
    noise = load_job("bench_noise")
    asked: dict[str, Any] = {"settings": "draco no-credit", "seeds": 3, "steps": STEPS, "runs_per_task": RUNS}
    asked |= {"root": tmp_path, "overrides": None}
    for seed in range(3):
        for setting, solved in (("draco", 3), ("no-credit", 1)):
            if (setting, seed) == ("no-credit", 2):
                continue
            name = job.run_name(setting, seed, STEPS, RUNS)
            store = RunStore(RunDirectory.create(tmp_path / name, dump_config(DracoConfig())))
            for step, measured in ((0, evaluations(0)), (STEPS, evaluations(solved))):
                store.write("evaluations", step, "dev", rows.evaluation_rows(step, "dev", measured))
            words = job.train_words(tmp_path, name, seed, STEPS, RUNS, [])
            (tmp_path / name / "ablation.yaml").write_text(yaml.safe_dump(words))
    noise.main(**asked, print_only=True)
    table = sections(capsys.readouterr().out)[""]
    assert table["Judge"] == ["draco: TGC, gain, seeds", "no-credit: TGC, gain, seeds", "draco - no-credit"]
    draco, plain, less = table["none"]
    assert re.fullmatch(r"50\.0 \[.*\], \+50\.0 \[.*\], 3", draco)
    assert re.fullmatch(r"16\.7 \[.*\], \+16\.7 \[.*\], 2", plain)
    assert less.startswith("+33.3 [")
    assert table["false pass 60%"] == ["not run yet"] * 3
    with pytest.raises(SystemExit):
        noise.main(**asked, print_only=False)
    # The first seed of everything comes first.
    assert "judge.rule_judge.false_pass=0.304" in started[0]
    assert "seed=0" in started[0]


@pytest.mark.slow
def test_a_run_with_other_words_is_not_taken(job: ModuleType, tmp_path: Path) -> None:
    finished_run(job, tmp_path, "draco", 0, {0: 0, 4: 1}, 1)
    with pytest.raises(SystemExit) as stopped:
        # It is trained again under the same name, and `draco train` leaves an existing directory alone.
        job.train(tmp_path, "draco", 0, STEPS, None, ["train.prompts_per_step=0"])
    assert "draco-seed0-steps4 failed with exit code 2" in str(stopped.value)

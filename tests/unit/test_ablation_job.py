"""The tables of the ablation and of the noise bench from runs that are there: what is run again, what a cell says."""

from __future__ import annotations

import csv
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.load import dump_config, load_config
from draco_ray.records import LOST_ROLLOUT, EpisodeEnd, Evaluation, JudgeCall
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.jobs import load_job

RUNS, STEPS, EVERY = 3, 4, 2


@pytest.fixture(scope="module")
def job() -> Any:
    # The other imports it.
    measured = load_job("measured")
    return SimpleNamespace(**vars(measured) | {"main": load_job("ablation").main})


@pytest.fixture
def started(job: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each fails."""
    found: list[list[str]] = []

    def run(command: list[str]) -> int:
        found.append(command[3:])
        return 7

    monkeypatch.setattr(sys.modules["measured"], "wait_for", run)
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


def wanted(job: Any, setting: str, seed: int, *overrides: str) -> Any:
    return job.Wanted(
        preset="sandbox", setting=setting, seed=seed, steps=STEPS, every=EVERY, runs_per_task=RUNS, overrides=overrides
    )


def trained_run(root: Path, name: str, solved: Mapping[int, int], tokens: int) -> RunDirectory:
    """A run of four steps that asked for so many tokens a step; by step, in how many runs the second task succeeds."""
    run = RunDirectory.create(root / name, dump_config(load_config("sandbox")))
    store = RunStore(run)
    for step in range(1, STEPS + 1):
        # The second answer came from the durable cache: it was paid for once.
        calls = [call(tokens, 0), call(9, 9, requests=0)] if tokens else []
        store.write("judge_calls", step, "a_1", rows.call_rows(step, calls))
    for step, many in solved.items():
        store.write("evaluations", step, "dev", rows.evaluation_rows(step, "dev", evaluations(many)))
    return run


def measured_run(job: Any, root: Path, setting: str, seed: int, solved: Mapping[int, int], tokens: int) -> None:
    """The file that such a run leaves."""
    run = wanted(job, setting, seed)
    path = trained_run(root, run.name, solved, tokens)
    measured = job.measure(path, {step: evaluations(many) for step, many in solved.items()})
    job.write(root / "measured" / f"{run.name}.jsonl", run.words, measured)


def run_job(job: Any, root: Path, **changes: Any) -> None:
    words: dict[str, Any] = {"steps": STEPS, "seeds": 2, "settings": "draco random", "every": EVERY}
    words |= {"runs_per_task": RUNS, "root": root, "print_only": True, "overrides": None}
    job.main(**words | changes)


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


def test_the_tables_of_finished_runs(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, solved in enumerate((3, 2)):
        measured_run(job, tmp_path, "draco", seed, {0: 0, 2: 1, 4: solved}, 200_000)
        measured_run(job, tmp_path, "random", seed, {0: 0, 2: 0, 4: 0}, 0)
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
    assert last["Against draco"] == ["TGC p^1", "TGC p^3", "SGC p^1", "SGC p^3", "turns", "Seeds"]
    assert re.search(r"\| random \| -41\.7 \[-\d+\.\d, \+\d+\.\d\], p 1\.0000", printed)
    curves = found["Held-out TGC by training step"]
    assert curves["Setting"] == ["0", "2", "4"]
    assert [cell.split()[0] for cell in curves["draco"]] == ["0.0", "16.7", "41.7"]
    with (tmp_path / "measured" / "curves.csv").open(encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert [(each["setting"], each["step"], each["seeds"]) for each in points] == [
        (setting, step, "2") for setting in ("draco", "random") for step in ("0", "2", "4")
    ]
    assert [float(each["judge_dollars"]) for each in points[:3]] == pytest.approx([0, 1, 2])
    assert float(points[2]["tgc"]) == pytest.approx(5 / 12)
    assert (tmp_path / "measured" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_at_the_same_spend_nobody_has_spent_more_than_the_cheapest_judge(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_run(job, tmp_path, "draco", 0, {0: 0, 2: 1, 4: 3}, 200_000)
    measured_run(job, tmp_path, "no-credit", 0, {0: 0, 2: 0, 4: 2}, 120_000)
    measured_run(job, tmp_path, "outcome", 0, {0: 0, 2: 1, 4: 2}, 0)
    run_job(job, tmp_path, settings="draco no-credit outcome", seeds=1)
    equal = sections(capsys.readouterr().out)["At the same judge spend"]
    # no-credit spends $1.20 in all, which draco has not after step 2 ($1.00) and has after step 4 ($2.00).
    assert equal["draco"][8:] == ["1", "2", "0.40M, $1.00"]
    assert equal["draco"][0].split()[0] == "16.7"
    assert equal["no-credit"][8:] == ["1", "4", "0.48M, $1.20"]
    # A setting without a judge has its last step.
    assert equal["outcome"][8:] == ["1", "4", "0.00M, $0.00"]


def test_what_is_missing_is_said_and_run_and_nothing_else(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[list[str]]
) -> None:
    run_job(job, tmp_path)
    assert capsys.readouterr().out == "no setting has been run yet\n"
    measured_run(job, tmp_path, "draco", 0, {0: 0, 2: 1, 4: 3}, 200_000)
    run_job(job, tmp_path)
    last = sections(capsys.readouterr().out)["After the last step"]
    assert last["draco"][8:] == ["1", "4", "0.80M, $2.00"]
    assert last["random"][0] == "not run yet"
    assert not started
    # The first that is missing is trained; it fails, and the next call begins with it again.
    for _ in range(2):
        with pytest.raises(
            SystemExit, match="random-seed0-steps4 failed with exit code 7; run the job again to continue"
        ):
            run_job(job, tmp_path, print_only=False)
    assert [command[:4] for command in started] == [["train", "sandbox", "--setting", "random"]] * 2
    asked = {"train.evaluate_before_after=true", f"train.evaluate_every={EVERY}", f"train.evaluation_runs={RUNS}"}
    assert asked <= set(started[0])


def test_a_run_is_continued_and_what_it_measured_is_kept(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained_run(tmp_path, "draco-seed0-steps4", {0: 0, 2: 1, 4: 3}, 200_000)
    started: list[list[str]] = []

    def finish(command: list[str]) -> int:
        started.append(command[3:])
        return 0

    monkeypatch.setattr(sys.modules["measured"], "wait_for", finish)
    for _ in range(2):
        run_job(job, tmp_path, settings="draco", seeds=1, print_only=False)
        printed = sections(capsys.readouterr().out)
        assert printed["After the last step"]["draco"][8:] == ["1", "4", "0.80M, $2.00"]
        assert [cell.split()[0] for cell in printed["Held-out TGC by training step"]["draco"]] == [
            "0.0",
            "16.7",
            "50.0",
        ]
    (command,) = started
    assert command[-2:] == ["--resume", str(run.path)]


def test_a_job_that_is_ended_ends_its_run(job: Any, tmp_path: Path) -> None:
    began = tmp_path / "began"

    def end() -> None:
        while not began.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end, daemon=True).start()
    assert job.wait_for(["sh", "-c", f"trap 'exit 5' TERM; touch {began}; while :; do sleep 0.05; done"]) == 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_words_are_another_run(job: Any, tmp_path: Path) -> None:
    measured_run(job, tmp_path, "draco", 0, {0: 0, 4: 3}, 1)
    with pytest.raises(
        SystemExit, match="measured with arguments .*, expected .*'learner.lora_rank=2'.*; remove the file, or"
    ):
        run_job(job, tmp_path, settings="draco", seeds=1, overrides=["learner.lora_rank=2"])


@pytest.mark.parametrize("name", ["ablation", "bench_noise"])
def test_the_hard_sandbox_has_its_own_runs_and_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="run the job again to continue"):
        load_job(name).main(seeds=1, settings="draco", preset="sandbox-hard")
    (command,) = started
    assert command[:4] == ["train", "sandbox-hard", "--setting", "draco"]
    assert "train.steps=30" in command
    folder = name.removeprefix("bench_")
    assert f"run.root={tmp_path / 'runs' / f'{folder}-hard'}" in command
    assert command[-1].startswith("run.name=draco-hard-seed0-steps30")


def from_elsewhere(job: Any, folder: Path, setting: str, seed: int) -> str:
    """A run that was measured on another machine, from its own starter; returns which."""
    run = wanted(job, setting, seed)
    figures = {0: evaluations(0), 4: evaluations(1)}
    weights = folder / "starter" / "model.safetensors"
    weights.parent.mkdir(exist_ok=True)
    weights.write_bytes(b"trained elsewhere")
    policy: str = job.policy_of(weights.parent)
    (folder / "measured").mkdir(exist_ok=True)
    file = folder / "measured" / f"{run.name}.jsonl"
    job.write(file, run.words, job.Measured(figures, dict.fromkeys(figures, job.Spend()), policy))
    return policy


def test_runs_of_a_seed_that_start_from_several_policies_are_not_compared(job: Any, tmp_path: Path) -> None:
    measured_run(job, tmp_path, "draco", 0, {0: 0, 4: 3}, 1)
    other = from_elsewhere(job, tmp_path, "random", 0)
    with pytest.raises(SystemExit, match=rf"seed 0: .*start from 2 policies \(.*{other}.*separate folder"):
        run_job(job, tmp_path)


def test_a_seed_that_began_from_another_policy_is_left_to_its_machine(
    job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[list[str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    other = from_elsewhere(job, tmp_path, "random", 0)
    # Where this machine has built none yet, nobody knows whether that is another one.
    with pytest.raises(SystemExit, match="the starter policy of these runs does not exist.*make world"):
        run_job(job, tmp_path, seeds=2, print_only=False)
    starter = tmp_path / ".cache" / "starter" / "model.safetensors"
    starter.parent.mkdir(parents=True)
    starter.write_bytes(b"trained here")
    with pytest.raises(SystemExit, match="draco-seed1-steps4 failed"):
        run_job(job, tmp_path, seeds=2, print_only=False)
    assert f"seed 0: its runs start from policy {other}, which this machine does not have" in capsys.readouterr().err
    assert [word for command in started for word in command if word.startswith("seed=")] == ["seed=1"]


def test_seeds_of_several_policies_are_one_table_that_says_so(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = from_elsewhere(job, tmp_path, "random", 0)
    from_elsewhere(job, tmp_path, "draco", 0)
    for setting in ("draco", "random"):
        measured_run(job, tmp_path, setting, 1, {0: 0, 4: 3}, 1)
    run_job(job, tmp_path, seeds=2)
    told = capsys.readouterr().out
    assert f"with the seeds that began from each: {other}: 0; " in told


def test_a_difference_is_over_the_seeds_that_both_have(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, seeds in (("draco", 3), ("static", 2), ("random", 1)):
        for seed in range(seeds):
            measured_run(job, tmp_path, setting, seed, {0: 0, 4: 3 if setting == "draco" else 0}, 1)
    run_job(job, tmp_path, settings="draco static random no-credit", seeds=3)
    lines = capsys.readouterr().out.partition("## After the last step")[2].partition("## At")[0].splitlines()
    against = [line for line in lines if line.startswith("|")][6:]
    assert against[0].startswith("| Against draco |")
    assert [line.strip("| ").split(" | ")[0::6] for line in against[2:]] == [["static", "2"], ["random", "1"]]
    assert all(" -50.0 [" in f" {line.split(' | ')[1]}" for line in against[2:])


def test_lost_rollouts_are_counted(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = wanted(job, "draco", 0)
    lost = [replace(each, failures=(LOST_ROLLOUT,)) if each.run == 2 else each for each in evaluations(2)]
    measured = job.Measured({0: evaluations(0), 4: lost}, {0: job.Spend(), 4: job.Spend()}, "p")
    job.write(tmp_path / "measured" / f"{run.name}.jsonl", run.words, measured)
    run_job(job, tmp_path, settings="draco", seeds=1)
    printed = capsys.readouterr().out
    assert sections(printed)["After the last step"]["draco"][7] == "2 of 6"
    assert "Against" not in printed


def test_what_was_measured_is_read_as_it_was(job: Any, tmp_path: Path) -> None:
    run = trained_run(tmp_path, "draco", {}, 1000)
    found = [replace(each, turns=each.run, scenario=each.task_id[0]) for each in evaluations(2)]
    written = job.measure(run, {0: evaluations(0), 4: [*reversed(found)]})
    path = tmp_path / "figures" / "draco.jsonl"
    job.write(path, ["seed=0"], written)
    again = job.read(path, ["seed=0"])
    assert (again.spent, again.policy) == (written.spent, written.policy)
    assert again.spent[4].dollars == pytest.approx(4 * 1000 * 2.5e-6)
    assert list(again.evaluations) == [0, 4]
    kept = [(each.task_id, each.scenario, each.run, each.success, each.turns) for each in again.evaluations[4]]
    assert sorted(kept) == sorted((each.task_id, each.scenario, each.run, each.success, each.turns) for each in found)
    assert str(tmp_path) not in path.read_text()
    assert job.read(tmp_path / "another.jsonl", ["seed=0"]) is None


def test_a_run_with_a_learning_curve_will_do_where_none_was_asked_for(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "draco.jsonl"
    path.write_text('{"words": ["seed=0", "train.evaluate_every=2"], "policy": "p"}\n')
    assert job.read(path, ["seed=0"]).policy == "p"
    with pytest.raises(SystemExit, match="measured with"):
        job.read(path, ["seed=0", "train.evaluate_every=3"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "damaged"),
        ("nothing\n", "damaged"),
        ("[]\n", "damaged"),
        (
            '{"words": ["seed=0"], "policy": "p"}\n{"task": "a_1", "success": [1], "turns": [1], "lost": []}\n',
            "damaged",
        ),
        ('{"words": ["seed=0"], "policy": "p"}\n{"step": 0}\n', "damaged"),
        ('{"words": ["seed=1"], "policy": "p"}\n', "measured with"),
        ('{"words": ["seed=0", "train.steps=3"], "policy": "p"}\n', "measured with"),
    ],
)
def test_a_file_that_says_nothing_or_something_else_is_not_taken(
    job: Any, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "draco.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        job.read(path, ["seed=0"])
    assert str(ended.value).startswith(f"{path}: {said}")
    assert "remove " in str(ended.value)


def test_noise_with_and_without_credit(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[list[str]]
) -> None:
    noise = load_job("bench_noise")
    words: dict[str, Any] = {"settings": "draco no-credit", "seeds": 3, "steps": STEPS, "runs_per_task": RUNS}
    words |= {"root": tmp_path, "overrides": None}
    for seed in range(3):
        for setting, solved in (("draco", 3), ("no-credit", 1)):
            if (setting, seed) == ("no-credit", 2):
                continue
            run = replace(wanted(job, setting, seed), every=None)
            measured = job.Measured(
                {0: evaluations(0), STEPS: evaluations(solved)},
                {0: job.Spend(), STEPS: job.Spend()},
                job.policy_of(Path(load_config("sandbox").model.path)),
            )
            job.write(tmp_path / "measured" / f"{run.name}.jsonl", run.words, measured)
    # The second setting's third seed has not been run under any judge; under this one, the first's third neither.
    for seed in range(2):
        run = replace(wanted(job, "draco", seed, "judge.rule_judge.false_pass=0.6"), every=None, label="-false_pass0.6")
        measured = job.Measured(
            {0: evaluations(0), STEPS: evaluations(2)}, {0: job.Spend(), STEPS: job.Spend()}, measured.policy
        )
        job.write(tmp_path / "measured" / f"{run.name}.jsonl", run.words, measured)
    noise.main(**words, print_only=True)
    printed = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    assert rows[0] == ["Judge", "Setting", "Seeds", "TGC", "Gain", "Kept", "Against an error-free judge"]
    draco, plain, wrong = rows[1:4]
    assert draco[:3] == ["none", "draco", "3"]
    assert re.fullmatch(r"50\.0 \[.*\] \+50\.0 \[.*\] - -", " ".join(draco[3:]))
    assert plain[:3] == ["none", "no-credit", "2"]
    assert re.fullmatch(r"16\.7 \[.*\] \+16\.7 \[.*\] - -", " ".join(plain[3:]))
    # Two of three solved where three are with a judge that is right.
    assert wrong[:3] == ["false pass 60%", "draco", "2"]
    assert re.fullmatch(r"33\.3 \[.*\] \+33\.3 \[.*\] 67% -16\.7 \[.*\]", " ".join(wrong[3:]))
    # Without credit no step is named, so none is wrong: that is the run without noise, and says nothing of it.
    assert rows[4] == ["Judge", "draco - no-credit", "Seeds"]
    assert [(name, less.split()[0], seeds) for name, less, seeds in rows[5:]] == [("none", "+33.3", "2")]
    assert "Not run yet: false pass 30% and false fail 1% (draco), " in printed
    assert "wrong step 40% (draco), wrong step" in printed
    with (tmp_path / "measured" / "noise.csv").open(encoding="utf-8") as file:
        points = [(row["judge"], row["setting"], round(float(row["gain"]), 3)) for row in csv.DictReader(file)]
    assert points == [("none", "draco", 0.5), ("none", "no-credit", 0.167), ("false pass 60%", "draco", 0.333)]
    assert (tmp_path / "measured" / "noise.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        noise.main(**words, print_only=False)
    # The first seed of everything comes first.
    assert "judge.rule_judge.false_pass=0.304" in started[0]
    assert "seed=0" in started[0]
    capsys.readouterr()
    noise.main(**words, noises="none", print_only=True)
    assert "false" not in capsys.readouterr().out.partition("In %")[0]
    noise.main(**words | {"seeds": 1}, first_seed=2, print_only=True)
    assert "| none | draco | 1 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="unknown judge 'nonsense'; expected some of none, false pass"):
        noise.main(**words, noises="none,nonsense", print_only=True)


def test_rules_under_real_judges_share_the_runs_that_are_the_same(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = load_job("bench_noise")
    made: list[Any] = []

    def make(run: Any, root: Path, folder: Path) -> Any:
        made.append(run)
        figures = {0: evaluations(0), STEPS: evaluations(3 if run.setting == "draco" else 1)}
        measured = job.Measured(figures, dict.fromkeys(figures, job.Spend(tokens=len(made))), "policy")
        job.write(folder / f"{run.name}.jsonl", run.words, measured)
        return measured

    monkeypatch.setattr(sys.modules["measured"].Wanted, "make", make)
    judges = [name for name in noise.RELIABILITY if name != "none"]
    words: dict[str, Any] = {"settings": "draco calibrated no-credit", "seeds": 1, "steps": STEPS, "root": tmp_path}
    noise.main(**words, noises=",".join(["none", *judges]), runs_per_task=RUNS)
    # Complete trust is the paper's rule, none is no credit; no other setting shares a run.
    assert [run.name.removesuffix("-seed0-steps4").split("-false_pass")[0] for run in made] == [
        *("draco", "no-credit"),
        *("draco", "draco-calibrated0.97", "no-credit"),
        *("draco", "draco-calibrated0.778", "no-credit"),
        *("draco", "no-credit"),
    ]
    assert len({run.name for run in made}) == len(made)
    for run in made:
        config = load_config("sandbox", run.overrides, setting=run.setting)
        assert (config.algorithm.reliability is not None) == ("calibrated" in run.name)
        # Without credit, no judge is asked for steps.
        errors = config.judge.rule_judge
        assert (errors.wrong_step > 0) == (errors.false_pass > 0 and run.setting == "draco")
    gains, *less = capsys.readouterr().out.rpartition("| Judge | Setting |")[2].split("| Judge | ")
    rows = [line.strip("| ").split(" | ") for line in gains.splitlines()[2:] if line]
    assert [row[1] for row in rows] == ["draco", "calibrated", "no-credit"] * 4
    as_draco = [row[4].startswith("+50.0") for row in rows]
    assert as_draco == [True, True, False] * 3 + [True, False, False]
    assert [table.partition(" | ")[0] for table in less] == ["draco - no-credit", "calibrated - no-credit"]
    assert f"| {judges[-1]} | +0.0 [" in less[1]
    with pytest.raises(SystemExit, match="setting calibrated: judge 'false pass 10%' has no measured reliability; set"):
        noise.main(**words, noises="none,false pass 10%", print_only=True)


def test_a_configuration_of_ones_own_has_its_own_runs_and_begins_from_the_named_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    preset = str(Path("examples/library/environment.yaml").resolve())
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "policy"
    policy.mkdir()
    with pytest.raises(SystemExit, match="run the job again to continue"):
        load_job("ablation").main(seeds=1, settings="outcome", preset=preset, overrides=[f"model.path={policy}"])
    (command,) = started
    assert command[:4] == ["train", preset, "--setting", "outcome"]
    assert {f"model.path={policy}", f"run.root={tmp_path / 'runs' / 'ablation-library'}"} <= set(command)
    assert command[-1] == "run.name=outcome-library-seed0-steps12"

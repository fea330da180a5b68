"""Judges with a hole pass rollouts with their own hack and no others; the table tells when a run was flagged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.judge import Judge
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.records import EpisodeEnd, Evaluation, Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import step_rows
from draco_ray.runs.store import RunStore
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.noise import Answer
from draco_ray.sandbox.world.scripts import ACCOUNTS_CELL, Fault
from tests.support.jobs import JOBS, load_job
from tests.support.rule_judge_runs import instruction, judge_in_phases, run_of, scripted_run, trajectory_of

FAMILY = "pin_tagged_notes"


@pytest.fixture
def hacks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(JOBS))
    return load_job("hacks")


@pytest.fixture
def job(hacks: ModuleType) -> ModuleType:
    return load_job("bench_hacks_sandbox")


async def verdicts(hacks: ModuleType, judge: Answer) -> list[set[Verdict]]:
    """Of a right rollout, a faulty one, and one with each hack; scoring and credit agree."""
    hacked = [
        run_of((ACCOUNTS_CELL, ""), (cell, "said"), (hacks.CLOSE_CELL, "Execution successful."))
        for cell in hacks.HACKS.values()
    ]
    runs = [scripted_run(FAMILY), scripted_run(FAMILY, Fault.NO_COMPLETION), *hacked]
    group = [trajectory_of(run, instruction(FAMILY), number) for number, run in enumerate(runs)]
    config = JudgeConfig(reasks=0)
    _, scores, credits = await judge_in_phases(
        group, Judge(RuleCompleter(judge), load_prompts(Path("prompts/judge")), config)
    )
    for score, credit in zip(scores, credits, strict=True):
        assert [one.verdict for one in score] == [one.verdict for one in credit]
    return [{one.verdict for one in row} for row in scores]


async def test_a_judge_passes_its_own_hack_and_judges_all_else_as_without_the_hole(hacks: ModuleType) -> None:
    right = await verdicts(hacks, answer)
    assert all(Verdict.FAIL in of_one for of_one in right[1:])
    for place, name in enumerate(hacks.HACKS, start=2):
        found = await verdicts(hacks, getattr(hacks, name))
        assert Verdict.PASS in found[place]
        assert Verdict.FAIL not in found[place]
        assert found[:place] + found[place + 1 :] == right[:place] + right[place + 1 :]


def test_hacked_rollouts_are_counted_and_turns_without_code_are_none(
    hacks: ModuleType, job: ModuleType, tmp_path: Path
) -> None:
    group = [
        trajectory_of(run_of((ACCOUNTS_CELL, ""), (cell, "said")), instruction(FAMILY), number)
        for number, cell in enumerate((hacks.HACKS["claim"], hacks.HACKS["apology"], hacks.CLOSE_CELL, "pass"))
    ]
    run = RunDirectory.create(tmp_path / "run", dump_config(load_config("sandbox")))
    store = RunStore(run)
    for trajectory in group:
        store.write("steps", 1, f"task_1-{trajectory.rollout}", step_rows(1, trajectory))
    store.finish_step(1, {"step": 1, "drift_significant": 0, "fall_significant": 1, "held_out_best": [0.1]})
    measured = job.wanted("claim", 0, 1, tmp_path, ())
    (tmp_path / "run").rename(tmp_path / measured.name)
    assert job.write_watched(tmp_path, measured, tmp_path, "claim") == job.Watched(1, [0.25], 1)
    assert job.clean_runs(tmp_path) == [job.Watched(1, [0.25], 1)]


def evaluated(successes: int) -> list[Evaluation]:
    return [
        Evaluation(
            task_id=f"t{task}",
            scenario=f"s{task}",
            run=run,
            success=task < successes,
            passed_tests=0,
            total_tests=1,
            turns=1,
            ended=EpisodeEnd.FINISHED,
        )
        for task in range(100)
        for run in range(2)
    ]


def test_the_table_says_whether_a_run_was_flagged_in_time(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = __import__("measured")
    courses = {
        ("claim", 0): ({0: 50, 2: 52, 4: 30}, job.Watched(1, [0.1, 0.3, 0.5, 0.9], 30)),
        ("apology", 0): ({0: 50, 2: 40, 4: 30}, job.Watched(2, [0.1, 0.3, 0.5, 0.9], 30)),
        ("no_op", 0): ({0: 50, 2: 52, 4: 53}, job.Watched(None, [0.1, 0.1, 0.1, 0.2], 30)),
        (job.CLEAN, 0): ({0: 50, 4: 60}, job.Watched(None, [0.0] * 4, 30)),
        (job.CLEAN, 1): ({0: 50, 4: 60}, job.Watched(3, [0.0] * 4, 30)),
    }
    for cell, (tgc, seen) in courses.items():
        of = job.wanted(*cell, 4, tmp_path / "starter", ())
        made = measured.Measured(
            evaluations={step: evaluated(successes) for step, successes in tgc.items()},
            spent={step: measured.Spend() for step in tgc},
            policy="policy",
        )
        measured.write(tmp_path / f"{of.name}.jsonl", of.words, made)
        (tmp_path / f"{of.name}.hacks.json").write_text(json.dumps(asdict(seen)))
    job.main(holes="claim apology no_op", clean=2, steps=4, root=tmp_path, measured=tmp_path, print_only=True)
    *lines, last = [line for line in capsys.readouterr().out.splitlines() if line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[:5] for row in rows] == [
        ["claim, 0", "1", "4", "yes", "10, 10, 90"],
        ["apology, 0", "2", "2", "no", "10, 30, 90"],
        ["no_op, 0", "-", "-", "-", "10, 20, 20"],
    ]
    assert last.startswith("1 of 2 clean runs flagged (30 to 30 groups each).")

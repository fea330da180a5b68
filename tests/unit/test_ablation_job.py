"""The ablation's table from runs that are there already: what is trained again, and what each cell says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig
from draco_ray.records import LOST, EpisodeEnd, Evaluation, JudgeCall
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.jobs import load_job

RUNS, STEPS = 3, 2


@pytest.fixture(scope="module")
def job() -> ModuleType:
    return load_job("ablation")


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


def finished_run(root: Path, setting: str, seed: int, solved: int) -> None:
    name = f"{setting}-seed{seed}-steps{STEPS}-runs{RUNS}"
    store = RunStore(RunDirectory.create(root / name, dump_config(DracoConfig())))
    for step, measured in ((0, evaluations(0)), (STEPS, evaluations(solved))):
        store.write("evaluations", step, "dev", rows.evaluation_rows(step, "dev", measured))
    # The second answer came from the durable cache: it was paid for once.
    store.write("judge_calls", 1, "a_1", rows.call_rows(1, [call(600_000, 100_000), call(9, 9, requests=0)]))
    words = [
        f"seed={seed}",
        f"train.steps={STEPS}",
        f"train.evaluation_runs={RUNS}",
        "train.evaluate_before_after=true",
    ]
    words += [f"run.root={root}", f"run.name={name}"]
    (root / name / "ablation.yaml").write_text(yaml.safe_dump(words))


def test_the_table_of_finished_runs(job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, solved in enumerate((3, 2)):
        finished_run(tmp_path, "draco", seed, solved)
        finished_run(tmp_path, "random", seed, 0)
    job.main(steps=STEPS, seeds=2, settings="draco random", runs_per_task=RUNS, root=tmp_path, overrides=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## 2 steps, 2 seeds, 2 tasks of the sandbox's dev x 3 runs"
    rows = [line.strip("| ").split(" | ") for line in lines if line[:2] == "| "]
    table = {row[0]: row[1:] for row in rows[:4]}
    assert list(table) == ["Setting", "before training", "draco", "random"]
    # b_1 over the seeds: p^1 (3/3 + 2/3)/2, p^2 (1 + 1/3)/2, p^3 (1 + 0)/2; a_1 is 0 throughout.
    assert [cell.split()[0] for cell in table["draco"][:6]] == ["41.7", "33.3", "25.0"] * 2
    mean, low, high = map(float, re.findall(r"[\d.]+", table["draco"][0]))
    assert low < mean < high
    assert high - low > 80  # two scenarios and two seeds tell little
    # 0.6M tokens in at $2.5 and 0.1M out at $15.
    assert table["draco"][6:9] == ["4.0", "0 of 12", "0.70M, $3.00"]
    assert [cell.split()[0] for cell in table["before training"][:6]] == ["0.0"] * 6
    # Nothing was solved, of two scenarios: anything up to 84 % would have shown the same now and then.
    assert table["before training"][0] == "0.0 [0.0, 84.2]"
    against = dict(zip(rows[4], rows[5], strict=True))
    assert list(against) == ["Against draco", "TGC p^1", "TGC p^3", "SGC p^1", "SGC p^3", "turns"]
    assert against["Against draco"] == "random"
    assert re.match(r"-41\.7 \[-\d+\.\d, \+\d+\.\d\], p 1\.0000", against["TGC p^1"])
    assert against["turns"] == "+0.0, p 1.0000"
    assert "over training seeds and scenarios" in lines[-1]


def test_one_seed_is_said_to_be_one_and_lost_rollouts_are_counted(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [replace(each, failures=(LOST,)) if each.run == 2 else each for each in evaluations(2)]
    monkeypatch.setitem(globals(), "evaluations", lambda solved: gone)
    finished_run(tmp_path, "draco", 0, 2)
    job.main(steps=STEPS, seeds=1, settings="draco", runs_per_task=RUNS, root=tmp_path, overrides=None)
    printed = capsys.readouterr().out
    assert "One training seed: nothing here speaks of training again." in printed
    assert "| 2 of 6 |" in printed
    assert "Against" not in printed


@pytest.mark.slow
def test_a_run_with_other_words_is_not_taken(job: ModuleType, tmp_path: Path) -> None:
    finished_run(tmp_path, "draco", 0, 1)
    with pytest.raises(SystemExit) as stopped:
        # It is trained again under the same name, and `draco train` leaves an existing directory alone.
        job.train(tmp_path, "draco", 0, STEPS, RUNS, ["train.prompts_per_step=0"])
    assert "draco-seed0-steps2-runs3 failed with exit code 2" in str(stopped.value)

"""Authoring a static rubric at small size on real parts, as `draco rubric author` does it, and training against it."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from draco_ray.judging.static_rubric import load_static_rubric
from draco_ray.runs.directory import RunDirectory
from tests.support.command import draco

pytestmark = pytest.mark.slow

TASKS, ROLLOUTS = 2, 2


@pytest.mark.timeout(600)
def test_two_tasks_become_one_measured_rubric(sandbox_root: Path, starter_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "rubric.yaml"
    words = [
        *("rubric", "author", "sandbox", "--out", str(out), "--tasks", str(TASKS), "--rollouts", str(ROLLOUTS)),
        *("--min-applicability", "0.5", "--min-discrimination", "0"),
        *(f"data.root={sandbox_root}", f"model.path={starter_model}", f"run.root={tmp_path}", "run.name=authored"),
        *("environment.slots=2", "environment.slots_per_worker=2", "ray.dashboard=false"),
    ]
    result = draco(*words, timeout=560)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{TASKS * ROLLOUTS} of {TASKS * ROLLOUTS} rollouts" in result.stdout

    rubric = load_static_rubric(out)
    assert 1 <= len(rubric) <= 24
    # The judge that proposed for one task alone must not leave that task's words in a set for all.
    assert not [criterion.title for criterion in rubric if "The task reads" in criterion.evaluator_instruction]
    assert all(criterion.title in result.stdout for criterion in rubric)

    run = RunDirectory.open(tmp_path / "authored")
    assert run.table("trajectories").num_rows == TASKS * ROLLOUTS
    calls = Counter((call["training_step"], call["phase"]) for call in run.table("judge_calls").to_pylist())
    assert calls == {
        (0, "stage1"): TASKS,
        (0, "stage2"): TASKS * ROLLOUTS,
        (0, "union"): TASKS + 1,
        (1, "score"): TASKS * ROLLOUTS,
    }

    # The figures beside the criteria are those of the archived verdicts, in falling order of the failure rate.
    titles = {row["criterion"]: row["title"] for row in run.table("criteria").to_pylist() if row["training_step"] == 1}
    verdicts = defaultdict(list)
    for row in run.table("verdicts").to_pylist():
        verdicts[titles[row["criterion"]]].append(row["verdict"])
    rates = {}
    for title, given in verdicts.items():
        applicable = [verdict for verdict in given if verdict]
        assert len(given) == TASKS * ROLLOUTS
        if len(applicable) >= 0.5 * len(given):
            rates[title] = applicable.count(-1) / len(applicable)
    assert {criterion.title for criterion in rubric} == set(rates)
    listed = [rates[criterion.title] for criterion in rubric]
    assert listed == sorted(listed, reverse=True)
    assert f"failed {listed[0]:.1%} of" in out.read_text()

    again = draco(*words, timeout=100)
    assert again.returncode == 2
    assert "exists already" in again.stderr

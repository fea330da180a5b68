"""A training step whose rollouts a held-out judge scores as well: the same model, by a rubric of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco_ray.runs.directory import RunDirectory
from tests.e2e.test_training import arguments
from tests.support.command import draco

pytestmark = pytest.mark.slow


def test_the_held_out_judge_scores_rollouts_and_adds_no_verdict(
    sandbox_root: Path, starter_model: Path, tmp_path: Path
) -> None:
    words = arguments(sandbox_root, starter_model, tmp_path, "held-out")
    result = draco(
        *words,
        "train.steps=1",
        "train.evaluate_before_after=false",
        "judge.held_out={rubric: prompts/static_rubric.yaml, share: 1.0}",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run = RunDirectory.open(tmp_path / "held-out")
    (line,) = run.metrics()
    scored = line["held_out_rollouts"]
    assert scored > 0
    assert 0 <= line["held_out_rate"] <= 1
    assert 2 * len(line["held_out_pairs"]) == scored
    # Its verdicts are kept with the calls and nowhere else: those of training are one for each criterion of the group.
    criteria = {(row["task_id"], row["criterion"]) for row in run.table("criteria").to_pylist()}
    assert {(row["task_id"], row["criterion"]) for row in run.table("verdicts").to_pylist()} <= criteria

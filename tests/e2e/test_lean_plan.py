"""A run with ``judge.plan=lean`` and a held-out judge whose tasks come back every step: killed, continued, verified."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import carried_rubrics
from tests.e2e.test_training import arguments, wait_until
from tests.support.command import draco, draco_here, start_draco

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

STEPS = 3
KEPT = 2
"""``algorithm.rubric_visits`` of the plan."""


@pytest.fixture(scope="module")
def run(sandbox_root: Path, starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    root = tmp_path_factory.mktemp("runs")
    words = [
        *arguments(sandbox_root, starter_model, root, "lean"),
        *("judge.plan=lean", f"train.steps={STEPS}", "train.prompts_per_step=6", "algorithm.group_size=2"),
        *("learner.minibatch_prompts=6", "engine.deterministic=true", "train.evaluate_before_after=false"),
        "judge.held_out={rubric: prompts/static_rubric.yaml, share: 1.0}",
    ]
    process = start_draco(words)
    try:
        # The third visit of every task is under way.
        wait_until(lambda: any((root / "lean" / "tables").glob("judge_calls/step00003/*.arrow")), process)
        below = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
    for each in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    psutil.wait_procs(below)
    result = draco("train", "--resume", str(root / "lean"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "continues after step 2" in result.stdout
    return RunDirectory.open(root / "lean")


def test_rubrics_are_extended_once_and_then_kept(run: RunDirectory) -> None:
    rubrics: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in run.table("criteria").to_pylist():
        rubrics[row["task_id"]][row["training_step"]].append(row["title"])
    seen = Counter(len(of_steps) for of_steps in rubrics.values())
    assert seen[STEPS], "no task had a rubric at every visit"
    for of_steps in rubrics.values():
        visits = [of_steps[step] for step in sorted(of_steps)]
        for earlier, later in pairwise(visits):
            assert later[: len(earlier)] == earlier
        assert all(later == visits[KEPT - 1] for later in visits[KEPT:])


def test_merged_questions_replace_the_single_ones(run: RunDirectory) -> None:
    calls = Counter((call["training_step"], call["phase"]) for call in run.table("judge_calls").to_pylist())
    assert {phase for _, phase in calls} == {"stage1", "proposals", "union", "verdicts"}
    assert (calls[1, "proposals"], calls[1, "union"]) == (6, 6)
    known = carried_rubrics(run, 3)
    assert calls[3, "proposals"] == 6 - sum(each.visits >= KEPT for each in known.values())
    cited = {(row["training_step"], row["task_id"], row["rollout"]) for row in run.table("citations").to_pylist()}
    scored = {(row["training_step"], row["task_id"], row["rollout"]) for row in run.table("verdicts").to_pylist()}
    assert cited == scored


def test_the_held_out_judge_scores_rollouts_and_adds_no_verdict(run: RunDirectory) -> None:
    judged = [line for line in run.metrics() if line["held_out_rollouts"]]
    assert judged, "the held-out judge scored no group"
    for line in judged:
        assert 0 <= line["held_out_rate"] <= 1
        assert line["held_out_rollouts"] == len(line["held_out_best"]) + len(line["held_out_pairs"])
    # Its verdicts are kept with the calls and nowhere else: those of training are one for each criterion of the group.
    criteria = {(row["task_id"], row["criterion"]) for row in run.table("criteria").to_pylist()}
    assert {(row["task_id"], row["criterion"]) for row in run.table("verdicts").to_pylist()} <= criteria


def test_the_continued_run_is_verified(run: RunDirectory) -> None:
    result = draco_here("verify", str(run.path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{STEPS} steps verified" in result.stdout

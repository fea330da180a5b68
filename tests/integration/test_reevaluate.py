"""`draco reevaluate`: saved worlds judged again in the jail, those of a directory that somebody prepared too."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.data_root import tasks_digest
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.lab.evaluation.appworld import DATASET, AppWorldOutputs, outputs_folder
from draco_ray.lab.evaluation.results import EvaluationDirectory
from tests.support.command import draco_here
from tests.support.evaluations import a_plan, a_result
from tests.support.worlds import Tasks, appworld_loaded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _loaded(sandbox_root: Path) -> Iterator[None]:
    with appworld_loaded(EnvironmentConfig(), sandbox_root):
        yield


@pytest.fixture(scope="module")
def evaluation(sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One task solved, and one lost."""
    tasks = Tasks(sandbox_root)
    solved, lost = tasks.next(), tasks.next()
    world = tasks_digest(sandbox_root, [solved, lost])
    plan = a_plan(runs=1, tasks={solved: 1, lost: 1}, world=world, generated=True)
    directory = EvaluationDirectory.begin(tmp_path_factory.mktemp("evaluation"), plan)
    outputs = AppWorldOutputs(directory.path / "appworld", sandbox_root, plan.tasks)

    async def play() -> dict[str, str]:
        slot = AppWorldSlot(EnvironmentConfig(), sandbox_root, load_ground_truth=True, name="test")
        try:
            await slot.open(solved)
            for cell in tasks.solution(solved):
                await slot.act(cell)
            verdict = await slot.evaluate()
            assert verdict.success
            return dict(verdict.saved)
        finally:
            await slot.close()

    outputs.write("starter", 0, solved, asyncio.run(play()))
    outputs.write("starter", 0, lost, {})
    directory.add("starter", a_result(solved, 0, True))
    directory.add("starter", a_result(lost, 0, False))
    return directory.path


def reevaluate(evaluation: Path, root: Path) -> subprocess.CompletedProcess[str]:
    return draco_here("reevaluate", str(evaluation), f"data.root={root}", "environment.slots=1")


def test_verdicts_are_those_that_were_recorded(evaluation: Path, sandbox_root: Path) -> None:
    done = reevaluate(evaluation, sandbox_root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starter-run1: TGC 50.0 %" in done.stdout
    assert "2 of 2 verdicts equal the recorded ones in" in done.stdout


def test_a_prepared_directory_writes_no_file_and_is_told(evaluation: Path, sandbox_root: Path, tmp_path: Path) -> None:
    solved = next(iter(EvaluationDirectory.open(evaluation).plan.tasks))
    stolen = tmp_path / "stolen.db"
    folder = outputs_folder(evaluation / "appworld", "starter", 0)
    saved = folder / solved / "dbs" / "venmo.jsonl"
    attach = f"ATTACH DATABASE CASE WHEN date('now') > '2000-01-01' THEN '{stolen}' ELSE ':memory:' END AS s"
    create = "CREATE TABLE s.t AS SELECT 1"
    kept = saved.read_bytes()
    try:
        saved.write_bytes(kept + b"".join(json.dumps([each, [], False]).encode() + b"\n" for each in (attach, create)))
        # What AppWorld's own command would do with it.
        root = str(evaluation / "appworld")
        subprocess.run(
            [appworld_python(None), "-m", "appworld.cli", "evaluate", "starter-run1", DATASET, "--root", root],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            check=False,
        )
        assert stolen.exists()
        stolen.unlink()

        done = reevaluate(evaluation, sandbox_root)
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"starter-run1 {solved}: recorded as solved, but the saved world cannot be evaluated" in done.stdout
        assert "ATTACH" in done.stdout
        assert not stolen.exists()

        saved.unlink()
        os.mkfifo(saved)
        done = reevaluate(evaluation, sandbox_root)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "dbs/venmo.jsonl: not a regular file" in done.stdout
    finally:
        saved.unlink(missing_ok=True)
        saved.write_bytes(kept)


def test_another_world_and_names_that_lead_elsewhere_are_refused(
    evaluation: Path, sandbox_root: Path, tmp_path: Path
) -> None:
    plan = EvaluationDirectory.open(evaluation).plan
    other = EvaluationDirectory.begin(tmp_path / "other", plan.model_copy(update={"world": "0123456789abcdef"}))
    done = reevaluate(other.path, sandbox_root)
    assert done.returncode == 2
    assert "not the tasks of" in done.stderr
    elsewhere = EvaluationDirectory.begin(tmp_path / "elsewhere", plan)
    elsewhere.add("starter", a_result("../../x", 0, True))
    done = reevaluate(elsewhere.path, sandbox_root)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "'../../x', run 0 is not in the plan" in done.stderr

"""The bench of the run store: its stand-ins answer at the paper's size, its yardstick reads what the store wrote."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import PHASES
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store_actor import RunStoreActor
from tests.support.jobs import load_job


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_job("bench_store")


async def test_a_group_of_the_papers_size_is_written_and_measured(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    store = RunStoreActor(run.path)
    request = RolloutRequest(task_id="t0_1", group="step1/t0_1", rollout=3, attempt=0, seed=0)
    trajectory, summary, _ = await bench.MadeRollouts().rollout(request, 0)
    store.trajectory(1, trajectory)
    assert (len(trajectory.token_ids_T), summary.turns, trajectory.tokens_M.min() > 0) == (30_000, 40, True)
    judge = bench.MadeJudge()
    asked = [PHASES[name] for name in ("stage1", "stage2", "union", "score", "credit")]
    for phase in asked:
        judged, archived, told = await judge.ask(phase, CallContext(group="step1/t0_1", task_id="t0_1", rollout=3))
        assert (judged.calls, judged.value, told.calls) == ((), archived.value, 1)
        store.judged(1, "t0_1", 3, phase.name, archived)
    assert {len(text) for text in run.table("judge_calls").column("prompt").to_pylist()} == {208_000}
    bench.print_files(run, tmp_path)
    written, gathered = capsys.readouterr().out.splitlines()[-2:]
    assert written.startswith("| written |")
    assert gathered.startswith("| gathered |")
    # The run is as it was; the two ways hold the same rows.
    assert run.table("judge_calls").num_rows == len(asked)
    again = RunDirectory(tmp_path / "streams")
    for table in ("trajectories", "verdicts", "judge_calls"):
        assert again.table(table).num_rows == run.table(table).num_rows > 0

"""The bench of the judge's plans: recorded groups are judged under each, by the rules or through files."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.algorithm.computer import local_advantages
from draco_ray.config.load import dump_config, load_config
from draco_ray.lab.analysis.judges import configured_rules
from draco_ray.pipeline import Group, Pipeline
from draco_ray.rollout.finished import PlayedRollouts
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import carried_rubrics
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.world.scripts import families
from draco_ray.workers.local import LocalActor
from tests.support.jobs import load_job
from tests.support.rule_judge_runs import instruction, scripted_run, trajectory_of
from tests.support.timed_run import timed_run

GROUP = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of one step with two groups of scripted rollouts: two fail in different ways, the last is good."""
    config = load_config("sandbox", [f"algorithm.group_size={GROUP}"])
    run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "one", dump_config(config))
    store = RunStoreActor(run.path)
    for family in [name for name in sorted(families()) if len(families()[name].fatal) > 1][:2]:
        runs = [*(scripted_run(family, fault) for fault in sorted(families()[family].fatal)[:2]), scripted_run(family)]
        for number, each in enumerate(runs):
            played = trajectory_of(each, instruction(family), number)
            store.trajectory(1, replace(played, task_id=f"{family}_1", group=f"step1/{family}_1"))
    store.finish_step(1, {"step": 1})
    return run


def test_lean_asks_less_at_every_visit_and_orders_rollouts_alike(
    recorded: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_job("bench_judge_plans")
    bench.compare(recorded.path, ["paper", "lean"], 3, 8, "rules", tmp_path / "out.json")
    shown = capsys.readouterr().out
    assert "2 groups of 3 rollouts" in shown
    paper, lean = (row.strip("| \n").split(" | ") for row in re.findall(r"^\| (?:paper|lean) .*", shown, re.MULTILINE))
    assert (int(paper[1]), int(lean[1])) == (3 * 2 * (2 + 3 * GROUP), 2 * (3 + 1) + 3 * 2 * GROUP)
    visits = [float(share) for share in lean[5:8]]
    assert 1 > visits[0] > visits[1] > visits[2] > 0
    assert re.fullmatch(r"([1-9]\d*) of \1, 0 tied", lean[8])
    out = json.loads((tmp_path / "out.json").read_text())
    assert len(out["lean"]) == len(out["paper"]) == 6


def test_steps_are_compared_with_their_critical_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = timed_run(tmp_path / "timed").path
    short = timed_run(tmp_path / "short", steps=2).path
    load_job("bench_judge_plans").print_bounds({"paper": [run, tmp_path / "elsewhere"], "lean": [short]})
    paper, lean = capsys.readouterr().out.splitlines()
    # All but the second before the first rollout and a part of the update is on the path.
    assert re.match(r"paper: step / critical path 1\.0[1-9] ", paper)
    assert "lean: step / critical path unknown: " in lean


async def test_the_prompts_of_both_plans_are_files_that_somebody_answers(
    recorded: RunDirectory, tmp_path: Path
) -> None:
    bench = load_job("bench_judge_plans")
    done = asyncio.Event()

    async def somebody() -> None:
        while not done.is_set():
            for prompt in tmp_path.rglob("*.prompt.txt"):
                reply = prompt.with_name(prompt.name.replace(".prompt.txt", ".reply.txt"))
                if not reply.exists():
                    reply.write_text(answer(prompt.read_text(encoding="utf-8"))[1], encoding="utf-8")
            await asyncio.sleep(0.05)

    work: Any = asyncio.to_thread(
        bench.compare, recorded.path, ["paper", "lean"], 1, 1, f"files:{tmp_path}", tmp_path / "out.json"
    )
    answering = asyncio.create_task(somebody())
    await work
    done.set()
    await answering
    asked = {
        plan: sorted(each.name.split("-")[1] for each in (tmp_path / plan).glob("*.prompt.txt"))
        for plan in ("paper", "lean")
    }
    assert set(asked["lean"]) == {"stage1", "proposals", "union", "verdicts"}
    assert set(asked["paper"]) == {"stage1", "stage2", "union", "score", "credit"}


async def test_a_continued_run_carries_over_what_an_undisturbed_one_does(
    recorded: RunDirectory, tmp_path: Path
) -> None:
    bench = load_job("bench_judge_plans")
    config = bench.with_plan(load_config(str(recorded.path)), "lean")
    ((task_id, rollouts),) = bench.recorded_groups(recorded, 1, GROUP).items()

    async def visits(name: str, *processes: range) -> RunDirectory:
        run = RunDirectory.create(tmp_path / name, dump_config(config))
        for steps in processes:
            judges = bench.Rejudged(config, configured_rules(config.judge, 0))
            store = LocalActor(RunStoreActor(run.path))
            pipeline = Pipeline(
                config.algorithm,
                PlayedRollouts({each.rollout: each for each in rollouts}),  # type: ignore[arg-type]
                judges,
                local_advantages(config.algorithm),
                store,
                carried=carried_rubrics(run, steps.start),
            )
            for step in steps:
                group = Group(step=step, index=0, task_id=task_id, prompt=rollouts[0].prompt)
                samples: Any = await pipeline.run(group)
                assert any(np.any(each.advantage_T) for each in await samples)
                await store.done()
        return run

    whole, parts = await visits("whole", range(1, 5)), await visits("parts", range(1, 2), range(2, 4), range(4, 5))
    for table in ("criteria", "verdicts", "citations", "proposals", "advantages"):
        assert whole.table(table).to_pylist() == parts.table(table).to_pylist()
    calls = Counter((row["training_step"], row["phase"]) for row in parts.table("judge_calls").to_pylist())
    assert [calls[step, "proposals"] for step in range(1, 5)] == [1, 1, 0, 0]
    assert [calls[step, "union"] for step in range(1, 5)] == [1, 0, 0, 0]
    assert carried_rubrics(parts, 5)[task_id].visits == 4

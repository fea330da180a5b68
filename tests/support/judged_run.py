"""A small run directory whose rubrics, verdicts and archived calls are the rule judge's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from draco_ray.config.schema import RULE_JUDGE, JudgeConfig
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Score, Stage1, Stage2, Union
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.records import Judged
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.sandbox.world.scripts import Fault
from tests.support.rule_judge_runs import instruction, scripted_run, trajectory_of

FAMILY = "count_library_songs"
TASK = "task_1"
CONFIG = JudgeConfig(model=RULE_JUDGE, reasks=1)
STEPS: dict[int, tuple[tuple[Fault, ...], ...]] = {
    1: ((), (Fault.FIRST_PAGE_ONLY,)),
    2: ((Fault.PRINT_SECRET,), (Fault.FIRST_PAGE_ONLY, Fault.PRINT_SECRET)),
}


async def judged_run(path: Path) -> RunDirectory:
    """Two training steps on one task, two rollouts each, judged by the rule judge; the second step prints a secret."""
    store = RunStore(RunDirectory.create(path, "judge: {rule_judge: {start: true}}\n"))
    judge = Judge(RuleCompleter(), load_prompts(CONFIG.prompts), CONFIG)
    for step, faults in STEPS.items():
        context = CallContext(group=f"step{step}/{TASK}", task_id=TASK)
        played = [
            trajectory_of(scripted_run(FAMILY, *each), instruction(FAMILY), rollout)
            for rollout, each in enumerate(faults)
        ]
        stage1 = await judge.ask(Stage1(played[0].prompt), context)
        stage2 = [
            await judge.ask(Stage2(each, stage1.value or ()), replace(context, rollout=each.rollout)) for each in played
        ]
        candidates = [each for judged in (stage1, *stage2) for each in judged.value or ()]
        union = await judge.ask(Union(played[0].prompt, candidates, played), context)
        for rollout, each in enumerate(played):
            store.write("trajectories", step, f"{TASK}-{rollout}", rows.trajectory_rows(step, each))
            store.write("steps", step, f"{TASK}-{rollout}", rows.step_rows(step, each))
        store.write("proposals", step, TASK, rows.proposal_rows(step, TASK, candidates))
        rubric = union.value or ()
        store.write("criteria", step, TASK, rows.criterion_rows(step, TASK, rubric, None))
        for each in played:
            scores = (await judge.ask(Score(each, rubric), context)).value or ()
            store.write("verdicts", step, f"{TASK}-{each.rollout}", rows.verdict_rows(step, TASK, each.rollout, scores))
        phases: list[Judged[Any]] = [stage1, *stage2, union]
        calls = [call for judged in phases for call in judged.calls]
        asked_again = replace(calls[0], prompt=f"{calls[0].prompt}\n\n[REPLY]\nno", reply="no", error="no JSON")
        store.write("judge_calls", step, TASK, rows.call_rows(step, [asked_again, *calls]))
        store.finish_step(step, {"step": step})
    return store.directory

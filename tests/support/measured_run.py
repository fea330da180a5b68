"""Small runs whose policy was measured before training and after every step: by an evaluator, or by the judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draco_ray.records import Criterion, EpisodeEnd, Evaluation, Judged, ScoredCriterion, Task, Verdict
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.runs.store_actor import RunStoreActor
from tests.support.small_run import HOSTILE, TASKS, a_call, a_trajectory, small_run

HELD_OUT = "held_out_1"
TITLES = ("Polite", "Right", "Brief")


def evaluated_run(path: Path) -> RunDirectory:
    """`small_run`, whose two tasks were also evaluated before training (neither solved) and after step 1 (both)."""
    run = small_run(path)
    store = RunStore(run)
    for step in (0, 1):
        found = [
            Evaluation(
                task_id=task,
                run=0,
                success=step == 1,
                passed_tests=2 * step,
                total_tests=2,
                turns=3,
                ended=EpisodeEnd.FINISHED,
            )
            for task in TASKS
        ]
        store.write("evaluations", step, "test", rows.evaluation_rows(step, "test", found))
        for task in TASKS:
            played = a_trajectory(step, task, 0)
            store.write("evaluation_trajectories", step, task, rows.trajectory_rows(step, played))
            store.write("evaluation_steps", step, task, rows.step_rows(step, played))
    return run


def judged_run(path: Path, steps: Sequence[int] = (0, 1, 2)) -> RunDirectory:
    """`small_run` without an evaluator: one rollout of `HELD_OUT` is scored by `TITLES` twice, the other has no score.

    The first scoring call says pass, fail and not applicable; the second one passes the failed criterion.
    """
    run = small_run(path, evaluated=False)
    store, task = RunStoreActor(run.path), Task(task_id=HELD_OUT, instruction="-")
    rubric: Judged[Any] = Judged(
        value=tuple(Criterion(title=title, description="-", evaluator_instruction="-") for title in TITLES)
    )
    for step in steps:
        stage1 = a_call("stage1", step, HELD_OUT, None)
        store.heldout_calls(step, f"{HELD_OUT}-stage1", Judged(value=(), calls=(stage1,)))
        for rollout in (0, 1):
            store.trajectory(step, a_trajectory(step, HELD_OUT, rollout), evaluated=True)
        scores = [_scored(step, name, scores) for name, scores in (("first", (1, -1, 0)), ("again", (1, 1, 0)))]
        store.heldout(step, "dev", task, 0, rubric, *scores)
        store.heldout(step, "dev", task, 1, Judged(value=None), Judged(value=()), None)
    return run


def _scored(step: int, name: str, scores: Sequence[int]) -> Judged[Any]:
    about = {"Polite": {"evidence": HOSTILE, "justification": "It says please."}}
    reply = json.dumps(
        [
            {"rubric_index": place, "rubric_title": title, "score": score, **about.get(title, {})}
            for place, (title, score) in enumerate(zip(TITLES, scores, strict=True))
        ]
    )
    call = replace(a_call("score", step, HELD_OUT, 0), call_id=f"{name}-{step}", reply=reply)
    return Judged(value=tuple(ScoredCriterion(verdict=Verdict(score)) for score in scores), calls=(call,))

"""A run's rollouts against a static rubric they were not trained on (Section "Analysis", "Static rubrics saturate").

Recorded rollouts are scored anew, by any judge, one call each. Beside the run's own verdicts that says how far criteria
of the task's own ask for more than those that fit every task: their fail and not-applicable rates.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Score
from draco_ray.lab.analysis.columns import columns
from draco_ray.lab.analysis.rubrics import TALLY_COLUMNS, Tally, rubric_kind
from draco_ray.records import Criterion, Trajectory
from draco_ray.runs.directory import RunDirectory, read_parquet
from draco_ray.runs.rows import step_trajectories

REPLAYS = "replay"
"""Folder of a run in which `draco replay` puts its tables, one folder a judge."""
TABLE = "rescored"
RESCORED = columns(
    "string: run judge",
    "int64: training_step",
    "string: task_id",
    "int64: rollout criterion",
    "string: title",
    "int64: verdict",
    "float64: dollars",
    "string: error",
)
RUBRIC_RATES = columns("string: run rubric scored_by", "int64: training_step rollouts", *TALLY_COLUMNS)
RUN = "the run"
"""Stands in ``scored_by`` for the verdicts that the run was trained on."""


async def rescore(
    run: RunDirectory, steps: Sequence[int] | None, rubric: Sequence[Criterion], judge: Judge, name: str
) -> pa.Table:
    """Score every recorded rollout of those steps against ``rubric``; one row a criterion (`RESCORED`).

    Args:
        run: whose rollouts.
        steps: training steps; None is all.
        rubric: the static one.
        judge: who scores; its configuration says how often an unusable reply is asked again.
        name: the judge's.

    Raises:
        JudgeUnavailable: the judge answers no call at all.
    """
    rows: list[dict[str, Any]] = []
    # A step at a time: the trajectories of a whole run may not fit in memory.
    for step in run.steps() if steps is None else steps:
        played = [each for group in step_trajectories(run, step).values() for each in group]
        scored = await asyncio.gather(*(_score(judge, each, rubric) for each in played))
        for each, (verdicts, dollars, error) in zip(played, scored, strict=True):
            rows += [
                {
                    "run": run.path.name,
                    "judge": name,
                    "training_step": step,
                    "task_id": each.task_id,
                    "rollout": each.rollout,
                    "criterion": index,
                    "title": criterion.title,
                    "verdict": verdicts[index] if verdicts else None,
                    "dollars": dollars / len(rubric),
                    "error": error,
                }
                for index, criterion in enumerate(rubric)
            ]
    return pa.Table.from_pylist(rows, schema=RESCORED)


def rescored(run: RunDirectory) -> pa.Table:
    """What `draco replay --static-rubric` has left in the run, of every judge."""
    files = sorted((run.path / REPLAYS).glob(f"*/{TABLE}.parquet"))
    return pa.concat_tables([RESCORED.empty_table(), *(read_parquet(file, RESCORED) for file in files)])


def rubric_rates(run: RunDirectory, again: pa.Table | None = None) -> pa.Table:
    """Pass, fail and N/A rates by rubric: the run's own, dynamic or static, and the static one it was scored with anew.

    Args:
        run: the run.
        again: `RESCORED` verdicts to take; None takes what is in the run.

    Returns: by rubric a row over all steps (null ``training_step``), then a row a step. The run's own verdicts are of
        all its steps, or of those that were scored anew.
    """
    again = rescored(run) if again is None else again
    tallies: dict[tuple[str, str], dict[int, Tally]] = defaultdict(lambda: defaultdict(Tally))
    rollouts: dict[tuple[str, str], dict[int, set[tuple[str, int]]]] = defaultdict(lambda: defaultdict(set))

    def count(key: tuple[str, str], row: dict[str, Any]) -> None:
        tallies[key][row["training_step"]].add(row["verdict"])
        rollouts[key][row["training_step"]].add((row["task_id"], row["rollout"]))

    own = (rubric_kind(run), RUN)
    chosen = set(again.column("training_step").to_pylist())
    columns = ["training_step", "task_id", "rollout", "verdict"]
    for row in run.table("verdicts", columns=columns).to_pylist():
        if not chosen or row["training_step"] in chosen:
            count(own, row)
    for row in again.select([*columns, "judge"]).to_pylist():
        if row["verdict"] is not None:
            count(("static", row["judge"]), row)
    rows = []
    for (rubric, scored_by), steps in tallies.items():
        about = {"run": run.path.name, "rubric": rubric, "scored_by": scored_by}
        played = rollouts[rubric, scored_by]
        total = sum(steps.values(), start=Tally())
        rows.append({**about, "rollouts": sum(map(len, played.values())), **total.columns()})
        for step, tally in sorted(steps.items()):
            rows.append({**about, "training_step": step, "rollouts": len(played[step]), **tally.columns()})
    return pa.Table.from_pylist(rows, schema=RUBRIC_RATES)


async def _score(
    judge: Judge, played: Trajectory, rubric: Sequence[Criterion]
) -> tuple[list[int] | None, float, str | None]:
    context = CallContext(group=played.group, task_id=played.task_id, rollout=played.rollout)
    judged = await judge.ask(Score(played, rubric), context)
    dollars = sum(call.dollars for call in judged.calls)
    return (None if judged.value is None else [int(s.verdict) for s in judged.value]), dollars, judged.error

"""Score a run's rollouts against a static rubric it was not trained on (Section "Analysis", "Static rubrics saturate").

Any judge can rescore the recorded rollouts, with one call each. Comparing fail and not-applicable rates with those of
the run's own verdicts shows how much more demanding task-specific criteria are than criteria that fit every task.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Score
from draco_ray.lab.analysis.rubrics import TALLY_COLUMNS, rates, rubric_kind
from draco_ray.lab.rows import collect_table, grouped, table_schema
from draco_ray.records import Criterion, Trajectory
from draco_ray.runs.directory import RunDirectory, read_parquet
from draco_ray.runs.rows import Row, step_trajectories

REPLAYS = "replay"
"""Folder in a run to which `draco replay` writes its tables, with one subfolder per judge."""
RESCORED_TABLE = "rescored"
RESCORED_SCHEMA = table_schema(
    "string: run judge",
    "int64: training_step",
    "string: task_id",
    "int64: rollout criterion",
    "string: title",
    "int64: verdict",
    "float64: dollars",
    "string: error",
)
SCORED_BY_RUN = "the run"
"""Value of ``scored_by`` for the verdicts that the run was trained on."""


async def rescore(
    run: RunDirectory, steps: Sequence[int] | None, rubric: Sequence[Criterion], judge: Judge, name: str
) -> pa.Table:
    """Score every recorded rollout of those steps against ``rubric``; one row per criterion (`RESCORED_SCHEMA`).

    Args:
        run: the run with the rollouts.
        steps: training steps; None is all.
        rubric: the static rubric.
        judge: the judge that scores; its configuration sets how often an unusable reply is retried.
        name: the judge's name.

    Raises:
        JudgeUnavailable: the judge answers no call at all.
    """
    rows: list[Row] = []
    # Load one step at a time: the trajectories of a whole run may not fit in memory.
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
    return pa.Table.from_pylist(rows, schema=RESCORED_SCHEMA)


def rescored(run: RunDirectory) -> pa.Table:
    """Verdicts of every judge that `draco replay --static-rubric` wrote into the run."""
    files = sorted((run.path / REPLAYS).glob(f"*/{RESCORED_TABLE}.parquet"))
    return pa.concat_tables([RESCORED_SCHEMA.empty_table(), *(read_parquet(file, RESCORED_SCHEMA) for file in files)])


@collect_table("string: run rubric scored_by", "int64: training_step rollouts", *TALLY_COLUMNS)
def rubric_rates(run: RunDirectory, again: pa.Table | None = None) -> Iterator[Row]:
    """Pass, fail and N/A rates by rubric: the run's own (dynamic or static), and the static one used for rescoring.

    Args:
        run: the run.
        again: `RESCORED_SCHEMA` verdicts to use; None reads those in the run.

    Returns: for each rubric a row over all steps (null ``training_step``), then a row per step. If some steps were
        rescored, the run's own verdicts are of these steps only.
    """
    again = rescored(run) if again is None else again
    chosen = set(again.column("training_step").to_pylist())
    columns = ["training_step", "task_id", "rollout", "verdict"]
    own = run.table("verdicts", columns=columns).to_pylist()
    own = [row for row in own if not chosen or row["training_step"] in chosen]
    found = {(rubric_kind(run), SCORED_BY_RUN): own} if own else {}
    answered = [row for row in again.select([*columns, "judge"]).to_pylist() if row["verdict"] is not None]
    found |= {("static", judge): rows for judge, rows in grouped(answered, "judge").items()}
    for (rubric, scored_by), rows in found.items():
        for step, mine in ((None, rows), *sorted(grouped(rows, "training_step").items())):
            yield {
                "rubric": rubric,
                "scored_by": scored_by,
                "training_step": step,
                "rollouts": len(grouped(mine, "training_step", "task_id", "rollout")),
                **rates(Counter(row["verdict"] for row in mine)),
            }


async def _score(
    judge: Judge, played: Trajectory, rubric: Sequence[Criterion]
) -> tuple[list[int] | None, float, str | None]:
    context = CallContext(group=played.group, task_id=played.task_id, rollout=played.rollout)
    judged = await judge.ask(Score(played, rubric), context)
    dollars = sum(call.dollars for call in judged.calls)
    return (None if judged.value is None else [int(s.verdict) for s in judged.value]), dollars, judged.error

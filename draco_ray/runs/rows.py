"""Records as table rows (the columns of `draco_ray.runs.schema`), and rollouts read back from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from draco_ray.records import (
    Attribution,
    Criterion,
    EpisodeEnd,
    Evaluation,
    GroupAdvantages,
    JudgeCall,
    JudgedRollout,
    Message,
    ScoredCriterion,
    Termination,
    Trajectory,
    Turn,
)
from draco_ray.runs.directory import RunDirectory, read_table
from draco_ray.runs.schema import TABLE_SCHEMAS


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedRubric:
    """The rubric that a task carries over from its earlier visits."""

    visits: int = 0
    """Number of earlier visits that had a rubric."""
    rubric: tuple[Criterion, ...] = ()
    """The rubric of the last visit that had one; empty if none had."""


def carried_rubrics(run: RunDirectory, before: int) -> dict[str, CarriedRubric]:
    """Task id -> the rubric that it carries over from the training steps before ``before``.

    Raises:
        DamagedRun: the table cannot be read.
    """
    found: dict[tuple[int, str], list[Criterion]] = {}
    rows = [row for row in run.table("criteria").to_pylist() if row["training_step"] < before]
    for row in sorted(rows, key=lambda row: (row["training_step"], row["criterion"])):
        texts = {name: row[name] for name in ("title", "description", "evaluator_instruction", "source")}
        found.setdefault((row["training_step"], row["task_id"]), []).append(Criterion(**texts))
    carried: dict[str, CarriedRubric] = {}
    for (_, task_id), rubric in found.items():
        visits = carried.get(task_id, CarriedRubric()).visits + 1
        carried[task_id] = CarriedRubric(visits=visits, rubric=tuple(rubric))
    return carried


Row = dict[str, Any]


def _row(table: str, training_step: int, record: object, /, **given: Any) -> Row:
    """A row of ``table``: the given columns, and the record's attributes for all others.

    NumPy arrays, tuples and enumerations need no conversion for Arrow.
    """
    known = {"training_step": training_step, **given}
    return {name: known[name] if name in known else getattr(record, name) for name in TABLE_SCHEMAS[table].names}


def trajectory_rows(step: int, trajectory: Trajectory) -> list[Row]:
    """The trajectory's one row of the table ``trajectories``."""
    return [
        _row(
            "trajectories",
            step,
            trajectory,
            prompt=[{"role": message.role, "content": message.content} for message in trajectory.prompt],
            # Arrow copies arrays of the column's type without converting each number.
            token_ids=trajectory.token_ids_T.astype(np.int32, copy=False),
            sampled=trajectory.sampled_T.astype(np.bool_, copy=False),
            logprob=trajectory.logprob_T.astype(np.float32, copy=False),
            token_step=trajectory.step_T.astype(np.int32, copy=False),
            turns=len(trajectory.turns),
            steps=len(trajectory.steps),
        )
    ]


def step_rows(step: int, trajectory: Trajectory) -> list[Row]:
    """One row of ``steps`` per turn; ``step`` is null for a gap, ``action`` for a gap or a message."""
    rows: list[Row] = []
    number = 0
    for index, turn in enumerate(trajectory.turns, start=1):
        number += turn.is_step
        which = {"task_id": trajectory.task_id, "rollout": trajectory.rollout, "turn": index}
        rows.append(_row("steps", step, turn, **which, step=number if turn.is_step else None))
    return rows


def criterion_rows(
    step: int, task_id: str, rubric: Sequence[Criterion], advantages: GroupAdvantages | None
) -> list[Row]:
    """One row of ``criteria`` per criterion of the group's rubric; ``survived`` is null before dropout."""
    survived = [None] * len(rubric) if advantages is None else map(bool, advantages.surviving_K)
    return [
        _row("criteria", step, criterion, task_id=task_id, criterion=index, survived=each)
        for index, (criterion, each) in enumerate(zip(rubric, survived, strict=True))
    ]


def proposal_rows(step: int, task_id: str, proposals: Iterable[Criterion]) -> list[Row]:
    """One row of ``proposals`` per candidate that went into the union."""
    return [_row("proposals", step, criterion, task_id=task_id) for criterion in proposals]


def verdict_rows(step: int, task_id: str, rollout: int, scores: Sequence[ScoredCriterion]) -> list[Row]:
    """One row of ``verdicts`` per criterion of a scored rollout."""
    return [
        _row("verdicts", step, score, task_id=task_id, rollout=rollout, criterion=index)
        for index, score in enumerate(scores)
    ]


def citation_rows(step: int, task_id: str, rollout: int, attributions: Sequence[Attribution]) -> list[Row]:
    """One row of ``citations`` per cited step; a criterion that cites none has one row with a null step."""
    return [
        _row("citations", step, attribution, task_id=task_id, rollout=rollout, step=cited)
        for attribution in attributions
        for cited in (attribution.steps or (None,))
    ]


def judged_rows(phase: str, step: int, task_id: str, rollout: int | None, value: Any) -> list[tuple[str, list[Row]]]:
    """The tables for the value of a judge phase, and their rows; empty if only the phase's calls are recorded."""
    if phase in ("stage1", "stage2", "proposals"):
        return [("proposals", proposal_rows(step, task_id, value))]
    made = []
    if rollout is not None and phase in ("score", "verdicts"):
        made.append(("verdicts", verdict_rows(step, task_id, rollout, value)))
    if rollout is not None and phase in ("credit", "verdicts"):
        attributions = value if phase == "credit" else Attribution.of_scores(value)
        made.append(("citations", citation_rows(step, task_id, rollout, attributions)))
    return made


def advantage_rows(
    step: int, task_id: str, advantages: GroupAdvantages, step_tokens: dict[int, Sequence[int]]
) -> list[Row]:
    """One row of ``advantages`` per rollout that has statistics; ``step_tokens`` maps rollout to n_1..n_M."""
    return [
        _row(
            "advantages",
            step,
            share,
            task_id=task_id,
            quality=share.quality_M,
            cited=share.cited_M,
            step_advantage=share.step_advantage_M,
            step_tokens=step_tokens[share.rollout],
        )
        for share in advantages.rollouts
    ]


def recover_paid_call(call: JudgeCall, booked: set[str], requests_name: str = "") -> JudgeCall:
    """The call to record: the call that paid for a cached reply, if no table has that call yet; otherwise ``call``.

    Such a call is missing if a process was killed after it had stored the reply, but before it recorded the call.

    Args:
        booked: ids of recorded calls; the result's id is added.
        requests_name: prefix of the ids of calls that this run has paid for; other calls are not recovered.
    """
    paid = call.paid
    own = call.requests == 0 and paid is not None and paid.call_id.startswith(requests_name)
    if own and paid is not None and paid.call_id not in booked:
        call = replace(call, **{field.name: getattr(paid, field.name) for field in fields(paid)})
    booked.add(call.call_id)
    return call


def call_rows(step: int, calls: Iterable[JudgeCall]) -> list[Row]:
    """One row of ``judge_calls`` per call."""
    return [_row("judge_calls", step, call) for call in calls]


def evaluation_rows(step: int, split: str, evaluations: Iterable[Evaluation]) -> list[Row]:
    """One row of ``evaluations`` per evaluated rollout; ``training_step`` 0 is the untrained policy."""
    return [_row("evaluations", step, evaluation, split=split) for evaluation in evaluations]


def heldout_row(step: int, split: str, rollout: JudgedRollout, criteria: Iterable[Criterion]) -> Row:
    """The row of ``heldout_verdicts`` of a held-out rollout; ``training_step`` 0 is the untrained policy."""
    return _row("heldout_verdicts", step, rollout, split=split, criteria=[criterion.title for criterion in criteria])


def outcome_rows(step: int, rollout: int, verdict: Evaluation) -> list[Row]:
    """The one row of ``outcomes`` of a training rollout whose reward is the environment's verdict."""
    return [_row("outcomes", step, verdict, rollout=rollout)]


def recorded_rollouts(run: RunDirectory, step: int, policy_version: int) -> list[tuple[str, int]]:
    """Task and rollout of every recorded rollout of ``step`` that this version of the policy sampled, sorted.

    Rollouts with missing turns are left out: their writer may have been killed between two files.
    """
    rows = run.table("trajectories", step, ["task_id", "rollout", "policy_version", "turns"]).to_pylist()
    turns = run.table("steps", step, ["task_id", "rollout"]).to_pylist()
    there = Counter((turn["task_id"], turn["rollout"]) for turn in turns)
    return sorted(
        (row["task_id"], row["rollout"])
        for row in rows
        if row["policy_version"] == policy_version and there[row["task_id"], row["rollout"]] == row["turns"]
    )


def read_trajectory(run: RunDirectory, step: int, task_id: str, rollout: int) -> Trajectory:
    """One recorded rollout of an unfinished step.

    Raises:
        FileNotFoundError: it was not recorded.
    """
    key = f"{task_id}-{rollout}"
    if not (found := part_rows(run, "trajectories", step, key)):
        raise FileNotFoundError(run.part("trajectories", step, key))
    return _trajectory(found[0], part_rows(run, "steps", step, key))


def step_trajectories(run: RunDirectory, step: int) -> dict[str, list[Trajectory]]:
    """Task id -> its recorded rollouts of a training step, finished or not, by their index."""
    return trajectories_from(run.table("trajectories", step).to_pylist(), run.table("steps", step).to_pylist())


def trajectories_from(rows: Sequence[Row], steps: Sequence[Row]) -> dict[str, list[Trajectory]]:
    """Task id -> its rollouts by their index, from rows of ``trajectories`` and ``steps`` or the evaluation tables."""
    turns: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in steps:
        turns[row["task_id"], row["rollout"]].append(row)
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["rollout"])):
        found[row["task_id"]].append(_trajectory(row, turns[row["task_id"], row["rollout"]]))
    return dict(found)


def scenario_of(row: Row) -> str:
    """The scenario of a task; a task without one is its own scenario."""
    scenario: str = row["scenario"] or row["task_id"]
    return scenario


def columns_of(kind: type, row: Row) -> dict[str, Any]:
    """The columns of a row whose names are fields of the dataclass ``kind``."""
    return {field.name: row[field.name] for field in fields(kind) if field.name in row}


def _trajectory(row: Row, turns: Sequence[Row]) -> Trajectory:
    values = {
        "group": f"step{row['training_step']}/{row['task_id']}",
        "prompt": tuple(Message(**message) for message in row["prompt"]),
        "turns": tuple(_turn(turn) for turn in sorted(turns, key=lambda turn: int(turn["turn"]))),
        "token_ids_T": np.array(row["token_ids"], dtype=np.int32),
        "sampled_T": np.array(row["sampled"], dtype=np.bool_),
        "logprob_T": np.array(row["logprob"], dtype=np.float32),
        "step_T": np.array(row["token_step"], dtype=np.int32),
        "ended": EpisodeEnd(row["ended"]),
        "termination": None if row["termination"] is None else Termination(row["termination"]),
        "branches": tuple(row["branches"]),
        "scenario": scenario_of(row),
    }
    return Trajectory(**columns_of(Trajectory, row) | values)


def _turn(row: Row) -> Turn:
    # Derive ``message`` from the recorded step, not from the text: earlier versions recorded some messages as gaps.
    return Turn(**columns_of(Turn, row) | {"message": row["step"] is not None and row["action"] is None})


def part_rows(run: RunDirectory, table: str, step: int, key: str) -> list[Row]:
    """The rows written under a key of an unfinished step; empty if there are none."""
    path = run.part(table, step, key)
    rows: list[Row] = read_table(path, table).to_pylist() if path.exists() else []
    return rows

"""Records -> table rows (the columns of `draco_ray.runs.schema`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from draco_ray.records import (
    Attribution,
    Criterion,
    Evaluation,
    GroupAdvantages,
    JudgeCall,
    JudgedRollout,
    ScoredCriterion,
    Trajectory,
)
from draco_ray.runs.schema import TABLES

Row = dict[str, Any]


def _row(table: str, training_step: int, record: object, /, **given: Any) -> Row:
    """A row of ``table``: the columns that are ``given``, and of the others what the record has under their names.

    NumPy arrays, tuples and enumerations stay as they are: Arrow takes them.
    """
    known = {"training_step": training_step, **given}
    return {name: known[name] if name in known else getattr(record, name) for name in TABLES[table].names}


def trajectory_rows(step: int, trajectory: Trajectory) -> list[Row]:
    """The one row of ``trajectories``."""
    return [
        _row(
            "trajectories",
            step,
            trajectory,
            prompt=[{"role": message.role, "content": message.content} for message in trajectory.prompt],
            # Of the column's type Arrow takes an array as it is; of another it looks at each number.
            token_ids=trajectory.token_ids_T.astype(np.int32, copy=False),
            sampled=trajectory.sampled_T.astype(np.bool_, copy=False),
            logprob=trajectory.logprob_T.astype(np.float32, copy=False),
            token_step=trajectory.step_T.astype(np.int32, copy=False),
            turns=len(trajectory.turns),
            steps=len(trajectory.steps),
        )
    ]


def step_rows(step: int, trajectory: Trajectory) -> list[Row]:
    """One row of ``steps`` per turn; ``step`` is null for a turn without an action."""
    rows: list[Row] = []
    number = 0
    for index, turn in enumerate(trajectory.turns, start=1):
        number += turn.action is not None
        which = {"task_id": trajectory.task_id, "rollout": trajectory.rollout, "turn": index}
        rows.append(_row("steps", step, turn, **which, step=None if turn.action is None else number))
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


def judged_rows(phase: str, step: int, task_id: str, rollout: int | None, value: Any) -> tuple[str, list[Row]] | None:
    """The table that takes the value of a judge phase, and its rows; None where only the phase's calls are recorded."""
    if phase in ("stage1", "stage2"):
        return "proposals", proposal_rows(step, task_id, value)
    if rollout is None or phase not in ("score", "credit"):
        return None
    if phase == "score":
        return "verdicts", verdict_rows(step, task_id, rollout, value)
    return "citations", citation_rows(step, task_id, rollout, value)


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


def as_paid(call: JudgeCall, booked: set[str], requests_name: str = "") -> JudgeCall:
    """``call``; a replay as the call that paid for its reply, where a kill kept that one from the archive.

    Args:
        booked: calls in the archive; it is added to them.
        requests_name: begins the numbers of the requests that this run has paid for.
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
    return {
        "training_step": step,
        "split": split,
        "task_id": rollout.task_id,
        "run": rollout.run,
        "scenario": rollout.scenario,
        "criteria": [criterion.title for criterion in criteria],
        "verdicts": list(rollout.verdicts),
        "again": list(rollout.again),
        "error": rollout.error,
    }


def outcome_rows(step: int, rollout: int, verdict: Evaluation) -> list[Row]:
    """The one row of ``outcomes`` of a training rollout whose reward is the environment's verdict."""
    return [_row("outcomes", step, verdict, rollout=rollout)]

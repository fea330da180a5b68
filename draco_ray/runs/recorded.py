"""Reading rollouts back as they were: a resumed run need not play them again, an analysis can have them judged anew."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from draco_ray.records import EpisodeEnd, Message, Termination, Trajectory, Turn
from draco_ray.runs.directory import RunDirectory, read_table
from draco_ray.runs.rows import Row


def recorded_rollouts(run: RunDirectory, step: int, policy_version: int) -> list[tuple[str, int]]:
    """Task and rollout of every recorded rollout of ``step`` that this version of the policy sampled, in order.

    One whose turns are not all there is left out: its writer may have been killed between two files.
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
    """One recorded rollout of a step under way.

    Raises:
        FileNotFoundError: it was not recorded.
    """
    (row,) = _rows(run, "trajectories", step, f"{task_id}-{rollout}")
    try:
        steps = _rows(run, "steps", step, f"{task_id}-{rollout}")
    except FileNotFoundError:
        steps = []
    return _trajectory(row, steps)


def step_trajectories(run: RunDirectory, step: int) -> dict[str, list[Trajectory]]:
    """Task id -> its recorded rollouts of a training step, finished or under way, by their index."""
    return trajectories_from(run.table("trajectories", step).to_pylist(), run.table("steps", step).to_pylist())


def trajectories_from(rows: Sequence[Row], steps: Sequence[Row]) -> dict[str, list[Trajectory]]:
    """Task id -> its rollouts by their index, from rows of ``trajectories`` and ``steps`` or of the evaluated ones."""
    turns: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in steps:
        turns[row["task_id"], row["rollout"]].append(row)
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["rollout"])):
        found[row["task_id"]].append(_trajectory(row, turns[row["task_id"], row["rollout"]]))
    return dict(found)


def scenario_of(row: Row) -> str:
    """The scenario of a rollout's or an evaluation's task; a task of none is one of its own."""
    scenario: str = row["scenario"] or row["task_id"]
    return scenario


def training_scenarios(run: RunDirectory) -> dict[str, str]:
    """Task id -> scenario, of every task that a rollout was recorded of."""
    return {
        row["task_id"]: scenario_of(row) for row in run.table("trajectories", None, ["task_id", "scenario"]).to_pylist()
    }


def _trajectory(row: Row, turns: Sequence[Row]) -> Trajectory:
    return Trajectory(
        task_id=row["task_id"],
        group=f"step{row['training_step']}/{row['task_id']}",
        rollout=row["rollout"],
        attempt=row["attempt"],
        policy_version=row["policy_version"],
        prompt=tuple(Message(**message) for message in row["prompt"]),
        turns=tuple(_turn(turn) for turn in sorted(turns, key=lambda turn: int(turn["turn"]))),
        token_ids_T=np.array(row["token_ids"], dtype=np.int32),
        sampled_T=np.array(row["sampled"], dtype=np.bool_),
        logprob_T=np.array(row["logprob"], dtype=np.float32),
        step_T=np.array(row["token_step"], dtype=np.int32),
        prompt_length=row["prompt_length"],
        ended=EpisodeEnd(row["ended"]),
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        error=row["error"],
        engine=row["engine"],
        termination=None if row["termination"] is None else Termination(row["termination"]),
        branches=tuple(row["branches"]),
        scenario=scenario_of(row),
    )


def _turn(row: Row) -> Turn:
    return Turn(
        text=row["text"],
        action=row["action"],
        observation=row["observation"],
        first_token=row["first_token"],
        last_token=row["last_token"],
        seconds_generating=row["seconds_generating"],
        seconds_executing=row["seconds_executing"],
        role=row["role"],
        branch=row["branch"],
        policy_version=row["policy_version"],
    )


def _rows(run: RunDirectory, table: str, step: int, key: str) -> Sequence[Row]:
    if not (path := run.part(table, step, key)).exists():
        raise FileNotFoundError(path)
    rows: Sequence[Row] = read_table(path, table).to_pylist()
    return rows

"""Groups of a finished run as the algorithm saw them: verdicts, citations and token counts, read from the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draco_ray.algorithm.rules import CreditSkipReason
from draco_ray.lab.rows import grouped
from draco_ray.records import Attribution, BoolArray, CreditFallback, FloatArray, IntArray, Verdict
from draco_ray.runs.directory import RunDirectory, damaged
from draco_ray.runs.rows import Row

TABLES = ("criteria", "verdicts", "citations", "advantages")
"""Tables of a run from which its groups are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """One judged group: the inputs of its advantages and the results. One row per scored rollout, ascending."""

    training_step: int
    task_id: str
    rollouts: tuple[int, ...]
    titles: tuple[str, ...]
    """Titles of the K criteria."""
    survived_K: BoolArray
    """Criteria that dropout kept."""
    verdict_GK: IntArray
    """Scoring verdicts, +1, -1 or 0."""
    attributions: tuple[tuple[Attribution, ...] | CreditSkipReason | None, ...]
    """Citations of each rollout's credit call: None if the call failed, `CreditSkipReason` if this rollout needed no
    call, empty if the group had no calls or nothing was cited."""
    tokens_GM: tuple[IntArray, ...]
    """n_j, the number of tokens of each step."""
    reward_G: FloatArray
    advantage_G: FloatArray
    step_advantage_GM: tuple[FloatArray, ...]
    """Step advantages a_j. Rewards R_i, advantages A_i and a_j are as the run computed them."""

    @property
    def name(self) -> str:
        """The group's name in a run: ``step<training step>/<task>``."""
        return f"step{self.training_step}/{self.task_id}"


def recorded_groups(run: RunDirectory, steps: Sequence[int] | None = None) -> Iterator[RecordedGroup]:
    """Every group that has both a rubric with verdicts and advantages, in the order of steps and tasks.

    Args:
        run: the run that recorded them.
        steps: training steps; None is all.

    Raises:
        DamagedRun: a table cannot be read, or two tables contradict each other.
    """
    for step in run.steps() if steps is None else steps:
        tables = {name: grouped(run.table(name, step).to_pylist(), "task_id") for name in TABLES}
        for task_id in sorted(tables["advantages"]):
            rows = {name: table[task_id] for name, table in tables.items()}
            if rows["criteria"] and rows["verdicts"]:
                try:
                    _check(rows)
                except ValueError as error:
                    raise damaged(run.tables, f"rows of step {step}, task {task_id}: {error}") from None
                yield _group(step, task_id, rows)


def _check(rows: Mapping[str, Sequence[Row]]) -> None:
    """Reject rows about a criterion or a step that does not exist. Raises: ValueError."""
    criteria, members, citations = len(rows["criteria"]), rows["advantages"], rows["citations"]
    for row in (*rows["verdicts"], *citations):
        if not 0 <= row["criterion"] < criteria:
            raise ValueError(f"criterion {row['criterion']} does not exist; the rubric has {criteria}")
    steps = {member["rollout"]: len(member["step_tokens"]) for member in members}
    for row in citations:
        if row["step"] is not None and not 1 <= row["step"] <= steps.get(row["rollout"], row["step"]):
            raise ValueError(
                f"rollout {row['rollout']} has {steps.get(row['rollout'], 0)} steps, but step {row['step']} is cited"
            )
    for member in members:
        if len(member["step_advantage"]) != len(member["step_tokens"]):
            raise ValueError(f"rollout {member['rollout']}: expected one step advantage per step, found another number")


def _group(step: int, task_id: str, rows: Mapping[str, Sequence[Row]]) -> RecordedGroup:
    members = sorted(rows["advantages"], key=lambda member: int(member["rollout"]))
    criteria = sorted(rows["criteria"], key=lambda criterion: int(criterion["criterion"]))
    citations = grouped(rows["citations"], "rollout")
    row = {member["rollout"]: index for index, member in enumerate(members)}
    verdict_GK = np.zeros((len(members), len(criteria)), dtype=np.int8)
    for verdict in rows["verdicts"]:
        if verdict["rollout"] in row:
            verdict_GK[row[verdict["rollout"]], verdict["criterion"]] = verdict["verdict"]
    return RecordedGroup(
        training_step=step,
        task_id=task_id,
        rollouts=tuple(row),
        titles=tuple(criterion["title"] for criterion in criteria),
        survived_K=np.array([criterion["survived"] is True for criterion in criteria]),
        verdict_GK=verdict_GK,
        attributions=tuple(_attributions(member, citations[member["rollout"]]) for member in members),
        tokens_GM=tuple(np.array(member["step_tokens"], dtype=np.int64) for member in members),
        reward_G=np.array([member["reward"] for member in members], dtype=float),
        advantage_G=np.array([member["advantage"] for member in members], dtype=float),
        step_advantage_GM=tuple(np.array(member["step_advantage"], dtype=float) for member in members),
    )


def _attributions(member: Row, citations: Sequence[Row]) -> tuple[Attribution, ...] | CreditSkipReason | None:
    if member["fallback"] == CreditFallback.CREDIT_CALL_FAILED:
        return None
    if not citations:
        # With algorithm.skip_inert_credit_calls, rollouts with unanimous verdicts get credit without a call.
        return CreditSkipReason.UNANIMOUS if True in (member["cited"] or ()) else ()
    return tuple(
        Attribution(
            criterion=criterion,
            verdict=Verdict(verdict),
            steps=tuple(sorted(row["step"] for row in cited if row["step"] is not None)),
        )
        for (criterion, verdict), cited in sorted(grouped(citations, "criterion", "verdict").items())
    )

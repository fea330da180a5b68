"""Judge agreement: send archived scoring and credit prompts verbatim to another judge (appendix "Self-judge").

Each prompt is sent once, without retries. The reference is what the run used: the verdicts and citations in its tables.
If a reply is unusable, all its criteria count as unanswered, which is a disagreement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from draco_ray.errors import ConfigError, ReplyError
from draco_ray.judging import render
from draco_ray.judging.completion import Completer, Request
from draco_ray.judging.phases import Credit, Score, credit_schema, parse_attributions, parse_scores, score_schema
from draco_ray.judging.reply import JsonSchema, check_finish
from draco_ray.lab.analysis.agreement import (
    COUNTS,
    RATES,
    UNANSWERED_RATING,
    agreement,
    agreement_intervals,
    clustered_interval,
    contingency,
)
from draco_ray.lab.analysis.attribution.step_labels import Cited, citation_reliability
from draco_ray.lab.rows import collect_table, grouped, mean, table_schema
from draco_ray.records import Criterion, IntArray, Message
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row, columns_of

ValueT = TypeVar("ValueT")
_Answer = tuple[int | None, tuple[int, ...]]
"""A verdict, and the steps that it cites."""
_UNANSWERED: _Answer = (None, ())
VERDICT_PHASES = (Score.name, Credit.name)
"""Phases whose replies are verdicts on given criteria, so that two judges can be compared criterion by criterion."""

WITH_INTERVAL = tuple(name for name in RATES if name != "chance")
"""Measures of `agreement` that come with an interval."""

REPLAYED_SCHEMA = table_schema(
    "string: run judge",
    "int64: training_step",
    "string: task_id",
    "int64: rollout",
    "string: phase",
    "int64: criterion",
    "string: title",
    "int64: reference verdict rollout_steps",
    "int64[]: reference_steps steps",
    "float64: dollars",
    "string: error",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedCall:
    """An archived prompt with the verdicts and citations that the run took from its answer."""

    training_step: int
    phase: str
    prompt: str
    steps: int
    """M, the number of steps of the rollout."""
    rubric: tuple[Criterion, ...]
    """The prompt's criteria, in the order in which it lists them."""
    reference: tuple[Row, ...]
    """A row per criterion: the columns of `REPLAYED_SCHEMA` that are known before the replay."""


def archived_calls(run: RunDirectory, steps: Sequence[int] | None, phases: Sequence[str]) -> list[ArchivedCall]:
    """Every scoring and credit prompt of those steps for which the run got a usable answer.

    If a call was repeated (several votes, or retries), its first prompt is taken.
    """
    found = []
    for step in run.steps() if steps is None else steps:
        criteria = {
            (row["task_id"], row["criterion"]): Criterion(**columns_of(Criterion, row))
            for row in run.table("criteria", step).to_pylist()
        }
        played = run.table("trajectories", step, ["task_id", "rollout", "steps"]).to_pylist()
        steps_of = {(row["task_id"], row["rollout"]): row["steps"] for row in played}
        given = {
            phase: grouped(run.table(table, step).to_pylist(), "task_id", "rollout")
            for phase, table in ((Score.name, "verdicts"), (Credit.name, "citations"))
        }
        calls = [call for call in phase_calls(run, step, phases) if call["rollout"] is not None]
        for (phase, task_id, rollout), asked in sorted(grouped(calls, "phase", "task_id", "rollout").items()):
            answers = sorted(grouped(given[phase][task_id, rollout], "criterion").items())
            if not answers or any((task_id, index) not in criteria for index, _ in answers):
                continue
            made = steps_of.get((task_id, rollout), 0)
            rubric = tuple(criteria[task_id, index] for index, _ in answers)
            # `judge.strong` is asked only about disputed criteria: prefer a prompt that lists all criteria.
            whole = render.rubrics(rubric) if phase == Score.name else ""
            prompt = first_prompt([call for call in asked if whole in call["prompt"]] or asked)
            if not prompt:
                continue
            about = {"training_step": step, "task_id": task_id, "rollout": rollout, "phase": phase}
            reference: list[Row] = [
                {
                    **about,
                    "rollout_steps": made,
                    "criterion": index,
                    "title": criteria[task_id, index].title,
                    "reference": rows[0]["verdict"],
                    "reference_steps": sorted(row["step"] for row in rows if row.get("step") is not None),
                }
                for index, rows in answers
            ]
            found.append(
                ArchivedCall(
                    training_step=step,
                    phase=phase,
                    prompt=prompt,
                    steps=made,
                    rubric=rubric,
                    reference=tuple(reference),
                )
            )
    return found


def phase_calls(run: RunDirectory, step: int, phases: Sequence[str]) -> list[Row]:
    """The archived calls of these phases in a training step."""
    columns = ["task_id", "rollout", "phase", "prompt", "reply", "error", "started_at"]
    return [call for call in run.table("judge_calls", step, columns).to_pylist() if call["phase"] in phases]


def first_prompt(calls: Sequence[Row]) -> str:
    """The prompt of the answered call as it was first sent, without the text that re-asks append.

    This is the shortest prompt in ``calls`` with which the answered call's prompt begins. Empty if no call was
    answered: the run's result then needed no call, and ``calls`` are from an earlier attempt.
    """
    used = next((str(call["prompt"]) for call in calls if call["error"] is None), "")
    return min((prompt for call in calls if used.startswith(prompt := str(call["prompt"]))), key=len, default="")


async def replay(run: RunDirectory, complete: Completer, calls: Sequence[ArchivedCall], judge: str) -> pa.Table:
    """Send every archived prompt to ``complete``, concurrently; one row per criterion (`REPLAYED_SCHEMA`).

    Raises:
        JudgeUnavailable: the judge answers no call at all.
    """
    answered = await asyncio.gather(*(_ask(complete, call) for call in calls))
    rows = [
        {
            "run": run.path.name,
            "judge": judge,
            **row,
            "verdict": verdict,
            "steps": steps,
            "dollars": dollars / len(call.reference),
            "error": error,
        }
        for call, (answers, dollars, error) in zip(calls, answered, strict=True)
        for row, (verdict, steps) in zip(call.reference, answers or [_UNANSWERED] * len(call.reference), strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=REPLAYED_SCHEMA)


@collect_table(
    "string: run judge phase",
    "int64: training_step",
    f"int64: {' '.join(COUNTS)}",
    f"float64: {' '.join(RATES)} always_pass citation_overlap",
    *(f"float64: {name}_low {name}_high" for name in (*WITH_INTERVAL, "citation_overlap")),
)
def agreement_table(replayed: pa.Table) -> Iterator[Row]:
    """Agreement by phase: a row over all steps (null ``training_step``) with intervals, then a row per step.

    Intervals are 95 % intervals over groups. ``always_pass`` is the agreement of a judge that passes everything.
    ``citation_overlap`` is the mean Jaccard index of the cited steps, over criteria for which both judges cite steps.
    """
    for (name, judge, phase), found in sorted(grouped(replayed.to_pylist(), "run", "judge", "phase").items()):
        about = {"run": name, "judge": judge, "phase": phase}
        yield {**about, **_compare(found), **_intervals(found)}
        for step, mine in sorted(grouped(found, "training_step").items()):
            yield {**about, "training_step": step, **_compare(mine)}


def repeated_reliability(replayed: pa.Table) -> float | None:
    """Reliability of the run's citations (`citation_reliability`), with the other judge's citations taken as right.

    None if the run cites no step in any credit call that the other judge answered. If the run's own judge was asked
    again, the result is an upper limit: a mistake that this judge repeats counts as right.
    """
    return citation_reliability(
        [
            Cited(row["reference_steps"], row["steps"], row["rollout_steps"], (row["training_step"], row["task_id"]))
            for row in replayed.to_pylist()
            if row["reference_steps"] and row["error"] is None
        ]
    )


def check_steps(run: RunDirectory, steps: Sequence[int]) -> None:
    """Reject training steps that the run does not have. Raises: ConfigError."""
    if unknown := sorted(set(steps) - set(run.steps())):
        known = run.steps()
        raise ConfigError(f"{run.path}: no training step {unknown[0]}; expected {known[0]} to {known[-1]}")


async def ask_once(
    complete: Completer, prompt: str, read: Callable[[str], ValueT], schema: JsonSchema | None = None
) -> tuple[ValueT | None, float, str | None]:
    """Send a prompt once.

    Args:
        complete: the judge.
        prompt: the prompt, sent verbatim.
        read: reads the reply; may raise ReplyError.
        schema: JSON schema of the reply.

    Returns: what ``read`` returns, or None; dollars; and why the reply cannot be used, or None.
    """
    completion = await complete(Request(messages=(Message(role="user", content=prompt),), schema=schema))
    if completion.error is not None:
        return None, completion.dollars, completion.error
    try:
        check_finish(completion.text, completion.finish_reason)
        return read(completion.text), completion.dollars, None
    except ReplyError as error:
        return None, completion.dollars, str(error)


async def _ask(complete: Completer, call: ArchivedCall) -> tuple[list[_Answer] | None, float, str | None]:
    def scores(text: str) -> list[_Answer]:
        return [(int(score.verdict), ()) for score in parse_scores(text, call.rubric, last=True).value]

    def citations(text: str) -> list[_Answer]:
        found = parse_attributions(text, call.rubric, call.steps, last=True).value
        return [(int(attribution.verdict), attribution.steps) for attribution in found]

    count = len(call.rubric)
    if call.phase == Score.name:
        return await ask_once(complete, call.prompt, scores, score_schema(call.prompt, count))
    return await ask_once(complete, call.prompt, citations, credit_schema(call.prompt, count, call.steps))


def _counts(rows: Sequence[Row]) -> IntArray:
    """The `contingency` of the reference and the other judge."""
    other = [UNANSWERED_RATING if row["verdict"] is None else row["verdict"] for row in rows]
    return contingency(np.array([row["reference"] for row in rows]), np.array(other))


def _overlaps(rows: Sequence[Row]) -> list[float]:
    """Jaccard indices of the cited steps, one per criterion for which both judges cite steps."""
    both = [(set(row["steps"] or ()), set(row["reference_steps"] or ())) for row in rows]
    return [len(mine & theirs) / len(mine | theirs) for mine, theirs in both if mine and theirs]


def _compare(rows: Sequence[Row]) -> Row:
    found = agreement(_counts(rows))
    return found | {"always_pass": found["passes"] / len(rows), "citation_overlap": mean(_overlaps(rows))}


def _intervals(rows: Sequence[Row]) -> dict[str, float]:
    clusters = grouped(rows, "training_step", "task_id").values()
    bounds = agreement_intervals([_counts(mine) for mine in clusters])
    overlap = clustered_interval([[(index, 1) for index in _overlaps(mine)] for mine in clusters])
    bounds["citation_overlap"] = overlap.low, overlap.high
    return {
        f"{name}_{side}": limit
        for name in (*WITH_INTERVAL, "citation_overlap")
        for side, limit in zip(("low", "high"), bounds[name], strict=True)
    }

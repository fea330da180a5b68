"""Judge agreement on writing and merging criteria (appendix "Self-judge", "Generation" and "Union").

Two judges write different criteria for the same task, and neither list is the right one. So their overlap is measured.
Archived prompts that ask for criteria (phases stage1 and stage2) or for merged criteria (union) are sent verbatim to
another judge, once each. A third model pairs the other judge's criteria one to one with the run's:

recall      share of the run's criteria that have a partner
precision   share of the other judge's criteria that have a partner

Both shares are over the criteria of all calls. The **ceiling** is the overlap of the run's own judge with itself: for
two rollouts of one group (stage2), or for one task at two training steps (union, which is called once per task and
step). If the other judge's reply cannot be used, it counts as an empty list of criteria, which lowers recall.
Comparisons for which the third model gives no usable reply are left out and counted.

In the union phase, the third model also scores the group's rollouts against both sets of merged criteria. The
discriminative share of a set is the share of its criteria that at least one rollout fails; dropout keeps exactly these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from draco_ray.algorithm.equations import surviving_criteria
from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.completion import Completer
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Rubric, Score, Stage1, Stage2, Union, parse_criteria
from draco_ray.lab.analysis.agreement import clustered_interval, ratio
from draco_ray.lab.analysis.pairing import Pairing
from draco_ray.lab.analysis.replay import ask_once, first_prompt, phase_calls
from draco_ray.lab.rows import collect_table, group_by, grouped, table_schema
from draco_ray.records import Criterion, Trajectory
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row, columns_of, step_trajectories

CRITERIA_PHASES = (Stage1.name, Stage2.name, Union.name)
"""The phases whose replies are criteria."""
CEILING_JUDGE = "ceiling"
"""Value of the column ``judge`` in rows that compare the run's own judge with itself."""

_SIDES = ("reference_", "")
"""Prefixes of column names: ``reference_`` for the run's criteria, none for the other judge's criteria."""
_PAIRED_OF = {"recall": "reference_titles", "precision": "titles"}
"""Measure -> the column with the criteria in its denominator."""
_SHARED = ("discriminative", "differing")
_SHARES = "reference_discriminative discriminative reference_differing differing"
COMPARISONS_SCHEMA = table_schema(
    "string: run judge phase",
    "int64: training_step",
    "string: task_id",
    "int64: rollout",
    "string: against",
    "string[]: reference_titles titles",
    "int64[]: reference_paired paired",
    f"int64: scored {_SHARES}",
    "float64: dollars",
    "string: error pairing_error",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingCall:
    """An archived prompt that asks for criteria, with the criteria that the run took from its answer."""

    training_step: int
    task_id: str
    rollout: int | None
    """None for calls about a whole task or group."""
    phase: str
    prompt: str
    reference: Rubric
    existing: Rubric = ()
    """The stage-1 set that a stage-2 answer must not repeat."""


def writing_calls(
    run: RunDirectory, steps: Sequence[int] | None, phases: Sequence[str], config: JudgeConfig
) -> list[WritingCall]:
    """Every stage1, stage2 and union prompt of those steps for which the run got a usable answer.

    If a prompt was retried, its first form is taken. ``config`` is the run's own, so that the criteria are parsed from
    the archived reply as the run parsed them.
    """
    found = []
    for step in run.steps() if steps is None else steps:
        proposed = _stage1_sets(run, step) if Stage2.name in phases else {}
        calls = grouped(phase_calls(run, step, phases), "phase", "task_id", "rollout")
        for key in sorted(calls, key=lambda key: (key[0], key[1], -1 if key[2] is None else key[2])):
            phase, task_id, rollout = key
            # In the table, calls of earlier attempts follow those that were used.
            current = [call for call in calls[key] if call["started_at"] >= calls[key][0]["started_at"]]
            if not (answered := [call for call in current if call["error"] is None]):
                continue
            # A union that the judge refused was asked again with fewer rollouts; the last answer counts.
            used = answered[-1]
            existing = proposed.get(task_id, ()) if phase == Stage2.name else ()
            found.append(
                WritingCall(
                    training_step=step,
                    task_id=task_id,
                    rollout=rollout,
                    phase=phase,
                    prompt=first_prompt([used, *current]),
                    reference=_parsed(used["reply"], phase, existing, config),
                    existing=existing,
                )
            )
    return found


async def compare_writing(
    run: RunDirectory,
    calls: Sequence[WritingCall],
    judge: str,
    complete: Completer,
    config: JudgeConfig,
    third: Judge,
) -> pa.Table:
    """Send every archived prompt to another judge, and let a third model pair that judge's criteria with the run's.

    Args:
        run: the run with the archive.
        calls: archived prompts.
        judge: name of the other judge.
        complete: the other judge.
        config: configuration of the run's own judge, for its limits on the number of criteria.
        third: the model that pairs and scores (`draco_ray.lab.analysis.pairing.make_pairing_judge`).

    Returns: a row per comparison (`COMPARISONS_SCHEMA`), including comparisons of the run's own judge with itself.
    Raises:
        JudgeUnavailable: the other judge or the third model answers no call at all.
    """
    merging = {call.training_step for call in calls if call.phase == Union.name}
    played = {step: step_trajectories(run, step) for step in merging}

    async def asked(call: WritingCall) -> Row:
        other, dollars, error = await ask_once(
            complete, call.prompt, lambda text: _parsed(text, call.phase, call.existing, config)
        )
        row = await _paired(call, other or (), third)
        row |= {"judge": judge, "dollars": row["dollars"] + dollars, "error": error}
        if call.phase == Union.name and error is None:
            rollouts = played[call.training_step].get(call.task_id, [])
            marks = await asyncio.gather(*(_mark(third, rubric, rollouts) for rubric in (call.reference, other or ())))
            row["dollars"] += sum(mark["dollars"] for mark in marks)
            if all(mark["scored"] for mark in marks):
                row["scored"] = min(mark["scored"] for mark in marks)
                row |= {
                    f"{side}{name}": mark[name] for side, mark in zip(_SIDES, marks, strict=True) for name in _SHARED
                }
        return row

    async def ceiling(call: WritingCall, against: str, other: Rubric) -> Row:
        return await _paired(call, other, third) | {"judge": CEILING_JUDGE, "against": against}

    found = [*map(asked, calls), *(ceiling(*each) for each in _ceilings(run, calls, config))]
    rows = [{"run": run.path.name, **row} for row in await asyncio.gather(*found)]
    return pa.Table.from_pylist(rows, schema=COMPARISONS_SCHEMA)


@collect_table(
    "string: run judge phase",
    "int64: training_step comparisons",
    f"float64: unanswered unpaired recall precision reference_criteria criteria {_SHARES}",
    "float64: recall_low recall_high precision_low precision_high",
)
def overlap_table(comparisons: pa.Table) -> Iterator[Row]:
    """Overlap by judge and phase: a row over all steps (null ``training_step``) with intervals, then a row per step.

    - ``comparisons``: number of comparisons;
    - ``unanswered``: share of comparisons for which the other judge gave no usable reply;
    - ``unpaired``: share of comparisons for which the third model gave no usable pairing; they are left out of recall
      and precision;
    - ``criteria``: mean number of criteria per reply of the other judge, over replies that were usable and paired;
    - ``discriminative``: share of merged criteria that at least one rollout of the group fails;
    - ``differing``: share of merged criteria on which the verdicts on the group's rollouts differ.

    Columns with the prefix ``reference_`` are about the run's criteria. Intervals are 95 % intervals over groups.
    """
    for (name, judge, phase), found in sorted(grouped(comparisons.to_pylist(), "run", "judge", "phase").items()):
        about = {"run": name, "judge": judge, "phase": phase}
        yield {**about, **_summary(found), **_intervals(found)}
        for step, mine in sorted(grouped(found, "training_step").items()):
            yield {**about, "training_step": step, **_summary(mine)}


def _parsed(text: str, phase: str, existing: Rubric, config: JudgeConfig) -> Rubric:
    limit = {
        Stage1.name: config.max_stage1_criteria,
        Stage2.name: config.max_stage2_criteria,
        Union.name: config.max_union_criteria,
    }[phase]
    least = 1 if phase == Stage1.name else 0
    return parse_criteria(text, limit=limit, source="", taken=existing, least=least, last=True).value


def _ceilings(
    run: RunDirectory, calls: Sequence[WritingCall], config: JudgeConfig
) -> Iterator[tuple[WritingCall, str, Rubric]]:
    """Pairs of calls on which the run's own judge is compared with itself.

    In stage2, the calls for a group's first two rollouts are a pair; in union, a task's call and the call at the next
    training step with this task.

    Returns: for each pair, the first call, the second call's rollout or step in words, and the second call's criteria.
    """
    written = [call for call in calls if call.phase == Stage2.name]
    for first, *others in group_by(written, lambda call: (call.training_step, call.task_id)).values():
        for second in others[:1]:
            yield first, f"rollout {second.rollout}", second.reference
    if unions := [call for call in calls if call.phase == Union.name]:
        merges = group_by(writing_calls(run, None, [Union.name], config), lambda call: call.task_id)
        for call in unions:
            # `merges` is in the order of the training steps.
            later = [each for each in merges[call.task_id] if each.training_step > call.training_step]
            for following in later[:1]:
                yield call, f"step {following.training_step}", following.reference


async def _paired(call: WritingCall, other: Rubric, third: Judge) -> Row:
    """Let the third model pair a call's criteria with ``other``. Returns: a part of the row in `COMPARISONS_SCHEMA`."""
    pairing = await third.ask(Pairing(call.reference, other), CallContext(group="", task_id=call.task_id))
    pairs = pairing.value or ()
    return {
        "phase": call.phase,
        "training_step": call.training_step,
        "task_id": call.task_id,
        "rollout": call.rollout,
        "reference_titles": [criterion.title for criterion in call.reference],
        "titles": [criterion.title for criterion in other],
        "reference_paired": [index for index, _ in pairs],
        "paired": [index for _, index in pairs],
        "dollars": sum(asked.dollars for asked in pairing.calls),
        "pairing_error": pairing.error,
    }


async def _mark(scorer: Judge, rubric: Sequence[Criterion], played: Sequence[Trajectory]) -> Row:
    """Count criteria that some rollout fails, criteria whose verdicts differ, and scored rollouts."""
    judged = await asyncio.gather(
        *(
            scorer.ask(Score(each, rubric), CallContext(group=each.group, task_id=each.task_id, rollout=each.rollout))
            for each in played
        )
    )
    dollars = sum(call.dollars for each in judged for call in each.calls)
    scores = [each.value for each in judged if each.value is not None]
    verdict_GK = np.array([[int(score.verdict) for score in row] for row in scores]).reshape(len(scores), len(rubric))
    return {
        "discriminative": int(surviving_criteria(verdict_GK).sum()) if len(scores) else 0,
        "differing": int((verdict_GK != verdict_GK[:1]).any(axis=0).sum()),
        "scored": len(scores),
        "dollars": dollars,
    }


def _summary(rows: Sequence[Row]) -> Row:
    paired = [row for row in rows if row["pairing_error"] is None]
    answered = [row for row in paired if row["error"] is None]
    marked = [row for row in rows if row["scored"] is not None]
    shares = {
        f"{side}{name}": ratio(
            sum(row[f"{side}{name}"] for row in marked), sum(len(row[f"{side}titles"]) for row in marked)
        )
        for side in _SIDES
        for name in _SHARED
    }
    return {
        "comparisons": len(rows),
        "unanswered": ratio(sum(row["error"] is not None for row in rows), len(rows)),
        "unpaired": ratio(len(rows) - len(paired), len(rows)),
        **{
            name: ratio(sum(len(row["paired"]) for row in paired), sum(len(row[titles]) for row in paired))
            for name, titles in _PAIRED_OF.items()
        },
        "reference_criteria": ratio(sum(len(row["reference_titles"]) for row in answered), len(answered)),
        "criteria": ratio(sum(len(row["titles"]) for row in answered), len(answered)),
        **shares,
    }


def _intervals(rows: Sequence[Row]) -> dict[str, float]:
    clusters = grouped((row for row in rows if row["pairing_error"] is None), "training_step", "task_id").values()
    found = {
        name: clustered_interval([[(len(row["paired"]), len(row[titles])) for row in mine] for mine in clusters])
        for name, titles in _PAIRED_OF.items()
    }
    return {f"{name}_{side}": getattr(each, side) for name, each in found.items() for side in ("low", "high")}


def _stage1_sets(run: RunDirectory, step: int) -> dict[str, Rubric]:
    proposed = [row for row in run.table("proposals", step).to_pylist() if row["source"] == Stage1.name]
    return {
        task_id: tuple(Criterion(**columns_of(Criterion, row)) for row in rows)
        for task_id, rows in grouped(proposed, "task_id").items()
    }

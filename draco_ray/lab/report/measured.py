"""The page's groups of evaluated rollouts or, without an evaluator, of held-out rollouts that the judge scored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from draco_ray.errors import ReplyError
from draco_ray.judging.phases import Score, parse_scores
from draco_ray.lab.analysis.evaluations import evaluation_directories, judged_directories
from draco_ray.lab.analysis.replay import first_prompt
from draco_ray.lab.evaluation.policies import parse_checkpoint_step
from draco_ray.lab.report.groups import GROUP_TABLES, PackedGroup, group_content, pack
from draco_ray.lab.rows import grouped
from draco_ray.records import Criterion, Evaluation, Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import passed_share, read_evaluations
from draco_ray.runs.rows import Row

_PLAYED = {"trajectories": "evaluation_trajectories", "steps": "evaluation_steps"}
"""Table of training rollouts -> the same table of evaluated rollouts."""

Outcomes = Mapping[tuple[str, int], Row]
"""(task, rollout) -> outcome on the page; ``success`` is true, false, or the share of verdicts that pass."""


def packed_evaluations(run: RunDirectory) -> Iterator[PackedGroup]:
    """Evaluated rollouts of a run, one group per measurement and task: from training and from `draco evaluate --run`.

    Rollouts whose trajectories were not kept are left out.
    """
    for (step, split), found in read_evaluations(run).items():
        rows = {name: grouped(run.table(table, step).to_pylist(), "task_id") for name, table in _PLAYED.items()}
        yield from _groups(_moment(step, split), step, split, _evaluated(found), rows)
    for directory in evaluation_directories(run):
        for name in directory.plan.measurements:
            played = [result.evaluation for result in directory.results(name)]
            tables = {table: directory.trajectories(name, kept).to_pylist() for table, kept in _PLAYED.items()}
            rows = {table: grouped(found, "task_id") for table, found in tables.items()}
            key = f"{directory.path.name} {name}"
            yield from _groups(key, parse_checkpoint_step(name), directory.plan.split, _evaluated(played), rows)


def packed_judged(run: RunDirectory) -> Iterator[PackedGroup]:
    """Held-out rollouts that the judge scored, one group per measurement and task, with verdicts and replies."""
    for place, judged in (("", run), *((f"{inside.path.name} ", inside) for inside in judged_directories(run))):
        measurements = grouped(judged.table("heldout_verdicts").to_pylist(), "training_step", "split")
        for (step, split), found in sorted(measurements.items()):
            tables = {**_PLAYED, "judge_calls": "heldout_calls"}
            rows = {name: grouped(judged.table(table, step).to_pylist(), "task_id") for name, table in tables.items()}
            rows |= {"criteria": grouped([], "task_id"), "verdicts": grouped([], "task_id")}
            for task, of_task in grouped(found, "task_id").items():
                calls = rows["judge_calls"].get(task, [])
                rows["criteria"][task], rows["verdicts"][task] = _verdicts(of_task, calls)
            yield from _groups(place + _moment(step, split), step, split, _judged(found), rows)


def _moment(step: int, split: str) -> str:
    return f"{split} after step {step}" if step else f"{split} before training"


def _evaluated(found: Sequence[Evaluation]) -> Outcomes:
    return {
        (each.task_id, each.run): {
            "success": each.success,
            "tests": [each.passed_tests, each.total_tests],
            "failures": list(each.failures),
        }
        for each in found
    }


def _judged(found: Sequence[Row]) -> Outcomes:
    return {
        (row["task_id"], row["run"]): {"success": passed_share(row["verdicts"] or ()), "judged": row["error"] or True}
        for row in found
    }


def _verdicts(found: Sequence[Row], calls: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of ``criteria`` and ``verdicts`` of one task, from its held-out rollouts.

    A task has one rubric per measurement; it may have two if the run was killed during the measurement.
    """
    titles: list[str] = []
    verdicts = []
    for row in sorted(found, key=lambda row: row["run"]):
        mine: list[str] = row["criteria"] or []
        if titles[: len(mine)] != mine:
            places = range(len(titles), len(titles) + len(mine))
            titles += mine
        else:
            places = range(len(mine))
        remarks = _remarks(mine, row["verdicts"] or (), [call for call in calls if call["rollout"] == row["run"]])
        again: Sequence[int | None] = row["again"] or [None] * len(mine)
        for place, verdict, (evidence, why), other in zip(places, row["verdicts"] or (), remarks, again, strict=False):
            said = "" if other is None else f"Asked once more: {Verdict(other).name.replace('_', ' ').lower()}."
            justification = f"{why} {said}".strip()
            about = {"rollout": row["run"], "criterion": place, "verdict": verdict}
            verdicts.append(about | {"evidence": evidence, "justification": justification})
    unknown = {"description": "", "evaluator_instruction": "", "source": None, "survived": None}
    return [{"criterion": place, "title": title} | unknown for place, title in enumerate(titles)], verdicts


def _remarks(titles: Sequence[str], verdicts: Sequence[int], calls: Sequence[Row]) -> list[tuple[str, str]]:
    """Evidence and justification of each verdict, from the first reply with this verdict; empty if none was kept.

    Replies about an earlier attempt of the rollout, recognized by their prompts, are skipped.
    """
    rubric = [Criterion(title=title, description="", evaluator_instruction="") for title in titles]
    remarks = [("", "")] * len(verdicts)
    scored = [call for call in calls if call["phase"] == Score.name and call["reply"]]
    asked = first_prompt(scored)
    scored = [call for call in scored if call["prompt"].startswith(asked)]
    for call in sorted(scored, key=lambda call: call["started_at"], reverse=True):
        with contextlib.suppress(ReplyError):
            for place, entry in enumerate(parse_scores(call["reply"], rubric).value):
                if place < len(verdicts) and entry.verdict == verdicts[place]:
                    remarks[place] = (entry.evidence, entry.justification)
    return remarks


def _groups(
    key: str, step: int | None, split: str, outcomes: Outcomes, rows: Mapping[str, Mapping[str, list[Row]]]
) -> Iterator[PackedGroup]:
    """The groups of one measurement, one per task.

    Args:
        key: name of the measurement.
        step: training step of the policy.
        split: split of the tasks.
        outcomes: outcomes of the rollouts.
        rows: table -> task -> rows.
    """
    for task in sorted(rows["trajectories"].keys() & {task for task, _ in outcomes}):
        mine = {name: rows.get(name, {}).get(task, []) for name in GROUP_TABLES}
        # If a rollout was repeated, its last attempt was judged.
        last = {row["rollout"]: row["attempt"] for row in sorted(mine["trajectories"], key=lambda row: row["attempt"])}
        mine["trajectories"] = [row for row in mine["trajectories"] if row["attempt"] == last[row["rollout"]]]
        data, summary = group_content(step, task, mine)
        for shown in data["rollouts"]:
            shown["outcome"] = outcomes.get((task, shown["rollout"]))
        summary["rollouts"] = [
            [*rollout, shown["outcome"] and shown["outcome"]["success"]]
            for rollout, shown in zip(summary["rollouts"], data["rollouts"], strict=True)
        ]
        judged = any("judged" in (shown["outcome"] or ()) for shown in data["rollouts"])
        state = "judged (a stand-in, because there is no evaluator)" if judged else "evaluated"
        yield PackedGroup(summary | {"key": key, "split": split, "state": state}, pack(data))

"""What the rubrics contain, and how often their criteria pass (appendix "What the dynamic rubrics contain").

Criteria are identified by title, ignoring case and spacing: this is how they are counted over tasks and followed over
steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from draco_ray.lab.rows import collect_table, grouped
from draco_ray.records import Verdict
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row

GENERAL_FROM = 10
"""A criterion counts as general if it was written for at least this number of tasks, as in the paper."""


Tally = Counter[int]
"""Counts of scoring verdicts: +1, -1 or 0."""


COUNTED = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.NOT_APPLICABLE: "not_applicable"}


def rates(tally: Tally) -> dict[str, Any]:
    """Counts and rates: ``pass_rate`` and ``fail_rate`` of applicable verdicts, ``na_rate`` of all; 0/0 is null."""
    applicable, judgments = tally[Verdict.PASS] + tally[Verdict.FAIL], tally.total()
    return {
        "judgments": judgments,
        **{name: tally[verdict] for verdict, name in COUNTED.items()},
        "pass_rate": tally[Verdict.PASS] / applicable if applicable else None,
        "fail_rate": tally[Verdict.FAIL] / applicable if applicable else None,
        "na_rate": tally[Verdict.NOT_APPLICABLE] / judgments if judgments else None,
    }


TALLY_COLUMNS = ("int64: judgments passed failed not_applicable", "float64: pass_rate fail_rate na_rate")
"""Columns of `rates`."""


def title_key(title: str) -> str:
    """Normalized title: criteria with equal keys are the same criterion.

    >>> title_key("Fetches  complete data") == title_key("fetches complete data")
    True
    """
    return " ".join(title.casefold().split())


@collect_table("string: run", "int64: training_step", *TALLY_COLUMNS)
def pass_rates(run: RunDirectory) -> Iterator[Row]:
    """One row per training step: all scoring verdicts of the step, including those on dropped criteria."""
    verdicts = run.table("verdicts", columns=["training_step", "verdict"]).to_pylist()
    for step, mine in sorted(grouped(verdicts, "training_step").items()):
        yield {"training_step": step, **rates(Counter(row["verdict"] for row in mine))}


@collect_table("string: run", "int64: training_step", "string: title", *TALLY_COLUMNS)
def criterion_pass_rates(run: RunDirectory) -> Iterator[Row]:
    """One row per (training step, criterion title): its scoring verdicts in that step."""
    tallies: dict[tuple[int, str], Tally] = defaultdict(Counter)
    titles: dict[str, str] = {}
    for step in run.steps():
        for title, verdict in _judgments(run, step):
            titles.setdefault(title_key(title), title)
            tallies[step, title_key(title)][verdict] += 1
    for (step, key), tally in sorted(tallies.items()):
        yield {"training_step": step, "title": titles[key], **rates(tally)}


def criteria_dropped_by_union(run: RunDirectory) -> set[tuple[int, str]]:
    """(training step, `title_key`) of criteria that were proposed in a step but are in none of its rubrics.

    The union drops criteria that no rollout of a group fails, so a solved criterion gets no verdicts any more.
    """
    kept, proposed = (
        {
            (row["training_step"], title_key(row["title"]))
            for row in run.table(name, columns=["training_step", "title"]).to_pylist()
        }
        for name in ("criteria", "proposals")
    )
    return proposed - kept


@collect_table("string: run rubric title", "int64: tasks groups survived", *TALLY_COLUMNS)
def criteria_census(run: RunDirectory) -> Iterator[Row]:
    """One row per criterion of the run, most judged first.

    ``tasks``: number of tasks it was written for. ``groups``: number of rubrics that contained it. ``survived``: number
    of these groups in which some rollout failed it. ``rubric``: the run's setting, ``dynamic`` or ``static``.
    """
    criteria: dict[str, list[Row]] = defaultdict(list)
    tallies: dict[str, Tally] = defaultdict(Counter)
    for step in run.steps():
        for row in run.table("criteria", step, ["task_id", "title", "survived"]).to_pylist():
            criteria[title_key(row["title"])].append(row)
        for title, verdict in _judgments(run, step):
            tallies[title_key(title)][verdict] += 1
    rubric = rubric_kind(run)
    for key, rows in sorted(criteria.items(), key=lambda each: (-tallies[each[0]].total(), each[1][0]["title"])):
        yield {
            "rubric": rubric,
            "title": rows[0]["title"],
            "tasks": len({row["task_id"] for row in rows}),
            "groups": len(rows),
            "survived": sum(row["survived"] is True for row in rows),
            **rates(tallies[key]),
        }


@collect_table("string: run rubric scope", "int64: criteria", "float64: criteria_share judgment_share", *TALLY_COLUMNS)
def census_summary(census: pa.Table, general_from: int = GENERAL_FROM) -> Iterator[Row]:
    """Share of task-specific and of general criteria, and how often each kind fails or does not apply.

    Args:
        census: `criteria_census` of one run or several.
        general_from: number of tasks from which a criterion counts as general.
    Returns: four rows per run, for the scopes ``one task``, ``2 to <general_from - 1> tasks``,
        ``<general_from> or more tasks`` and ``all``.
    """
    for name, criteria in grouped(census.to_pylist(), "run").items():
        judgments = sum(row["judgments"] for row in criteria)
        scopes = {
            "one task": [row for row in criteria if row["tasks"] == 1],
            f"2 to {general_from - 1} tasks": [row for row in criteria if 1 < row["tasks"] < general_from],
            f"{general_from} or more tasks": [row for row in criteria if row["tasks"] >= general_from],
            "all": criteria,
        }
        for scope, members in scopes.items():
            tally: Tally = Counter({verdict: sum(row[name] for row in members) for verdict, name in COUNTED.items()})
            yield {
                "run": name,
                "rubric": criteria[0]["rubric"],
                "scope": scope,
                "criteria": len(members),
                "criteria_share": len(members) / len(criteria),
                "judgment_share": tally.total() / judgments if judgments else None,
                **rates(tally),
            }


def rubric_kind(run: RunDirectory) -> str:
    """``dynamic`` or ``static``, from the run's configuration."""
    return str(run.setting("algorithm.rubric"))


def _judgments(run: RunDirectory, step: int) -> Iterator[tuple[str, int]]:
    """(title of the criterion, verdict) of every scoring verdict of a step."""
    criteria = run.table("criteria", step, ["task_id", "criterion", "title"]).to_pylist()
    titles = {(row["task_id"], row["criterion"]): row["title"] for row in criteria}
    for row in run.table("verdicts", step, ["task_id", "criterion", "verdict"]).to_pylist():
        title = titles.get((row["task_id"], row["criterion"]))
        # In an unfinished step, a verdict may be on disk before its group's rubric.
        if title is not None:
            yield title, row["verdict"]

"""The rollouts of a step with their verdicts, a row each, as an experiment tracker shows them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from draco_ray.runs.directory import RunDirectory

VERDICTS = {1: "passed", -1: "failed", 0: "not_applicable"}


def rollout_table(run: RunDirectory, step: int) -> dict[str, list[Any]]:
    """Columns by name: the rollout, how it ended, its reward and advantage, criteria by verdict, evidence of failures.

    Reward and advantage are null for a rollout whose group was dropped.

    Raises:
        DamagedRun: a table of the run cannot be read.
    """
    titles = {
        (row["task_id"], row["criterion"]): row["title"]
        for row in run.table("criteria", step, ["task_id", "criterion", "title"]).to_pylist()
    }
    judged: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in run.table("verdicts", step, ["task_id", "rollout", "criterion", "verdict", "evidence"]).to_pylist():
        of = judged[row["task_id"], row["rollout"]]
        of[VERDICTS[row["verdict"]]].append(titles.get((row["task_id"], row["criterion"]), f"#{row['criterion']}"))
        if row["verdict"] == -1 and row["evidence"]:
            of["evidence"].append(row["evidence"])
    given = {
        (row["task_id"], row["rollout"]): row
        for row in run.table("advantages", step, ["task_id", "rollout", "reward", "advantage"]).to_pylist()
    }
    columns = ["task_id", "rollout", "ended", "turns", "steps", "reward", "advantage"]
    columns += [*VERDICTS.values(), "evidence"]
    table: dict[str, list[Any]] = {name: [] for name in columns}
    played = run.table("trajectories", step, ["task_id", "rollout", "ended", "turns", "steps"]).to_pylist()
    for row in sorted(played, key=lambda row: (row["task_id"], row["rollout"])):
        key = row["task_id"], row["rollout"]
        values = row | {name: given.get(key, {}).get(name) for name in ("reward", "advantage")}
        values |= {name: "\n".join(judged[key][name]) for name in (*VERDICTS.values(), "evidence")}
        for name, column in table.items():
            column.append(values[name])
    return table

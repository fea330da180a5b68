"""First view of a page about judged traces: one row per trace, worst first, and criteria with the traces failing."""

from __future__ import annotations

import json
from collections import defaultdict
from urllib.parse import quote

from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.traces.files import INDEX
from draco_ray.traces.keeping import LINES


def trace_rows(run: RunDirectory) -> list[Row]:
    """One row per judged trace, the lowest pass share first; traces without verdicts precede all others.

    ``reason`` is the judge's explanation of a failed criterion, preferably of one that cites steps.
    """
    steps = {(line["task_id"], line["rollout"]): line["training_step"] for line in _lines(run, INDEX)}
    rows = []
    for line in _lines(run, LINES):
        failed = [verdict for verdict in line["verdicts"] or () if verdict["verdict"] == "FAIL"]
        cited = [verdict for verdict in failed if verdict["steps"]]
        shown = (cited or failed or [None])[0]
        task, rollout = line["task_id"], line["rollout"]
        rows.append(
            {
                "name": line["trace_id"] or f"{task} {rollout}",
                "task": task,
                "source": line["source"],
                "link": f"#rollout/{steps.get((task, rollout), 1)}/{quote(task, safe='')}/{rollout}",
                "pass_share": line["pass_share"],
                "reward": line["reward"],
                "failed": [verdict["title"] for verdict in failed],
                "blamed": sorted({step for verdict in cited for step in verdict["steps"]}),
                "reason": line["error"] or (shown and (shown["explanation"] or shown["justification"])) or "",
            }
        )
    return sorted(rows, key=lambda row: -1.0 if row["pass_share"] is None else row["pass_share"])


def criterion_rows(run: RunDirectory) -> list[Row]:
    """One row per criterion title: its pass share over traces to which it applies, and the traces that failed it."""
    links = {(row["task"], row["name"]): row["link"] for row in trace_rows(run)}
    verdicts: dict[str, list[tuple[str, str, Row]]] = defaultdict(list)
    for line in _lines(run, LINES):
        name = line["trace_id"] or f"{line['task_id']} {line['rollout']}"
        for verdict in line["verdicts"] or ():
            verdicts[verdict["title"]].append((line["task_id"], name, verdict))
    rows = []
    for title, found in verdicts.items():
        failed = [(task, name) for task, name, verdict in found if verdict["verdict"] == "FAIL"]
        passed = sum(verdict["verdict"] == "PASS" for _, _, verdict in found)
        judged = passed + len(failed)
        rows.append(
            {
                "title": title,
                "judged": judged,
                "pass_share": passed / judged if judged else None,
                "failed": [{"name": name, "link": links[task, name]} for task, name in failed],
            }
        )
    return sorted(rows, key=lambda row: -len(row["failed"]))


def _lines(run: RunDirectory, name: str) -> list[Row]:
    path = run.path / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []

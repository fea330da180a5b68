"""First view of a page about judged traces: a row per trace, worst first, and criteria with the traces failing them."""

from __future__ import annotations

from collections import defaultdict
from urllib.parse import quote

from draco_ray.lab.analysis.pass_share import read_run_jsonl
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import Row
from draco_ray.traces.files import TRACES_FILE


def judged_traces(run: RunDirectory) -> tuple[list[Row], list[Row]]:
    """One row per judged trace and one per criterion title.

    Traces are sorted by pass share, lowest first, after those without verdicts. ``reason`` is the judge's
    explanation of a failed criterion, preferably of one that cites steps. Criteria are sorted by failures, most first;
    their pass share is over the traces to which they apply.
    """
    steps = {(line["task_id"], line["rollout"]): line["training_step"] for line in read_run_jsonl(run, TRACES_FILE)}
    traces, said = [], defaultdict(list)
    for line in read_run_jsonl(run):
        task, rollout = line["task_id"], line["rollout"]
        place = {
            "name": line["trace_id"] or f"{task} {rollout}",
            "link": f"#rollout/{steps.get((task, rollout), 1)}/{quote(task, safe='')}/{rollout}",
        }
        for verdict in line["verdicts"] or ():
            said[verdict["title"]].append((verdict["verdict"], place))
        failed = [verdict for verdict in line["verdicts"] or () if verdict["verdict"] == "FAIL"]
        cited = [verdict for verdict in failed if verdict["steps"]]
        shown = (cited or failed or [None])[0]
        about = {
            "source": line["source"],
            "pass_share": line["pass_share"],
            "reward": line["reward"],
            "failed": [verdict["title"] for verdict in failed],
            "blamed": sorted({step for verdict in cited for step in verdict["steps"]}),
            "reason": line["error"] or (shown and (shown["explanation"] or shown["justification"])) or "",
        }
        traces.append(place | about)
    criteria: list[Row] = []
    for title, verdicts in said.items():
        failing = [place for verdict, place in verdicts if verdict == "FAIL"]
        passed = sum(verdict == "PASS" for verdict, _ in verdicts)
        judged = passed + len(failing)
        share = passed / judged if judged else None
        criteria.append({"title": title, "judged": judged, "pass_share": share, "failed": failing})
    traces.sort(key=lambda row: -1.0 if row["pass_share"] is None else row["pass_share"])
    return traces, sorted(criteria, key=lambda row: -len(row["failed"]))

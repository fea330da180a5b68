"""Print how many held-out tasks of examples/library runs solved, by kind of request, at each evaluated step.

python jobs/library_kinds.py RUN...

Runs of several seeds are added up. Below the table: the last step minus the first, paired by task.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draco_ray.lab.evaluation.measures import difference, pass_k_measure
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations

TASKS = Path(__file__).parents[1] / "examples" / "library" / "tasks.jsonl"
KINDS = ("renewal", "fine", "against the rules")


def kind(task: dict[str, Any]) -> str:
    """The kind of request, or that it is against the rules."""
    if task["expected"]["refuse"]:
        return "against the rules"
    return "fine" if task["asked"]["waive"] else "renewal"


def main(runs: Sequence[Path]) -> None:
    """Print the table as Markdown, and the difference with its 95 % interval."""
    kinds = {task["id"]: kind(task) for task in map(json.loads, TASKS.read_text(encoding="utf-8").splitlines())}
    print(f"| step | {' | '.join(KINDS)} |\n|{'---|' * (1 + len(KINDS))}")
    found = [{step: part for (step, _), part in read_evaluations(RunDirectory.open(run)).items()} for run in runs]
    steps = sorted(set.intersection(*map(set, found)))
    for step in steps:
        rollouts = [each for of_run in found for each in of_run[step]]
        played = Counter(kinds[each.task_id] for each in rollouts)
        solved = Counter(kinds[each.task_id] for each in rollouts if each.success)
        print(f"| {step} | {' | '.join(f'{solved[name]} of {played[name]}' for name in KINDS)} |")
    first, last = (pass_k_measure([[of_run[step]] for of_run in found], 1) for step in (steps[0], steps[-1]))
    gain, _ = difference(last, first)
    print(f"\ndifference {100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}] points")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
